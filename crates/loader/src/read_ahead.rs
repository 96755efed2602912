//! How many batches the workers may read ahead of the copies: the bound on the memory of a run.
//!
//! Owns three counters and the waits on them. Never sees a batch or a buffer.
//!
//! ```text
//!   completed <= sent <= started <= sent + prefetch
//!   |            |        '- batches that a worker took from the plan
//!   |            '- batches given to the destination, or found to have nothing to send
//!   '- batches whose buffer is back in the pool
//! ```
//!
//! - **ahead-I1**: every batch started is sent and completed in the end, unless the read-ahead was closed.
//! - **ahead-I2**: once closed, no batch is started and no thread waits.

use pinpool_os::sync::plain::{Condvar, Mutex};

#[derive(Debug)]
pub(super) struct ReadAhead {
    prefetch: u64,
    counts: Mutex<BatchCounts>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct BatchCounts {
    started: u64,
    sent: u64,
    completed: u64,
    closed: bool,
    /// Nobody waits for the next batch: the one who takes batches is busy with an earlier one, and may put its buffer back.
    unwanted: bool,
}

impl ReadAhead {
    pub(super) fn new(prefetch: u64) -> ReadAhead {
        ReadAhead { prefetch, counts: Mutex::default(), changed: Condvar::default() }
    }

    /// Waits until one more batch may be started. `false` if closed.
    pub(super) fn start(&self) -> bool {
        let mut counts = self.counts.lock();
        while !counts.closed && counts.started - counts.sent >= self.prefetch {
            counts = self.changed.wait(counts);
        }
        counts.started += u64::from(!counts.closed);
        !counts.closed
    }

    pub(super) fn sent(&self) {
        self.update(|counts| counts.sent += 1);
    }

    pub(super) fn completed(&self) {
        self.update(|counts| counts.completed += 1);
    }

    pub(super) fn close(&self) {
        self.update(|counts| counts.closed = true);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.counts.lock().closed
    }

    /// Whether somebody waits for the next batch, as at the start; `false` while its taker is busy elsewhere.
    pub(super) fn set_wanted(&self, wanted: bool) {
        self.update(|counts| counts.unwanted = !wanted);
    }

    fn update(&self, change: impl FnOnce(&mut BatchCounts)) {
        change(&mut self.counts.lock());
        self.changed.notify_all();
    }

    /// Batches completed so far, for [`ReadAhead::wait_for_completion`].
    pub(super) fn completions(&self) -> u64 {
        self.counts.lock().completed
    }

    /// Waits, for a worker whose batch found no memory, until more than `completions` batches are completed, or somebody waits
    /// for this batch who did not before. `false` if no other batch is under way or the read-ahead is closed: then no buffer
    /// will come back.
    pub(super) fn wait_for_completion(&self, completions: u64) -> bool {
        let mut counts = self.counts.lock();
        // The caller's own batch is started and not completed.
        let mut has_waited = false;
        while !counts.closed
            && counts.completed == completions
            && (counts.started > counts.completed + 1 || counts.unwanted)
        {
            counts = self.changed.wait(counts);
            has_waited = true;
        }
        !counts.closed && (has_waited || counts.completed > completions)
    }
}

/// Closes the read-ahead at the end of a thread, a panic included, so that the other threads do not wait for its batch.
#[derive(Debug)]
pub(super) struct CloseOnDrop<'a>(pub(super) &'a ReadAhead);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn no_more_than_prefetch_batches_are_ahead() {
        let ahead = ReadAhead::new(3);
        let (starts, started) = channel();
        thread::scope(|scope| {
            let _close = CloseOnDrop(&ahead);
            for _ in 0..4 {
                let starts = starts.clone();
                let ahead = &ahead;
                scope.spawn(move || while ahead.start() && starts.send(()).is_ok() {});
            }
            for sent in 0..1000 {
                started.recv().unwrap();
                let unsent = ahead.counts.lock().started - sent;
                assert!((1..=3).contains(&unsent), "{unsent}");
                ahead.sent();
            }
        });
    }

    #[test]
    fn closing_wakes_every_waiting_thread() {
        let ahead = ReadAhead::new(1);
        assert!(ahead.start());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ahead.start());
            drop(CloseOnDrop(&ahead));
            assert!(!waiting.join().unwrap());
        });
        assert_eq!(ahead.counts.lock().started, 1);
        assert!(!ahead.wait_for_completion(0));
    }

    #[test]
    fn while_nobody_wants_the_batch_its_worker_waits_and_then_tries_once_more() {
        let ahead = ReadAhead::new(4);
        assert!(ahead.start());
        ahead.set_wanted(false);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ahead.wait_for_completion(0));
            ahead.set_wanted(true);
            // Whether it waited or came late: wanted and alone, it does not wait again.
            let _ = waiting.join().unwrap();
        });
        assert!(!ahead.wait_for_completion(0));
    }

    #[test]
    fn a_wait_for_memory_ends_when_no_other_batch_is_under_way() {
        let ahead = ReadAhead::new(4);
        assert!(ahead.start());
        assert!(!ahead.wait_for_completion(0), "alone");
        assert!(ahead.start());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ahead.wait_for_completion(0));
            ahead.sent();
            ahead.completed();
            assert!(waiting.join().unwrap(), "the other batch is completed");
        });
        assert!(!ahead.wait_for_completion(1), "alone again");
        assert!(ahead.wait_for_completion(0), "completed before the wait");
    }
}
