//! What the wait queue asks of a pool: to look for memory, and how long to pause until the next look.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::memory::{Refusal, SlowCalls, Stop};
use super::super::waiters::{Server, Waiters};
use super::attention::Reason;
use super::verdicts::nanos;
use super::{Block, Core};
use crate::error::Result;
use crate::maintenance_thread::pause_for_copies;
use crate::size_class::Class;
use pinpool_os::sync::process::{Ordering, fence};

/// Shortest sleep of the first in line while no copy is in flight: room may also come from other pools and processes.
const IDLE_PATIENCE: Duration = Duration::from_millis(5);

impl Server for Core {
    type Item = Block;
    type Refusal = Refusal;

    fn waiters(&self) -> &Waiters<Block> {
        &self.waiters
    }

    fn attend(&self, is_waiting: bool) {
        self.attention.change(Reason::Line, || is_waiting, |attends| self.stock.idle().set_slow_path(attends));
    }

    fn sweep(&self) {
        self.complete_copies();
    }

    fn serve(self: &Arc<Self>, class: Class, refused: &Refusal, calls: SlowCalls) -> Result<Block, Stop> {
        if let Some(block) = self.stock.take(class) {
            return Ok(block);
        }
        if !self.backing().could_hold(class) {
            let block = self.fall_back(class.bytes, class);
            return block.ok_or_else(|| self.backing().refusal_for_good(class).into());
        }
        let (begun, is_early) = (Instant::now(), self.backoff.is_early(refused));
        let (plans, until) = calls.until();
        let calls = if is_early && calls != SlowCalls::None { SlowCalls::Held(plans, until) } else { calls };
        let attempt = || self.acquire(class, calls);
        let acquired = match attempt() {
            Err(_) if matches!(calls, SlowCalls::Held(..)) => Err(refused.clone().into()),
            Err(Stop::Refused(refusal)) if self.note_want(&refusal) => attempt(),
            acquired => acquired,
        };
        self.verdicts.calls_in_line_ns.fetch_add(nanos(begun.elapsed()), Ordering::Relaxed);
        // The next in line wants what it wants since it is first.
        acquired.inspect(|_| self.end_want())
    }

    fn note_taken(&self) {
        self.end_want();
        self.accounts.count_handed_over();
    }

    fn note_waited(&self, took: Duration) {
        if !self.has_waiters() {
            self.end_want();
        }
        self.accounts.count_wait(took);
    }

    fn take_back(&self, block: Block) {
        self.keep(block);
    }

    fn patience(&self, since: Instant) -> Duration {
        // Pairs with the fence in `announce_copy`: the get sees the copy, or the copy sees the get in the line and wakes it.
        fence(Ordering::SeqCst);
        let has_copies = self.in_flight.count() > 0;
        let pause = pause_for_copies(since);
        if has_copies { pause } else { pause.max(IDLE_PATIENCE) }
    }

    fn is_hopeless(&self, refusal: &Refusal) -> bool {
        let Refusal::Source(error) = refusal else { return self.is_closed() };
        self.is_closed() || self.stock.is_gone() || !self.backing().may_recover(error)
    }
}
