//! A recording in closed loop: a get that waits holds its thread back, and all that this thread does later.
//!
//! A put of a buffer that its get has not got yet waits for that, as the program's own queue would.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::{GetState, Player};
use crate::format::{TraceError, TraceOp};
use crate::threads::Step;
use crate::workload::error_at;

/// What is due, in order of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Due {
    Step(usize),
    /// Memory that a device has read.
    Free(u64),
}

/// What each thread does next.
struct Schedule<'a> {
    threads: &'a [Vec<Step>],
    places: Vec<usize>,
    /// When each thread ended its last step.
    ended_ns: Vec<u64>,
    /// What is due when, at one time in the order of the recording.
    due: BinaryHeap<Reverse<(u64, u64, Due)>>,
    /// When buffers that are held were got.
    got_ns: HashMap<u64, u64>,
    /// Threads whose gets wait for the buffers of these names.
    waiting: HashMap<u64, usize>,
    /// Threads that cannot put the buffers of these names, since they are not there yet.
    blocked: HashMap<u64, Vec<usize>>,
}

impl Schedule<'_> {
    fn step(&self, thread: usize) -> Option<&Step> {
        self.threads[thread].get(self.places[thread])
    }

    /// The thread has done its step at `now_ns`.
    fn finish(&mut self, thread: usize, now_ns: u64) {
        self.places[thread] += 1;
        self.ended_ns[thread] = now_ns;
        self.plan(thread);
    }

    fn plan(&mut self, thread: usize) {
        let Some(&Step { line, follows, gap_ns, .. }) = self.step(thread) else { return };
        let followed_ns = follows.map_or(Some(0), |name| self.got_ns.get(&name).copied());
        match (followed_ns, follows) {
            (None, Some(name)) => self.blocked.entry(name).or_default().push(thread),
            (followed_ns, _) => {
                let since_ns = self.ended_ns[thread].max(followed_ns.unwrap_or(0));
                self.due.push(Reverse((since_ns.saturating_add(gap_ns), line, Due::Step(thread))));
            }
        }
    }

    /// The thread's get is served: it goes on, and those that put the buffer.
    fn got(&mut self, thread: usize, name: u64, now_ns: u64) {
        self.got_ns.insert(name, now_ns);
        self.finish(thread, now_ns);
        for thread in self.blocked.remove(&name).unwrap_or_default() {
            match self.step(thread) {
                Some(Step { follows: None, line, .. }) => self.due.push(Reverse((now_ns, *line, Due::Step(thread)))),
                _ => self.plan(thread),
            }
        }
    }
}

impl Player<'_> {
    /// Performs what the threads did.
    pub(super) fn play_threads(&mut self, threads: &[Vec<Step>]) -> Result<(), TraceError> {
        let mut schedule = Schedule {
            threads,
            places: vec![0; threads.len()],
            ended_ns: vec![0; threads.len()],
            due: BinaryHeap::new(),
            got_ns: HashMap::new(),
            waiting: HashMap::new(),
            blocked: HashMap::new(),
        };
        (0..threads.len()).for_each(|thread| schedule.plan(thread));
        loop {
            let next_us = schedule.due.peek().map(|Reverse((at_ns, ..))| at_ns / 1_000);
            let expires_us = self.queue.values().next().map(|first| first.since_us.saturating_add(self.wait_us));
            let stop_us = [next_us, expires_us].into_iter().flatten().filter(|&stop_us| stop_us < u64::MAX).min();
            // Without an end of their waits, gets may wait that no put will serve.
            let Some(stop_us) = stop_us else { break };
            let now_us = self.clock.now_us();
            match stop_us > now_us {
                true => self.advance(stop_us - now_us)?,
                false if next_us.is_none_or(|next_us| next_us > now_us) => self.serve()?,
                false => {}
            }
            self.resume(&mut schedule, stop_us * 1_000);
            if next_us.is_some_and(|next_us| next_us <= self.clock.now_us())
                && let Some(Reverse((at_ns, _, due))) = schedule.due.pop()
            {
                self.perform_due(&mut schedule, due, at_ns)?;
                self.resume(&mut schedule, at_ns);
                self.show(false);
            }
        }
        self.tally.fallbacks += self.queue.len() as u64;
        self.queue.clear();
        Ok(())
    }

    /// Threads go on whose gets were served.
    fn resume(&mut self, schedule: &mut Schedule<'_>, now_ns: u64) {
        for name in std::mem::take(&mut self.served) {
            if let Some(thread) = schedule.waiting.remove(&name) {
                schedule.got(thread, name, now_ns);
            }
        }
    }

    fn perform_due(&mut self, schedule: &mut Schedule<'_>, due: Due, now_ns: u64) -> Result<(), TraceError> {
        let thread = match due {
            Due::Free(name) => return Ok(self.put(Some(name))?),
            Due::Step(thread) => thread,
        };
        let Some(&Step { line, operation, free_after_ns, .. }) = schedule.step(thread) else { return Ok(()) };
        let in_line = |error: pinpool::Error| error_at(line, operation, error.report());
        match operation {
            TraceOp::Get { id, bytes, align } => {
                self.get(Some(id), bytes, align).map_err(in_line)?;
                if let Some(GetState::Waiting { .. }) = self.held.get(&Some(id)) {
                    schedule.waiting.insert(id, thread);
                } else {
                    schedule.got(thread, id, now_ns);
                }
                return Ok(());
            }
            TraceOp::Put { id } => match (self.held.get(&Some(id)), free_after_ns) {
                (None | Some(GetState::Waiting { .. }), _) => {
                    schedule.blocked.entry(id).or_default().push(thread);
                    return Ok(());
                }
                (_, Some(0)) => self.put(Some(id)).map_err(in_line)?,
                (_, Some(after_ns)) => schedule.due.push(Reverse((now_ns + after_ns, line, Due::Free(id)))),
                (_, None) => {}
            },
            _ => self.perform(operation).map_err(in_line)?,
        }
        if let TraceOp::Put { id } = operation {
            schedule.got_ns.remove(&id);
        }
        schedule.finish(thread, now_ns);
        Ok(())
    }
}
