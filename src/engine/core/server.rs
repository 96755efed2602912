//! What the wait queue requires of a pool: to look for memory, and how long to pause until the next look.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::memory::{Refusal, SlowCalls, Stop};
use super::super::wait_queue::{Server, WaitQueue, Waiter};
use super::attention::Reason;
use super::verdicts::nanos;
use super::waiting::CALL_PATIENCE;
use super::{Block, Core, Wanted};
use crate::maintenance_thread::pause_for_copies;
use pinpool_os::sync::process::{Ordering, fence};

/// Shortest sleep of the head while no copy is in flight: room may also come from other pools and processes.
const IDLE_PATIENCE: Duration = Duration::from_millis(5);

impl Server for Core {
    type Request = Wanted;
    type Item = Block;
    type Refusal = Refusal;

    fn queue(&self) -> &WaitQueue<Self> {
        &self.waiters
    }

    fn require_slow_path(&self, is_waiting: bool) {
        self.attention.change(Reason::Line, || is_waiting, |attends| self.stock.idle().set_slow_path(attends));
    }

    fn sweep(&self) {
        self.complete_copies();
    }

    fn serve(self: &Arc<Self>, waiter: &Waiter<Self>, until: Instant) -> Result<Block, Refusal> {
        let (class, Some(refused)) = (waiter.class, waiter.refusal()) else {
            // Counted as a miss by the attempt without calls.
            let calls = SlowCalls::After(waiter.begun, waiter.begun + CALL_PATIENCE);
            let served =
                self.try_get_of_pool(waiter.class).map_or_else(|| self.first_attempt(&waiter.request, calls), Ok);
            return served.map_err(Stop::refusal);
        };
        if let Some(block) = self.stock.take(class) {
            return Ok(block);
        }
        if !self.backing().could_hold(class) {
            return self.fall_back(class.bytes, class).ok_or_else(|| self.backing().refusal_for_good(class));
        }
        let begun = Instant::now();
        let is_early = self.backoff.is_early(&refused);
        let calls = if is_early { SlowCalls::Held(until, until) } else { SlowCalls::Until(until, until) };
        let attempt = || self.acquire(class, calls).map_err(Stop::refusal);
        let acquired = match attempt() {
            Err(_) if is_early => Err(refused.clone()),
            Err(refusal) if self.note_want(&refusal) => attempt(),
            acquired => acquired,
        };
        self.verdicts.calls_in_line_ns.fetch_add(nanos(begun.elapsed()), Ordering::Relaxed);
        // The next head wants what it wants from then on.
        acquired.inspect(|_| self.end_want())
    }

    fn admits(self: &Arc<Self>, waiter: &Waiter<Self>, refusal: &Refusal) -> bool {
        self.may_wait(&waiter.request, waiter.wait, refusal)
    }

    fn take_back(&self, block: Block) {
        self.keep(block);
    }

    fn patience(&self, since: Instant) -> Duration {
        // Pairs with the fence in `announce_copy`: the request sees the copy, or the copy sees the request and wakes it.
        fence(Ordering::SeqCst);
        let has_copies = self.in_flight.count() > 0;
        let pause = pause_for_copies(since);
        if has_copies { pause } else { pause.max(IDLE_PATIENCE) }
    }

    fn is_hopeless(&self, refusal: &Refusal) -> bool {
        let Refusal::Source(error) = refusal else { return self.is_closed() };
        self.is_closed() || self.stock.is_gone() || !self.backing().may_recover(error)
    }

    fn record_taken(&self) {
        self.end_want();
        self.accounts.count_handed_over();
    }

    fn record_wait(&self, waited: Duration) {
        if !self.has_waiters() {
            self.end_want();
        }
        self.accounts.count_wait(waited);
    }
}
