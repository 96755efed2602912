//! The steps of each thread of a recording, and the time between them. A closed-loop replay delays the steps that follow a wait.
//!
//! The replay keeps the time between two operations of a thread, except for waits at the limit, which it repeats. It also keeps the
//! time that a request took in addition to its wait; otherwise threads that depend on each other would drift apart.
//!
//! A thread that returns the buffer of another thread waits for two things: its own work since its last step, and the other thread,
//! which fills the buffer. The recording shows only the later of the two:
//!
//! ```text
//!  producer   request ── fills ──▶ next request (at the latest now the buffer is handed over)
//!  consumer        last step ── own time ──▶ return
//! ```
//!
//! If the buffer was handed over before the consumer's last step, the consumer was busy since that step. Otherwise it may have been
//! idle: its own time is then at most the median of its busy steps, and the replay keeps the time since the request. A busy consumer
//! keeps a buffer at least as long after the hand-over as an idle consumer does (the median).
//!
//! A thread that starts after a wait follows that wait: another thread started it or handed work to it. Memory in use by a device
//! becomes free as long after its return as recorded.

use std::collections::{HashMap, HashSet};

use pinpool_observe::record::{Event, Record};

/// Threads queue to wait one at a time if at most one request in this many begins while another waits.
const CONCURRENT_PART: usize = 16;

/// An operation of a thread. Each buffer has a unique number.
#[derive(Debug, Clone, Copy)]
pub(super) enum Op {
    Get { name: u64, bytes: u64 },
    Put { name: u64 },
    Clear,
}

/// One operation of a thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    /// Number of the record.
    pub(super) line: u64,
    /// When it began, in nanoseconds since the recording began.
    pub(super) at_ns: u64,
    /// The buffer of the request that it follows, and the nanoseconds in between.
    pub(super) follows: Option<(u64, u64)>,
    /// Nanoseconds since the last step of the thread ended.
    pub(super) gap_ns: u64,
    /// The part of the gap in which the thread waited for its turn to request memory, because other threads waited for memory.
    pub(super) queued_ns: u64,
    /// The part of the gap that the thread spent in driver calls.
    pub(super) calls_ns: u64,
    pub(super) operation: Op,
    /// Time from a return until the memory is free; `None` if it never is.
    pub(super) free_after_ns: Option<u64>,
}

/// A return of a buffer that another thread requested.
#[derive(Debug, Clone, Copy)]
struct ForeignReturn {
    thread: usize,
    place: usize,
    name: u64,
    got_ns: u64,
    /// When the last step of the thread ended.
    before_ns: u64,
    put_ns: u64,
}

/// The threads of a recording while it is read.
#[derive(Debug, Default)]
pub(super) struct Threads {
    steps: Vec<Vec<Step>>,
    ended_ns: Vec<u64>,
    began_ns: u64,
    /// The names of the held buffers, by pool and memory.
    held: HashMap<(u32, u64), u64>,
    last_name: u64,
    /// When the last buffer was returned.
    last_put_ns: u64,
    /// The thread that requested each held buffer, and when.
    got: HashMap<u64, (u32, u64)>,
    /// The buffer that the last step of each thread requested.
    last_got: HashMap<usize, u64>,
    /// When the thread that requested a buffer began its next step.
    left_ns: HashMap<u64, u64>,
    /// When another thread returned a buffer.
    taken_ns: HashMap<u64, u64>,
    taken: Vec<ForeignReturn>,
    /// Requests that waited, in the order in which they ended: start, end and buffer.
    waits: Vec<(u64, u64, u64)>,
    /// When the last request began.
    asked_ns: u64,
    /// Requests that began while another waited.
    concurrent: usize,
    /// Threads that are in the wait queue.
    queued: HashSet<u32>,
    /// `true` if any request waited.
    pub(super) has_waited: bool,
    /// Time that each thread spent in driver calls since its last step.
    called_ns: HashMap<u32, u64>,
    /// Returns of buffers with copies in flight: thread, index of the step, and time.
    in_flight: HashMap<(u32, u64), (usize, usize, u64)>,
}

impl Threads {
    /// The threads of a recording that began at this time.
    pub(super) fn new(began_ns: u64) -> Self {
        Self { began_ns, ..Self::default() }
    }

