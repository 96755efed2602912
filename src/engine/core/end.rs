//! The end of a pool: no handle is left, then no block but those in flight.

use std::thread;
use std::time::{Duration, Instant};

use super::Core;
use crate::backend::SourceError;
use crate::in_flight::Ended;
use pinpool_os::lost;
use pinpool_os::sync::process::Ordering;

/// Longer than any working copy, and shorter than a person waits for a process to end.
const CLOSE_WAIT: Duration = Duration::from_secs(30);

impl Core {
    /// No handle is left. Idle blocks are released now, others when they come back.
    pub(crate) fn seal(&self) {
        // From now on returns release their blocks, and nothing is idle.
        if let Some(thread) = self.thread {
            thread.remove(std::ptr::from_ref(self).cast());
        }
        if let Some(arena) = self.memory().arena() {
            arena.cancel_reserve();
        }
        self.report_end();
        self.stock.lifetime().seal();
        let idle = self.stock.seal();
        // A release that waits for the device would wait for a stuck copy, so copies in flight come first.
        if self.memory().source().release_waits() {
            self.await_copies();
        }
        idle.into_iter().for_each(|block| self.stock.release(block, self.time.coarse_us()));
        self.close_if_unused();
    }

    /// Waiting and later requests fail. What is idle is released, and so is what comes back.
    pub(crate) fn refuse_requests(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        self.stock.give_up(SourceError::new("the pool", "is closed"), self.time.coarse_us());
        self.memory().arena().into_iter().for_each(|arena| arena.cancel_reserve());
        self.trim(0);
        self.waiters.wake_all();
        self.existing_accounts().iter().for_each(|account| account.close());
    }

    /// Closes a sealed pool once every block is in flight, released or leaked.
    pub(super) fn close_if_unused(&self) {
        // Blocks in flight do not keep the pool open: `close` waits for their copies.
        if self.stock.lifetime().begin_close(|| self.in_flight.held()) {
            self.close();
        }
    }

    /// Waits until nothing is in flight, at most as long as configured.
    fn await_copies(&self) {
        let (begun, longest_wait) = (Instant::now(), self.config.code.close_wait.unwrap_or(CLOSE_WAIT));
        // Short copies complete at once; a stuck copy is not worth a busy processor.
        let mut pause = Duration::from_micros(20);
        while self.in_flight.count() > 0 {
            // A device that failed is not waited for.
            self.query_copies();
            if begun.elapsed() >= longest_wait {
                return;
            }
            thread::sleep(pause.min(longest_wait));
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }

    /// Ends the pool: waits for the copies in flight, and abandons those that do not end.
    fn close(&self) {
        let begun = Instant::now();
        self.await_copies();
        self.record_last_snapshot();
        let Ended { swept, abandoned, recovered, failed } = self.in_flight.end();
        self.complete(swept);
        self.recover(recovered);
        failed.into_iter().for_each(lost::keep);
        if !abandoned.is_empty() {
            let (copies, bytes) = (abandoned.len() as u64, abandoned.iter().map(|block| block.held_bytes()).sum());
            self.log.closed_in_flight(copies, bytes, begun.elapsed());
        }
        // A release that waits for the device would wait for a stuck copy.
        let may_release = abandoned.is_empty() || !self.memory().source().release_waits();
        abandoned.iter().filter_map(|_| self.memory().arena()).for_each(|arena| arena.count_quarantined());
        // Never freed on a guess (core-I2).
        abandoned.into_iter().for_each(lost::keep);
        if may_release {
            self.memory().close(self.time.coarse_us());
        }
        self.end_recording();
    }
}
