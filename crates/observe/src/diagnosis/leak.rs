//! Buffers of one tag that are never returned.
//!
//! A filling cache also grows, but more and more slowly until it stops. Higher load brings more requests. A queue in front of a
//! slow consumer returns its oldest buffers first, so they do not age. A leak shows none of these patterns. Growth from the
//! pool's start is a leak, and not a working set, if most requested buffers return and the tag holds most memory.

use std::time::Duration;

use super::snapshot::{Snapshot, TagUse};

/// Number of consecutive windows in which a tag must grow if the ages of its buffers are known.
const GROWN: usize = 3;
/// Number of such windows if the ages are unknown.
const GROWN_UNSEEN: usize = 6;
/// Among this many consecutive window ends, at least one is assumed to be outside a burst.
const LOW_OF: usize = 3;
/// An increase of the requests by more than 1/8 counts as more load.
const LOAD_PART: u64 = 8;

/// Maximum number of window ends: three steps of two windows each, over which the number of buffers older than a minute grew.
const ENDS_MAX: usize = 8;

/// A leak that was detected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Leak {
    pub(super) holder: TagUse,
    /// Number of buffers by which the tag grew over the examined windows, which together took `over_us`.
    pub(super) more_buffers: u64,
    /// Whether `more_buffers` counts only the buffers that have become older than a minute.
    pub(super) is_aged: bool,
    pub(super) over_us: u64,
}

/// The state at the ends of the last windows, and the leak that they show.
#[derive(Debug, Default)]
pub(super) struct Growth {
    /// Snapshots with their times in microseconds.
    ends: Vec<(u64, Snapshot)>,
    found: Option<Leak>,
}

impl Growth {
    /// Adds the snapshot at the end of a window. Returns the leak, if any. An earlier leak persists until some of its buffers are
    /// returned, or, if other buffers of the tag are returned, until no more of its buffers become old.
    pub(super) fn add(&mut self, now_us: u64, now: &Snapshot) -> Option<Leak> {
        if self.ends.is_empty() {
            self.ends.push(Default::default());
        }
        let window_us = now_us - self.ends[self.ends.len() - 1].0;
        self.ends.push((now_us, now.clone()));
        self.ends.drain(..self.ends.len().saturating_sub(ENDS_MAX));
        let leak = |holder| self.leak_of(holder, now.held_bytes).or_else(|| self.creeping_leak_of(holder));
        let fresh = now.holders.iter().filter_map(leak).max_by_key(|leak| leak.holder.bytes);
        let kept = self.found.take().and_then(|found| {
            let holder = now.holder(&found.holder.tag).filter(|now| now.oldest_age >= found.holder.oldest_age)?.clone();
            // Fewer buffers may be the end of a burst: the others still leak if more of them have become old.
            let aged = holder.aged.saturating_sub(found.holder.aged);
            match holder.buffers >= found.holder.buffers {
                true => Some(Leak { holder, ..found }),
                false => (aged > 0).then_some(Leak { holder, more_buffers: aged, is_aged: true, over_us: window_us }),
            }
        });
        self.found = fresh.or(kept);
        self.found.clone()
    }

    /// Returns the last `count` window ends, in order, or `None` if there are fewer.
    fn last_ends(&self, count: usize) -> Option<&[(u64, Snapshot)]> {
        self.ends.get(self.ends.len().checked_sub(count)?..)
    }

    /// Detects a slow leak that bursts of the tag hide: the number of buffers older than a minute grows. Bursts have no buffers
    /// of this age, and in a full cache their number does not change.
    fn creeping_leak_of(&self, holder: &TagUse) -> Option<Leak> {
        let ends = self.last_ends(ENDS_MAX)?;
        let aged: Vec<_> = counts(ends, holder, |holder| holder.aged).into_iter().skip(1).step_by(2).collect();
        let more_buffers = growth(&aged)?;
        // The minimum number of buffers must grow as well: in a full cache, the buffers only become older.
        let buffers = counts(ends, holder, |holder| holder.buffers);
        let low = |ends: &[u64]| ends.iter().copied().min().unwrap_or(0);
        let is_more =
            low(&buffers[buffers.len() - LOW_OF..]).saturating_sub(low(&buffers[..LOW_OF])) * 2 >= more_buffers;
        let over_us = ends[ENDS_MAX - 1].0 - ends[1].0;
        is_more.then(|| Leak { holder: holder.clone(), more_buffers, is_aged: true, over_us })
    }

    fn leak_of(&self, holder: &TagUse, held_bytes: u64) -> Option<Leak> {
        let grown = if holder.oldest_age.is_some() { GROWN } else { GROWN_UNSEEN };
        let ends = self.last_ends(grown + 1)?;
        let (begin, end, counts) = (&ends[0], &ends[grown], counts(ends, holder, |holder| holder.buffers));
        let more_buffers = growth(&counts)?;
        // More requests use more buffers. Growth is not a leak if the load rises much, or explains at least half of it.
        let requests = |window: usize| ends[window + 1].1.requests.saturating_sub(ends[window].1.requests);
        let (first_requests, more_requests) = (requests(0), requests(grown - 1).saturating_sub(requests(0)));
        let explained = more_requests * 2 * counts[0] >= more_buffers * first_requests;
        if more_requests > 0 && (more_requests > first_requests / LOAD_PART || explained) {
            return None;
        }
        let built = more_buffers * 2 > end.1.requests - begin.1.requests || holder.bytes <= held_bytes / 2;
        let (since, oldest) = match begin.1.holder(&holder.tag) {
            Some(before) => (begin, before.oldest_age),
            // The tag appeared in the pool's first window, so its oldest buffer is from that window.
            None if begin.0 == 0 && !built => (&ends[1], holder.oldest_age.map(|_| Duration::ZERO)),
            None => return None,
        };
        // Ages are accurate to about a second.
        let aging = match (oldest, holder.oldest_age) {
            (Some(then), Some(now)) => now + Duration::from_secs(2) >= then + Duration::from_micros(end.0 - since.0),
            (before, now) => before == now,
        };
        aging.then(|| Leak { holder: holder.clone(), more_buffers, is_aged: false, over_us: end.0 - begin.0 })
    }
}

/// Returns the value of `count` for this holder's tag at each window end, 0 if the tag held no buffers.
fn counts(ends: &[(u64, Snapshot)], holder: &TagUse, count: fn(&TagUse) -> u64) -> Vec<u64> {
    ends.iter().map(|(_, end)| end.holder(&holder.tag).map_or(0, count)).collect()
}

/// Returns the growth over these counts if each count exceeds the previous one and the last step is at least half of the first.
fn growth(counts: &[u64]) -> Option<u64> {
    let steps: Vec<_> = counts.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
    (steps.iter().all(|&step| step > 0) && steps.last()? * 2 >= *steps.first()?).then(|| steps.iter().sum())
}