    /// Adds a record. Returns the name of the buffer that it frees, and of the buffer that it provides. If records were lost, a buffer
    /// that is requested again counts as returned, and a return without a request is ignored.
    pub(super) fn add(&mut self, line: u64, record: &Record) -> (Option<u64>, Option<u64>) {
        let Record { time_ns, event, pool, thread } = *record;
        let key = event.buffer().map(|id| (pool, id));
        match (event, key) {
            (Event::Get { bytes, took_ns, .. }, Some(key)) => {
                let began_ns = time_ns.saturating_sub(self.waited(thread, took_ns));
                let freed = self.free(line, record, key, began_ns);
                self.last_name += 1;
                self.held.insert(key, self.last_name);
                self.push(line, record, began_ns, Op::Get { name: self.last_name, bytes }, None);
                (freed, Some(self.last_name))
            }
            (Event::Put { in_flight: true, .. }, Some(key)) => {
                if let Some(&name) = self.held.get(&key) {
                    let (thread, place) = self.push(line, record, time_ns, Op::Put { name }, None);
                    self.in_flight.insert(key, (thread, place, time_ns));
                }
                (None, None)
            }
            (Event::Completed { .. }, Some(key)) if !self.in_flight.contains_key(&key) => (None, None),
            (Event::Put { .. } | Event::Completed { .. } | Event::Gone { .. }, Some(key)) => {
                (self.free(line, record, key, time_ns), None)
            }
            (Event::Waited, _) => {
                self.queued.insert(thread);
                (None, None)
            }
            (Event::Refused { took_ns, .. }, _) => {
                self.waited(thread, took_ns);
                (None, None)
            }
            (Event::Cleared, _) => {
                self.push(line, record, time_ns, Op::Clear, None);
                (None, None)
            }
            _ => (None, None),
        }
    }

    /// Records that the memory of a held buffer is free, by a return or after its copies.
    fn free(&mut self, line: u64, record: &Record, key: (u32, u64), began_ns: u64) -> Option<u64> {
        let name = self.held.remove(&key)?;
        match self.in_flight.remove(&key) {
            Some((thread, at, put_ns)) => self.steps[thread][at].free_after_ns = Some(record.time_ns - put_ns),
            None => _ = self.push(line, record, began_ns, Op::Put { name }, Some(0)),
        }
        Some(name)
    }

    /// Records the duration of a driver call of the thread.
    pub(super) fn called(&mut self, thread: u32, took_ns: u64) {
        *self.called_ns.entry(thread).or_default() += took_ns;
    }

    /// The time that a request waited, given its duration: driver calls of the thread do not count.
    fn waited(&mut self, thread: u32, took_ns: u64) -> u64 {
        let is_queued = self.queued.remove(&thread);
        let called_ns = self.called_ns.get(&thread).copied().unwrap_or(0);
        let waited_ns = if is_queued { took_ns.saturating_sub(called_ns) } else { 0 };
        self.has_waited |= waited_ns > 0;
        waited_ns
    }

