//! The steps of each thread of a recording, and the time between them. A closed-loop replay delays the steps that follow a wait.
//!
//! The replay keeps the time between two operations of a thread, except for waits at the limit, which it simulates. It also
//! keeps the time that a request took in addition to its wait; otherwise threads that depend on each other would drift apart.
//!
//! A thread that returns the buffer of another thread waits for two things: its own work since its last step, and the other
//! thread, which fills the buffer. The recording shows only the later of the two:
//!
//! ```text
//!  producer   request ── fills ──▶ next request (at the latest now the buffer is handed over)
//!  consumer        last step ── own time ──▶ return
//! ```
//!
//! If the buffer was handed over before the consumer's last step, the consumer was busy since that step. Otherwise it may have
//! been idle: its own time is then at most the median of its busy steps, and the replay keeps the time since the request. A busy
//! consumer keeps a buffer at least as long after the hand-over as an idle consumer does (the median). An idle consumer that
//! keeps a buffer [`PAUSE_FACTOR`] times as long as usual has paused, and counts as busy: otherwise it would return the next
//! buffers during the pause.
//!
//! A thread that starts after a wait follows that wait: another thread started it or handed work to it. Memory in use by a device
//! becomes free as long after its return as recorded.

use std::collections::{BTreeMap, HashMap};
use std::mem;

use pinpool_observe::record::{Event, Record};

/// Threads count as waiting one at a time if, for this many waits, at most one request begins while another request waits.
const CONCURRENT_PART: usize = 16;

/// A consumer has paused if it keeps a buffer more than this many times as long as usual (the larger of the two medians).
const PAUSE_FACTOR: u64 = 16;

/// A thread and the index of its step.
pub(super) type StepId = (usize, usize);

/// An operation of a thread. Each buffer has a number.
#[derive(Debug, Clone, Copy)]
pub(super) enum Op {
    Get { name: usize, bytes: u64 },
    Put { name: usize },
    Clear,
}

/// An operation of a thread with its times.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    /// Number of the record.
    pub(super) line: u64,
    /// Time at which the step began, in nanoseconds since the recording began.
    pub(super) at_ns: u64,
    /// The buffer of the request that this step follows, and the nanoseconds from that request to this step.
    pub(super) follows: Option<(usize, u64)>,
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

impl Step {
    /// Returns whether the step returns a buffer that another thread requested.
    pub(super) fn is_foreign_return(&self) -> bool {
        matches!(self.operation, Op::Put { .. }) && self.follows.is_some()
    }
}

/// A thread while the recording is read.
#[derive(Debug, Default)]
struct Thread {
    steps: Vec<Step>,
    ended_ns: u64,
    /// The buffer that the last step requested.
    last_got: Option<usize>,
    /// Time in driver calls since the last step.
    called_ns: u64,
    /// `true` if the thread is in the wait queue.
    is_queued: bool,
}

#[derive(Debug)]
struct Buffer {
    bytes: u64,
    /// The thread that requested the buffer, and the time at which it received the buffer.
    got: (u32, u64),
    /// Time at which that thread began its next step.
    passed_ns: Option<u64>,
    /// Time at which another thread returned the buffer.
    taken_ns: Option<u64>,
}

/// The threads of a recording while it is read.
#[derive(Debug, Default)]
pub(super) struct Threads {
    threads: BTreeMap<usize, Thread>,
    buffers: Vec<Buffer>,
    /// The held buffers, by pool and memory: the number of each, and the step that returned it with copies in flight.
    held: HashMap<(u32, u64), (usize, Option<StepId>)>,
    /// Sum of the bytes of the held buffers.
    pub(super) held_bytes: u64,
    /// Time at which the last buffer was returned.
    pub(super) last_put_ns: u64,
    /// Requests that waited, in the order in which they ended: start, end and buffer.
    waits: Vec<(u64, u64, usize)>,
    /// The latest time at which a request began.
    asked_ns: u64,
    /// Requests that began while another waited.
    concurrent: usize,
    /// `true` if any request waited.
    pub(super) has_waited: bool,
}

