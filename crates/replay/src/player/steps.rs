//! The steps of threads, in order of time.
//!
//! In an open loop each step is due at its recorded time. In a closed loop a waiting request blocks its thread, and so delays all
//! later steps of that thread:
//!
//! ```text
//!  thread ──▶ does the next step return a buffer that another thread requested?
//!              ├─ no ──▶ due after its gap, and after the request that it follows
//!              └─ yes ─▶ the first of its consecutive returns that has a ready buffer; until then the thread is idle
//! ```
//!
//! So a thread that receives buffers from a queue receives the buffers that are ready, as in the program, and in recorded
//! order if several are ready. If nothing is due while requests wait, idle threads first return the buffers that they hold.

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
#[derive(Default)]
pub(super) struct Thread<'a> {
    pub(super) steps: &'a [Step],
    /// Whether each step is done.
    is_done: Vec<bool>,
    place: usize,
    ended_ns: u64,
    /// The steps from `place` up to here return buffers of other threads.
    returns_until: usize,
    /// Indexes of these returns with a filled buffer.
    ready: BTreeSet<usize>,
    is_idle: bool,
}

/// The next step of each thread.
#[derive(Default)]
pub(super) struct Schedule<'a> {
    pub(super) is_closed: bool,
    pub(super) threads: Vec<Thread<'a>>,
    /// Events by time; simultaneous events in recorded order.
    due: BinaryHeap<Reverse<(u64, u64, Due)>>,
    /// Time at which each request was served, by its buffer.
    got_ns: HashMap<usize, u64>,
    /// Steps that follow a request that is not served yet, by the buffer of that request.
    blocked: HashMap<usize, Vec<StepId>>,
}

impl<'a> Schedule<'a> {
    pub(super) fn new(threads: &'a [Vec<Step>], is_closed: bool) -> Self {
        let thread = |steps: &'a Vec<Step>| Thread { steps, is_done: vec![false; steps.len()], ..Thread::default() };
        let mut schedule = Self { is_closed, threads: threads.iter().map(thread).collect(), ..Self::default() };
        (0..threads.len()).for_each(|thread| schedule.plan(thread, 0));
        schedule
    }

    /// Returns the time at which the next event is due.
    pub(super) fn next_us(&self) -> Option<u64> {
        self.due.peek().map(|Reverse((at_ns, ..))| at_ns / 1_000)
    }

    /// Returns the next event if it is due at `now_us`, and its time in nanoseconds.
    pub(super) fn pop(&mut self, now_us: u64) -> Option<(u64, Due)> {
        self.next_us().filter(|&next_us| next_us <= now_us)?;
        self.due.pop().map(|Reverse((at_ns, _, due))| (at_ns, due))
    }

    /// Frees a buffer later, after the device has read it.
    pub(super) fn free_later(&mut self, at_ns: u64, line: u64, name: usize) {
        self.due.push(Reverse((at_ns, line, Due::Free(name))));
    }

    /// Records that a thread completed a step.
    pub(super) fn finish(&mut self, (thread, place): StepId, now_ns: u64) {
        self.threads[thread].is_done[place] = true;
        self.threads[thread].ended_ns = now_ns;
        self.plan(thread, now_ns);
    }

    /// Returns the time at which the request that a step follows was served, plus the time in between; 0 if the step follows
    /// no request. Returns `None` if the request is not served yet: the step is planned once it is served.
    fn followed_ns(&mut self, step: StepId) -> Option<u64> {
        let Some((name, after_ns)) = self.threads[step.0].steps[step.1].follows else { return Some(0) };
        let Some(got_ns) = self.got_ns.get(&name) else {
            self.blocked.entry(name).or_default().push(step);
            return None;
        };
        Some(got_ns + after_ns)
    }

    /// Schedules the next step of a thread, or marks it idle.
    fn plan(&mut self, at: usize, now_ns: u64) {
        let thread = &mut self.threads[at];
        while thread.is_done.get(thread.place) == Some(&true) {
            thread.place += 1;
        }
        let (steps, place) = (thread.steps, thread.place);
        let Some(next) = steps.get(place) else { return };
        if !self.is_closed {
            self.due.push(Reverse((next.at_ns, next.line, Due::Step((at, place)))));
        } else if next.is_foreign_return() {
            let ready = thread.ready.pop_first();
            thread.is_idle = ready.is_none();
            self.due.extend(ready.map(|ready| thread.due(at, ready, now_ns)));
            if place >= thread.returns_until {
                let returns = steps[place..].iter().take_while(|step| step.is_foreign_return()).count();
                thread.returns_until = place + returns;
                (place..place + returns).for_each(|place| self.plan_ready((at, place), now_ns));
            }
        } else if let Some(followed_ns) = self.followed_ns((at, place)) {
            self.due.push(self.threads[at].due(at, place, followed_ns));
        }
    }

    /// Schedules the time at which the buffer of a return is filled.
    fn plan_ready(&mut self, step: StepId, now_ns: u64) {
        if let Some(ready_ns) = self.followed_ns(step) {
            self.due.push(Reverse((ready_ns.max(now_ns), self.threads[step.0].steps[step.1].line, Due::Ready(step))));
        }
    }

    /// Records that the buffer of a return is filled.
    pub(super) fn ready(&mut self, (thread, place): StepId, now_ns: u64) {
        self.threads[thread].ready.insert(place);
        if self.threads[thread].is_idle {
            self.plan(thread, now_ns);
        }
    }

    /// Continues a thread after its request was served, and the threads that follow it.
    pub(super) fn served(&mut self, step: StepId, name: usize, now_ns: u64) {
        self.got_ns.insert(name, now_ns);
        self.finish(step, now_ns);
        for (thread, place) in self.blocked.remove(&name).unwrap_or_default() {
            match self.threads[thread].steps[place].is_foreign_return() {
                true => self.plan_ready((thread, place), now_ns),
                false => self.plan(thread, now_ns),
            }
        }
    }

    /// Lets idle threads return buffers that they hold.
    pub(super) fn return_held(&mut self, now_ns: u64) {
        for (at, thread) in self.threads.iter_mut().enumerate().filter(|(_, thread)| thread.is_idle) {
            let puts = thread.steps.iter().enumerate().skip(thread.returns_until);
            let mut puts = puts.take_while(|(_, step)| matches!(step.operation, Op::Put { .. }));
            let is_held = |step: &Step| matches!(step.operation, Op::Put { name } if self.got_ns.contains_key(&name));
            if let Some((place, _)) = puts.find(|(place, step)| !thread.is_done[*place] && is_held(step)) {
                thread.is_idle = false;
                self.due.push(thread.due(at, place, now_ns));
            }
        }
    }
}

impl Thread<'_> {
    /// Returns the event of the step at `place`, which may begin at `from_ns` at the earliest.
    fn due(&self, at: usize, place: usize, from_ns: u64) -> Reverse<(u64, u64, Due)> {
        let Step { line, gap_ns, .. } = self.steps[place];
        Reverse((self.ended_ns.saturating_add(gap_ns).max(from_ns), line, Due::Step((at, place))))
    }
}