    /// Adds a step that began at `began_ns` and ended with the record. Returns the thread and the index of the step.
    fn push(
        &mut self,
        line: u64,
        record: &Record,
        began_ns: u64,
        operation: Op,
        free_after_ns: Option<u64>,
    ) -> (usize, usize) {
        let thread = record.thread as usize;
        if self.steps.len() <= thread {
            self.steps.resize_with(thread + 1, Vec::new);
            self.ended_ns.resize(thread + 1, self.began_ns);
        }
        let (before_ns, place, time_ns) = (self.ended_ns[thread], self.steps[thread].len(), record.time_ns);
        let mut gap_ns = began_ns.saturating_sub(before_ns);
        let last_got = self.last_got.remove(&thread);
        let queued_ns = last_got.map_or(0, |name| {
            self.left_ns.insert(name, began_ns);
            self.taken_ns.get(&name).map_or(0, |&taken_ns| self.waited_between(before_ns.max(taken_ns), began_ns))
        });
        let mut follows = None;
        match operation {
            Op::Get { name, .. } => {
                let waited = &self.waits[..self.waits.partition_point(|&(_, until_ns, _)| until_ns <= began_ns)];
                if let (0, Some(&(_, until_ns, last))) = (place, waited.last()) {
                    (follows, gap_ns) = (Some((last, began_ns - until_ns)), 0);
                }
                let waits_until_ns = self.waits.last().map_or(0, |&(_, until_ns, _)| until_ns);
                let is_concurrent = waits_until_ns > began_ns || (time_ns > began_ns && self.asked_ns > began_ns);
                self.concurrent += usize::from(is_concurrent);
                self.asked_ns = self.asked_ns.max(began_ns);
                if time_ns > began_ns {
                    self.waits.push((began_ns, time_ns, name));
                }
                self.got.insert(name, (record.thread, time_ns));
                self.last_got.insert(thread, name);
            }
            Op::Put { name } => {
                self.last_put_ns = time_ns;
                if let Some((_, got_ns)) = self.got.remove(&name).filter(|&(by, _)| by != record.thread) {
                    follows = Some((name, 0));
                    self.taken_ns.insert(name, time_ns);
                    self.taken.push(ForeignReturn { thread, place, name, got_ns, before_ns, put_ns: time_ns });
                }
            }
            Op::Clear => {}
        }
        self.ended_ns[thread] = time_ns;
        let calls_ns = self.called_ns.remove(&record.thread).unwrap_or(0);
        let at_ns = began_ns.saturating_sub(self.began_ns);
        self.steps[thread].push(Step { line, at_ns, follows, gap_ns, queued_ns, calls_ns, operation, free_after_ns });
        (thread, place)
    }

    /// Time that requests waited between these times, if one waits at a time.
    fn waited_between(&self, from_ns: u64, to_ns: u64) -> u64 {
        let waits = self.waits.iter().rev().take_while(|&&(_, until_ns, _)| until_ns > from_ns);
        waits.map(|&(since_ns, until_ns, _)| until_ns.min(to_ns).saturating_sub(since_ns.max(from_ns))).sum()
    }

    /// Nanoseconds from the first record to the last return.
    pub(super) fn ended_ns(&self) -> u64 {
        self.last_put_ns.saturating_sub(self.began_ns)
    }

    pub(super) fn into_steps(self) -> Vec<Vec<Step>> {
        let Self { mut steps, left_ns, taken, waits, concurrent, .. } = self;
        // A thread was busy if a buffer was handed over before its last step.
        let left_ns = |taken: &ForeignReturn| left_ns.get(&taken.name).copied();
        let busy_ns = |taken: &ForeignReturn| left_ns(taken).filter(|&left_ns| left_ns <= taken.before_ns);
        let own_ns = medians(&taken, |taken| busy_ns(taken).map(|_| taken.put_ns - taken.before_ns));
        let held_ns = medians(&taken, |taken| match busy_ns(taken) {
            None => taken.put_ns.checked_sub(left_ns(taken)?),
            Some(_) => None,
        });
        for taken in &taken {
            let step = &mut steps[taken.thread][taken.place];
            let of = |medians: &HashMap<usize, u64>| medians.get(&taken.thread).copied().unwrap_or(0);
            let mut after_ns = taken.put_ns - taken.got_ns;
            match busy_ns(taken) {
                Some(left_ns) => after_ns = after_ns.min(left_ns.saturating_sub(taken.got_ns) + of(&held_ns)),
                None => step.gap_ns = step.gap_ns.min(of(&own_ns)),
            }
            step.follows = Some((taken.name, after_ns));
        }
        if concurrent > waits.len() / CONCURRENT_PART {
            steps.iter_mut().flatten().for_each(|step| step.queued_ns = 0);
        }
        steps
    }
}

/// The median of each thread.
fn medians(taken: &[ForeignReturn], ns: impl Fn(&ForeignReturn) -> Option<u64>) -> HashMap<usize, u64> {
    let mut all = HashMap::<usize, Vec<u64>>::new();
    taken.iter().for_each(|taken| all.entry(taken.thread).or_default().extend(ns(taken)));
    let median = |(thread, mut all): (usize, Vec<u64>)| {
        all.sort_unstable();
        Some((thread, *all.get(all.len() / 2)?))
    };
    all.into_iter().filter_map(median).collect()
}