impl Threads {
    fn thread(&mut self, number: usize) -> &mut Thread {
        self.threads.entry(number).or_default()
    }

    /// Adds a record, with its time since the recording began. Returns whether a buffer was requested or became free. If records
    /// were lost, a buffer that is requested again counts as returned, and a return without a request is ignored.
    pub(super) fn add(&mut self, line: u64, record: &Record) -> bool {
        let Record { time_ns, event, pool, thread } = *record;
        let (key, at) = ((pool, event.buffer().unwrap_or_default()), thread as usize);
        match event {
            Event::Get { bytes, took_ns, .. } => {
                let began_ns = time_ns.saturating_sub(self.waited(at, took_ns));
                self.free(line, record, key, began_ns);
                let (name, bytes) = (self.buffers.len(), bytes.min(u64::MAX - self.held_bytes));
                self.held_bytes += bytes;
                self.held.insert(key, (name, None));
                self.buffers.push(Buffer { bytes, got: (thread, time_ns), passed_ns: None, taken_ns: None });
                self.push(line, record, began_ns, Op::Get { name, bytes });
                return true;
            }
            Event::Put { in_flight: true, .. } => {
                if let Some(&(name, _)) = self.held.get(&key) {
                    let step = self.push(line, record, time_ns, Op::Put { name });
                    self.held.insert(key, (name, Some(step)));
                }
            }
            Event::Completed { .. } if self.held.get(&key).is_none_or(|(_, returned)| returned.is_none()) => {}
            Event::Put { .. } | Event::Completed { .. } | Event::Gone { .. } => {
                return self.free(line, record, key, time_ns);
            }
            Event::Waited => self.thread(at).is_queued = true,
            Event::Refused { took_ns, .. } => _ = self.waited(at, took_ns),
            Event::Cleared => _ = self.push(line, record, time_ns, Op::Clear),
            Event::Pin { took_ns, .. } | Event::Unpin { took_ns, .. } | Event::Move { took_ns, .. } => {
                self.thread(at).called_ns += took_ns;
            }
            _ => {}
        }
        false
    }

    /// Records that the memory of a held buffer is free, by a return or after its copies. Returns whether the buffer was held.
    fn free(&mut self, line: u64, record: &Record, key: (u32, u64), began_ns: u64) -> bool {
        let Some((name, returned)) = self.held.remove(&key) else { return false };
        self.held_bytes -= self.buffers[name].bytes;
        let (thread, at) = returned.unwrap_or_else(|| self.push(line, record, began_ns, Op::Put { name }));
        let step = &mut self.thread(thread).steps[at];
        step.free_after_ns = Some(returned.map_or(0, |_| record.time_ns - step.at_ns));
        true
    }

    /// Returns the time that a request of this duration waited: 0 if it was not in the wait queue. Driver calls of the thread
    /// do not count.
    fn waited(&mut self, thread: usize, took_ns: u64) -> u64 {
        let thread = self.thread(thread);
        let waited_ns = if mem::take(&mut thread.is_queued) { took_ns.saturating_sub(thread.called_ns) } else { 0 };
        self.has_waited |= waited_ns > 0;
        waited_ns
    }

