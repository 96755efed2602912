//! The end of a pool: the last handle seals it, whoever comes last closes it.
//!
//! ```text
//!  last handle gone ─▶ seal: what is idle goes, puts from now on are given up
//!  last buffer back ─▶ close: wait for the copies in flight, leave alone what does not end, give the ground back
//! ```

use std::thread;
use std::time::{Duration, Instant};

use super::core::Core;
use super::supply::Supply;
use crate::sync::process::{Ordering, fence};

impl Core {
    /// No handle is left. What is idle goes now; what is in use goes when it comes back.
    pub(crate) fn seal(&self) {
        let idle = self.idle.seal();
        // Where a release waits for the device, it would wait for a stuck copy for ever: those in flight come first.
        if self.source().release_waits() {
            self.await_copies();
        }
        idle.into_iter().for_each(|block| self.give_up(block));
        self.close_if_unused();
    }

    pub(super) fn close_if_unused(&self) {
        if !self.idle.is_sealed() {
            return;
        }
        // SeqCst: of two last puts at once, each counted before this line, one at least sees both.
        fence(Ordering::SeqCst);
        // A put that was kept is counted without a barrier of its own; after this it is counted, or it sees the seal and
        // comes by here.
        self.idle.order_with_puts();
        // In flight is no use: those copies are what `close` waits for.
        let handed_out = self.handed_out();
        // AcqRel: one closes, and sees all that was put before.
        if handed_out <= self.in_flight.count() && !self.counts.closed.swap(true, Ordering::AcqRel) {
            self.close();
        }
    }

    /// Waits until nothing is in flight, at most as long as configured.
    fn await_copies(&self) {
        let begun = Instant::now();
        // Short copies are over at once; a stuck one is not worth a busy processor.
        let mut pause = Duration::from_micros(20);
        while self.in_flight.count() > 0 {
            self.land_copies();
            if begun.elapsed() >= self.config.close_wait {
                return;
            }
            thread::sleep(pause.min(self.config.close_wait));
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }

    /// Ends the pool: waits for the copies in flight, and leaves alone what does not end.
    fn close(&self) {
        let begun = Instant::now();
        self.await_copies();
        let (copies, bytes) = (self.in_flight.count(), self.in_flight.bytes());
        let abandoned = self.in_flight.abandon();
        if !abandoned.is_empty() {
            self.log.closed_in_flight(copies, bytes, begun.elapsed());
        }
        // Where a release waits for the device, it would wait for a stuck copy for ever.
        let may_leave = abandoned.is_empty() || !self.source().release_waits();
        // Nothing is freed on a guess.
        abandoned.into_iter().for_each(std::mem::forget);
        if let Supply::Shared(ground) = &self.supply
            && may_leave
        {
            self.log.release_error(ground.leave(self, self.time.coarse_us()));
        }
    }
}
