//! The steps of threads, in order of time.
//!
//! In an open loop each step is due at its recorded time. In a closed loop a waiting request blocks its thread, and so delays all
//! later steps of that thread:
//!
//! ```text
//!  thread ──▶ does the next step return a buffer that another thread requested?
//!              ├─ no ──▶ due after its gap, and after the request that it follows
//!              └─ yes ─▶ of the returns before its next other step, the first with a ready buffer; the thread is idle until then
//! ```
//!
//! So a thread that receives buffers from a queue receives the ready ones, as in the program, and in recorded order if several are
//! ready. If nothing is due while requests wait, idle threads first return the buffers that they hold.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};

use crate::threads::{Op, Step, StepId};

/// An event of the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Due {
    Step(StepId),
    /// A return with a filled buffer.
    Ready(StepId),
    /// The device has finished reading this buffer.
    Free(usize),
}

/// A thread and its progress.
pub(super) struct Thread<'a> {
    pub(super) steps: &'a [Step],
    /// For each step.
    is_done: Vec<bool>,
    place: usize,
    ended_ns: u64,
    /// The steps from `place` up to here return buffers of other threads.
    searched_until: usize,
    /// Indexes of the returns with ready buffers.
    ready: BTreeSet<usize>,
    is_idle: bool,
}

/// The next step of each thread.
pub(super) struct Schedule<'a> {
    pub(super) is_closed: bool,
    pub(super) threads: Vec<Thread<'a>>,
    /// Events by time; simultaneous events in recorded order.
    pub(super) due: BinaryHeap<Reverse<(u64, u64, Due)>>,
    /// When each request was served.
    got_ns: HashMap<usize, u64>,
    /// The step that returns a buffer of another thread.
    foreign_returns: HashMap<usize, StepId>,
    /// Threads that wait to follow a request that is not served yet.
    blocked: HashMap<usize, Vec<usize>>,
}

/// Returns whether the step returns a buffer that another thread requested.
fn is_foreign_return(step: &Step) -> bool {
    matches!(step.operation, Op::Put { .. }) && step.follows.is_some()
}

impl<'a> Schedule<'a> {
    pub(super) fn new(threads: &'a [Vec<Step>], is_closed: bool) -> Self {
        let foreign_returns = threads.iter().enumerate().flat_map(|(thread, steps)| {
            let steps = steps.iter().enumerate().filter(|(_, step)| is_foreign_return(step));
            steps.filter_map(move |(place, step)| Some((step.follows?.0, (thread, place))))
        });
        let thread = |steps: &'a Vec<Step>| Thread {
            steps,
            is_done: vec![false; steps.len()],
            place: 0,
            ended_ns: 0,
            searched_until: 0,
            ready: BTreeSet::new(),
            is_idle: false,
        };
        let mut schedule = Self {
            is_closed,
            foreign_returns: foreign_returns.collect(),
            threads: threads.iter().map(thread).collect(),
            due: BinaryHeap::new(),
            got_ns: HashMap::new(),
            blocked: HashMap::new(),
        };
        (0..threads.len()).for_each(|thread| schedule.plan(thread, 0));
        schedule
    }

    /// Records that a thread completed a step.
    pub(super) fn finish(&mut self, (thread, place): StepId, now_ns: u64) {
        self.threads[thread].is_done[place] = true;
        self.threads[thread].ended_ns = now_ns;
        self.plan(thread, now_ns);
    }

    /// Schedules the next step of a thread, or marks it idle.
    fn plan(&mut self, at: usize, now_ns: u64) {
        let thread = &mut self.threads[at];
        while thread.is_done.get(thread.place) == Some(&true) {
            thread.place += 1;
        }
        let Some(&next) = thread.steps.get(thread.place) else { return };
        if !self.is_closed {
            return self.due.push(Reverse((next.at_ns, next.line, Due::Step((at, thread.place)))));
        }
        if !is_foreign_return(&next) {
            let followed_ns = next.follows.map_or(Some(0), |(name, after_ns)| Some(self.got_ns.get(&name)? + after_ns));
            match (followed_ns, next.follows) {
                (None, Some((name, _))) => self.blocked.entry(name).or_default().push(at),
                (followed_ns, _) => {
                    let due_ns = thread.ended_ns.saturating_add(next.gap_ns).max(followed_ns.unwrap_or(0));
                    self.due.push(Reverse((due_ns, next.line, Due::Step((at, thread.place)))));
                }
            }
            return;
        }
        if thread.place >= thread.searched_until {
            let returns = thread.steps[thread.place..].iter().take_while(|step| is_foreign_return(step)).count();
            thread.searched_until = thread.place + returns;
            let got_ns =
                |step: &Step| step.follows.and_then(|(name, after_ns)| Some(self.got_ns.get(&name)? + after_ns));
            for (place, step) in thread.steps.iter().enumerate().take(thread.searched_until).skip(thread.place) {
                if let Some(ready_ns) = got_ns(step) {
                    self.due.push(Reverse((ready_ns.max(now_ns), step.line, Due::Ready((at, place)))));
                }
            }
        }
        match thread.ready.pop_first() {
            Some(place) => self.due.push(thread.due_return(at, place, now_ns)),
            None => thread.is_idle = true,
        }
    }

    /// Records that the buffer of a return is filled.
    pub(super) fn ready(&mut self, (thread, place): StepId, now_ns: u64) {
        self.threads[thread].ready.insert(place);
        if std::mem::take(&mut self.threads[thread].is_idle) {
            self.plan(thread, now_ns);
        }
    }

    /// Continues a thread after its request was served, and the threads that follow it.
    pub(super) fn served(&mut self, step: StepId, name: usize, now_ns: u64) {
        self.got_ns.insert(name, now_ns);
        self.finish(step, now_ns);
        if let Some(&(thread, place)) = self.foreign_returns.get(&name)
            && let Thread { steps, searched_until, .. } = &self.threads[thread]
            && place < *searched_until
        {
            let after_ns = steps[place].follows.map_or(0, |(_, after_ns)| after_ns);
            self.due.push(Reverse((now_ns + after_ns, steps[place].line, Due::Ready((thread, place)))));
        }
        for thread in self.blocked.remove(&name).unwrap_or_default() {
            self.plan(thread, now_ns);
        }
    }

    /// Lets idle threads return buffers that they hold.
    pub(super) fn return_held(&mut self, now_ns: u64) {
        for (at, thread) in self.threads.iter_mut().enumerate().filter(|(_, thread)| thread.is_idle) {
            let puts = thread.steps.iter().enumerate().skip(thread.searched_until);
            let mut puts = puts.take_while(|(_, step)| matches!(step.operation, Op::Put { .. }));
            let is_held = |step: &Step| matches!(step.operation, Op::Put { name } if self.got_ns.contains_key(&name));
            if let Some((place, _)) = puts.find(|(place, step)| !thread.is_done[*place] && is_held(step)) {
                thread.is_idle = false;
                self.due.push(thread.due_return(at, place, now_ns));
            }
        }
    }
}

impl Thread<'_> {
    /// The event of the return at `place`.
    fn due_return(&self, at: usize, place: usize, now_ns: u64) -> Reverse<(u64, u64, Due)> {
        let Step { line, gap_ns, .. } = self.steps[place];
        Reverse((self.ended_ns.saturating_add(gap_ns).max(now_ns), line, Due::Step((at, place))))
    }
}
