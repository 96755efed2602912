//! What each thread of a recording did, and how long it took between: a replay in closed loop moves what comes after a wait.
//!
//! The time between two operations of a thread is the program's own, and stays, but for waits at the ceiling, which the replay has anew.
//! What a get took beside its wait stays too: without it threads that follow each other would drift apart. A put of what another
//! thread got meanwhile follows that get: its thread had waited for the buffer. A buffer that a device may still use is free as long
//! after its put as it was when recorded.

use std::collections::HashMap;

use pinpool_observe::judge::PoolJudgement;
use pinpool_observe::record::{Event, Record};

use super::format::TraceOp;

/// One operation of a thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    /// Number of its record.
    pub(super) line: u64,
    /// The buffer whose get it follows, if that ended later than the step before it.
    pub(super) follows: Option<u64>,
    /// Nanoseconds since that get, or the step before it, ended.
    pub(super) gap_ns: u64,
    /// Of these, what its thread spent in calls of the back-end.
    pub(super) calls_ns: u64,
    pub(super) operation: TraceOp,
    /// How long after a put the memory is free; `None` if it never was.
    pub(super) free_after_ns: Option<u64>,
}

/// All threads, while their records are read.
#[derive(Debug, Default)]
pub(super) struct Threads {
    steps: Vec<Vec<Step>>,
    ended_ns: Vec<u64>,
    began_ns: Option<u64>,
    /// The thread that got each buffer that is held, and when.
    got: HashMap<u64, (u32, u64)>,
    /// How long gets of pools waited that were served then.
    waited_ns: HashMap<(u32, u64), Vec<u64>>,
    /// Time in calls of threads since their last steps.
    called_ns: HashMap<u32, u64>,
    /// Puts of buffers that are in flight: their thread, place and time.
    in_flight: HashMap<(u32, u64), (usize, usize, u64)>,
}

impl Threads {
    /// Threads of a recording that was judged.
    pub(super) fn new(judged: &[PoolJudgement]) -> Self {
        let mut waited_ns = HashMap::<_, Vec<_>>::new();
        for judged in judged {
            let mut add =
                |&(at_ns, waited): &(u64, u64)| waited_ns.entry((judged.pool, at_ns)).or_default().push(waited);
            judged.waits.iter().for_each(&mut add);
        }
        Self { waited_ns, ..Self::default() }
    }

    /// Takes a record in; `held` is the name of its buffer before it, `name` that of a get's.
    pub(super) fn add(&mut self, line: u64, record: &Record, held: Option<u64>, name: u64) {
        let Record { time_ns, event, pool, .. } = *record;
        self.began_ns.get_or_insert(time_ns);
        match event {
            Event::Get { id, bytes, took_ns, .. } => {
                let began_ns = time_ns - self.waited(pool, time_ns, took_ns);
                if let Some(unseen) = held.filter(|_| !self.is_free(pool, id, time_ns)) {
                    self.push(line, record, began_ns, TraceOp::Put { id: unseen }, Some(0));
                }
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                self.push(
                    line,
                    record,
                    began_ns,
                    TraceOp::Get { id: name, bytes, align: pinpool::DEFAULT_ALIGN },
                    None,
                );
            }
            Event::Put { id, in_flight: true } => {
                let Some(held) = held else { return };
                let place = self.push(line, record, time_ns, TraceOp::Put { id: held }, None);
                self.in_flight.insert((pool, id), (place.0, place.1, time_ns));
            }
            Event::Put { id, .. } | Event::Completed { id } | Event::Gone { id } => {
                if let Some(held) = held.filter(|_| !self.is_free(pool, id, time_ns)) {
                    self.push(line, record, time_ns, TraceOp::Put { id: held }, Some(0));
                }
            }
            Event::Cleared => _ = self.push(line, record, time_ns, TraceOp::Clear, None),
            _ => {}
        }
    }

    /// A call of the back-end that the thread made took so long.
    pub(super) fn called(&mut self, thread: u32, took_ns: u64) {
        *self.called_ns.entry(thread).or_default() += took_ns;
    }

    /// How long a get waited that was served then and took so long.
    fn waited(&mut self, pool: u32, time_ns: u64, took_ns: u64) -> u64 {
        let Some(waits) = self.waited_ns.get_mut(&(pool, time_ns)) else { return 0 };
        let place = waits.iter().position(|&waited_ns| waited_ns <= took_ns.min(time_ns));
        place.map_or(0, |place| waits.remove(place))
    }

    /// Whether the buffer was put before, and its copies are over now.
    fn is_free(&mut self, pool: u32, id: u64, now_ns: u64) -> bool {
        let Some((thread, at, put_ns)) = self.in_flight.remove(&(pool, id)) else { return false };
        self.steps[thread][at].free_after_ns = Some(now_ns.saturating_sub(put_ns));
        true
    }

    /// Adds what the record's thread began then, and ended with the record. Where it lies.
    fn push(
        &mut self,
        line: u64,
        record: &Record,
        began_ns: u64,
        operation: TraceOp,
        free_after_ns: Option<u64>,
    ) -> (usize, usize) {
        let thread = record.thread as usize;
        if self.steps.len() <= thread {
            self.steps.resize_with(thread + 1, Vec::new);
            self.ended_ns.resize(thread + 1, self.began_ns.unwrap_or(0));
        }
        let (mut follows, mut since_ns) = (None, self.ended_ns[thread]);
        match operation {
            TraceOp::Get { id, .. } => _ = self.got.insert(id, (record.thread, record.time_ns)),
            TraceOp::Put { id } => {
                let got = self.got.remove(&id).filter(|&(by, at_ns)| by != record.thread && at_ns > since_ns);
                (follows, since_ns) = got.map_or((None, since_ns), |(_, at_ns)| (Some(id), at_ns));
            }
            _ => {}
        }
        self.ended_ns[thread] = record.time_ns;
        let gap_ns = began_ns.saturating_sub(since_ns);
        let calls_ns = self.called_ns.remove(&record.thread).unwrap_or(0).min(gap_ns);
        self.steps[thread].push(Step { line, follows, gap_ns, calls_ns, operation, free_after_ns });
        (thread, self.steps[thread].len() - 1)
    }

    pub(super) fn into_steps(self) -> Vec<Vec<Step>> {
        self.steps
    }
}
