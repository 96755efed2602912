//! A pool, as its memory sees it: idle blocks that make room, and requests that wait.

use super::{Block, PoolCore};
use crate::engine::memory::PoolView;
use crate::in_flight::QueryScope;
use crate::stats::EvictionReason;

impl PoolView for PoolCore {
    fn idle_buffer_bytes(&self) -> u64 {
        self.idle.bytes()
    }

    fn idle_buffers(&self) -> u64 {
        self.idle.count()
    }

    fn give_oldest(&self, why: EvictionReason) -> bool {
        let evicted = self.idle.reclaim().map(|entry| self.evict(Block::from_entry(entry), why));
        self.tear_down_if_unused();
        evicted.is_some()
    }

    fn has_copies(&self) -> bool {
        self.in_flight.count() > 0
    }

    fn sweep_in_flight(&self) {
        self.sweep_copies(QueryScope::Undecided);
    }

    fn now_us(&self) -> u64 {
        self.time.read_us()
    }

    fn waiting_bytes(&self) -> Vec<u64> {
        self.waiters.waiting_bytes()
    }

    fn on_room_made(&self) {
        self.backoff.end();
        self.wake_waiters();
    }
}
