//! What each thread of a recording did, and how long it took between: a replay in closed loop moves what comes after a wait.
//!
//! A get begins when it was asked. The time between the end of one operation of a thread and the beginning of its next is the
//! program's own, and stays. A buffer that a device may still use is free as long after its put as it was when recorded.

use std::collections::HashMap;

use pinpool_observe::record::{Event, Record};

use super::format::TraceOp;

/// One operation of a thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    /// Number of its record.
    pub(super) line: u64,
    /// Nanoseconds since the one before it ended.
    pub(super) gap_ns: u64,
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
    /// Puts of buffers that are in flight: their thread, place and time.
    in_flight: HashMap<(u32, u64), (usize, usize, u64)>,
}

impl Threads {
    /// Takes a record in; `held` is the name of its buffer before it, `name` that of a get's.
    pub(super) fn add(&mut self, line: u64, record: &Record, held: Option<u64>, name: u64) {
        let Record { time_ns, event, pool, .. } = *record;
        self.began_ns.get_or_insert(time_ns);
        match event {
            Event::Get { id, bytes, took_ns, .. } => {
                let began_ns = time_ns.saturating_sub(took_ns);
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
        let gap_ns = began_ns.saturating_sub(self.ended_ns[thread]);
        self.ended_ns[thread] = record.time_ns;
        self.steps[thread].push(Step { line, gap_ns, operation, free_after_ns });
        (thread, self.steps[thread].len() - 1)
    }

    pub(super) fn into_steps(self) -> Vec<Vec<Step>> {
        self.steps
    }
}
