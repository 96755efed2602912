//! Sums over all shards: what is idle, what was counted, and whether the two fit together. For whoever looks; no get or put
//! comes by here.

use super::counters::window_since;
use super::shard::Shard;
use super::{ThreadCache, permits};
use crate::policy::Window;
use crate::sync::atomic::Ordering;

impl<T> ThreadCache<T> {
    /// Buffers that are idle now.
    pub fn idle_count(&self) -> usize {
        let count = self.used().map(|shard| shard.counts().idle()).sum::<u64>();
        usize::try_from(count).unwrap_or(usize::MAX)
    }

    /// Bytes of the buffers that are idle now.
    pub fn idle_bytes(&self) -> usize {
        self.used().map(|shard| shard.counts().idle_bytes()).fold(0, usize::wrapping_add)
    }

    /// All that was ever counted.
    pub fn totals(&self) -> Window {
        let mut totals = Window { evicted: self.evictions.count(), ..Window::default() };
        for counts in self.used().map(Shard::counts) {
            counts.add_to(&mut totals);
        }
        totals
    }

    /// What was counted since the last reset.
    pub fn window(&self) -> Window {
        let reset = self.reset.lock();
        window_since(*reset, self.totals())
    }

    /// Begins a new window.
    pub fn reset_window(&self) {
        let mut reset = self.reset.lock();
        *reset = self.totals();
        self.evictions.reset_at(reset.evicted);
    }

    /// At rest: walks everything and compares it with what is counted.
    ///
    /// # Errors
    ///
    /// Says in words what does not fit.
    pub fn validate(&self) -> Result<(), String> {
        let mut permits = self.pot.free();
        for (at, shard) in self.shards.iter().enumerate() {
            let in_shard = |wrong| format!("shard {at}: {wrong}");
            let (classes, free) = shard.validate().map_err(in_shard)?;
            permits += i64::from(free);
            if !(classes.is_empty() && free == 0 || self.used.load(Ordering::Relaxed) & 1 << at != 0) {
                return Err(in_shard("not known to be used".into()));
            }
            if let Some(class) = classes.iter().find(|&&class| self.whereabouts.shards(class) & 1 << at == 0) {
                return Err(in_shard(format!("class {class} is not found")));
            }
        }
        let (idle, limit) = (self.idle_count(), self.limit());
        if idle > limit || i64::try_from(idle).is_ok_and(|idle| permits::as_places(limit) != idle + permits) {
            return Err(format!("{idle} idle and {permits} permits do not make the limit {limit}"));
        }
        Ok(())
    }
}