    /// Adds a step that began at `began_ns` and ended with the record. Returns its ID.
    fn push(&mut self, line: u64, record: &Record, began_ns: u64, operation: Op) -> StepId {
        let (time_ns, at) = (record.time_ns, record.thread as usize);
        let thread = self.thread(at);
        let step = (at, thread.steps.len());
        let before_ns = mem::replace(&mut thread.ended_ns, time_ns);
        let (last_got, calls_ns) = (thread.last_got.take(), mem::take(&mut thread.called_ns));
        let mut gap_ns = began_ns.saturating_sub(before_ns);
        let queued_ns = last_got.map_or(0, |name| {
            self.buffers[name].passed_ns = Some(began_ns);
            let taken_ns = self.buffers[name].taken_ns;
            taken_ns.map_or(0, |taken_ns| self.waited_between(before_ns.max(taken_ns), began_ns))
        });
        let mut follows = None;
        match operation {
            Op::Get { name, .. } => {
                let waited = &self.waits[..self.waits.partition_point(|&(_, until_ns, _)| until_ns <= began_ns)];
                if let (0, Some(&(_, until_ns, last))) = (step.1, waited.last()) {
                    (follows, gap_ns) = (Some((last, began_ns - until_ns)), 0);
                }
                let waits_until_ns = self.waits.last().map_or(0, |&(_, until_ns, _)| until_ns);
                let is_concurrent = waits_until_ns > began_ns || (time_ns > began_ns && self.asked_ns > began_ns);
                self.concurrent += usize::from(is_concurrent);
                self.asked_ns = self.asked_ns.max(began_ns);
                if time_ns > began_ns {
                    self.waits.push((began_ns, time_ns, name));
                }
                self.thread(at).last_got = Some(name);
            }
            Op::Put { name } => {
                self.last_put_ns = time_ns;
                let buffer = &mut self.buffers[name];
                if buffer.got.0 != record.thread {
                    follows = Some((name, 0));
                    buffer.taken_ns = Some(time_ns);
                }
            }
            Op::Clear => {}
        }
        let done = Step { line, at_ns: began_ns, follows, gap_ns, queued_ns, calls_ns, operation, free_after_ns: None };
        self.thread(at).steps.push(done);
        step
    }

    /// Returns the time that requests waited between these times, if one waits at a time.
    fn waited_between(&self, from_ns: u64, to_ns: u64) -> u64 {
        let waits = self.waits.iter().rev().take_while(|&&(_, until_ns, _)| until_ns > from_ns);
        waits.map(|&(since_ns, until_ns, _)| until_ns.min(to_ns).saturating_sub(since_ns.max(from_ns))).sum()
    }

    pub(super) fn into_steps(self) -> Vec<Vec<Step>> {
        let Self { threads, buffers, waits, concurrent, .. } = self;
        let mut steps: Vec<_> = threads.into_values().map(|thread| thread.steps).collect();
        steps.iter_mut().for_each(|steps| follow_requests(steps, &buffers));
        if concurrent > waits.len() / CONCURRENT_PART {
            steps.iter_mut().flatten().for_each(|step| step.queued_ns = 0);
        }
        steps
    }
}

/// Sets the own time of a thread before each return of another thread's buffer, and the time since the request.
fn follow_requests(steps: &mut [Step], buffers: &[Buffer]) {
    let passed_ns = |step: &Step| buffers[step.follows?.0].passed_ns;
    // The thread was busy if the buffer was handed over before its last step.
    let busy_ns = |step: &Step| passed_ns(step).filter(|&passed_ns| passed_ns <= step.at_ns - step.gap_ns);
    let returns = || steps.iter().filter(|step| step.is_foreign_return());
    let own_ns = median(returns().filter(|step| busy_ns(step).is_some()).map(|step| step.gap_ns));
    let idle = returns().filter(|step| busy_ns(step).is_none());
    let held_ns = median(idle.filter_map(|step| step.at_ns.checked_sub(passed_ns(step)?)));
    let pause_ns = held_ns.max(own_ns).saturating_mul(PAUSE_FACTOR);
    for step in steps.iter_mut().filter(|step| step.is_foreign_return()) {
        let Some((name, _)) = step.follows else { continue };
        let got_ns = buffers[name].got.1;
        let is_pause = |&passed_ns: &u64| pause_ns > 0 && step.at_ns.saturating_sub(passed_ns) > pause_ns;
        let mut after_ns = step.at_ns.saturating_sub(got_ns);
        match busy_ns(step).or_else(|| passed_ns(step).filter(is_pause)) {
            Some(passed_ns) => after_ns = after_ns.min(passed_ns.saturating_sub(got_ns) + held_ns),
            None => step.gap_ns = step.gap_ns.min(own_ns),
        }
        step.follows = Some((name, after_ns));
    }
}

/// Returns the middle value; 0 without values.
fn median(values: impl Iterator<Item = u64>) -> u64 {
    let mut values: Vec<_> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}
