//! Buffers of one tag that are never returned.
//!
//! A cache that fills also grows, but ever slower, and then stops. More load brings more requests. A queue before a slow consumer
//! returns its oldest buffers first, so that they do not age. A leak does none of these. Growth from the pool's start is a leak, and
//! not a working set, if most requested buffers return and the tag holds most memory.

use std::collections::VecDeque;
use std::time::Duration;

use super::snapshot::{Holder, Snapshot};

/// Consecutive windows in which a tag with known ages grew.
const GROWN: usize = 3;
/// The same for unknown ages.
const GROWN_UNSEEN: usize = 6;
/// Steps of two windows each, over which the number of buffers older than a minute grew.
const AGED_STEPS: usize = 3;
/// At least one of this many window ends is outside a burst.
const LOW_OF: usize = 3;
/// An increase of the requests by 1/8 is more load.
const LOAD_PART: u64 = 8;

/// Maximum number of window ends.
const SEEN_MAX: usize = 2 * AGED_STEPS + 2;

/// A leak that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Leak {
    pub(super) holder: Holder,
    /// The growth since the first of the windows, and the time since then.
    pub(super) more_buffers: u64,
    pub(super) more_bytes: u64,
    pub(super) over: Duration,
}

#[derive(Debug)]
struct Observation {
    at_us: u64,
    requests: u64,
    holders: Vec<Holder>,
}

impl Observation {
    fn of(&self, tag: &str) -> Option<&Holder> {
        self.holders.iter().find(|holder| holder.tag == tag)
    }
}

/// The holders at the ends of the last windows.
#[derive(Debug, Default)]
pub(super) struct Growth {
    seen: VecDeque<Observation>,
    found: Option<Leak>,
}

impl Growth {
    /// Adds the end of a window. Returns the leak, if any; an earlier one persists until some of its buffers return.
    pub(super) fn add(&mut self, now_us: u64, now: &Snapshot) -> Option<Leak> {
        if self.seen.is_empty() {
            self.seen.push_back(Observation { at_us: 0, requests: 0, holders: Vec::new() });
        }
        self.seen.push_back(Observation { at_us: now_us, requests: now.requests, holders: now.holders.clone() });
        if self.seen.len() > SEEN_MAX {
            self.seen.pop_front();
        }
        let leak = |holder| self.leak_of(holder, now.held_bytes).or_else(|| self.creeping_leak_of(holder));
        let leaks = now.holders.iter().filter_map(leak);
        let fresh = leaks.max_by_key(|leak| leak.more_bytes);
        let kept = self.found.take().and_then(|found| {
            let holder = now.holders.iter().find(|holder| holder.tag == found.holder.tag)?;
            let is_there = holder.buffers >= found.holder.buffers && holder.oldest >= found.holder.oldest;
            is_there.then(|| Leak { holder: holder.clone(), ..found })
        });
        self.found = fresh.or(kept);
        self.found.clone()
    }

    /// Below the bursts of a tag, the number of buffers older than a minute grows: bursts have none, and a full cache keeps their number.
    fn creeping_leak_of(&self, holder: &Holder) -> Option<Leak> {
        let first = self.seen.len().checked_sub(SEEN_MAX)?;
        let ends: Vec<&Observation> = self.seen.range(first..).collect();
        let of = |end: &Observation| end.of(&holder.tag).cloned().unwrap_or_default();
        let aged: Vec<u64> = ends.iter().rev().step_by(2).take(AGED_STEPS + 1).map(|end| of(end).aged).collect();
        let steps: Vec<u64> = aged.windows(2).map(|pair| pair[0].saturating_sub(pair[1])).collect();
        let (last_step, first_step) = (*steps.first()?, *steps.last()?);
        let is_growing = steps.iter().all(|&step| step > 0) && last_step * 2 >= first_step;
        let low = |ends: &[&Observation]| ends.iter().map(|end| of(end).buffers).min().unwrap_or(0);
        let more_buffers = aged.first()? - aged.last()?;
        // The minimum grows as well: a full cache only ages.
        let is_more = low(&ends[ends.len() - LOW_OF..]).saturating_sub(low(&ends[..LOW_OF])) * 2 >= more_buffers;
        let (begin, end) = (ends.iter().rev().nth(2 * AGED_STEPS)?, ends.last()?);
        (is_growing && is_more).then(|| Leak {
            holder: holder.clone(),
            more_buffers,
            more_bytes: holder.bytes / holder.buffers.max(1) * more_buffers,
            over: Duration::from_micros(end.at_us.saturating_sub(begin.at_us)),
        })
    }

    fn leak_of(&self, holder: &Holder, held_bytes: u64) -> Option<Leak> {
        let grown = if holder.oldest.is_some() { GROWN } else { GROWN_UNSEEN };
        let first = self.seen.len().checked_sub(grown + 1)?;
        let ends: Vec<&Observation> = self.seen.range(first..).collect();
        let counts: Vec<u64> = ends.iter().map(|end| end.of(&holder.tag).map_or(0, |holder| holder.buffers)).collect();
        let steps: Vec<u64> = counts.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
        let (first_step, last_step) = (*steps.first()?, *steps.last()?);
        let is_growing = steps.iter().all(|&step| step > 0) && last_step * 2 >= first_step;
        let requests: Vec<u64> =
            ends.windows(2).map(|pair| pair[1].requests.saturating_sub(pair[0].requests)).collect();
        let (begin, end) = (ends.first()?, ends.last()?);
        // More requests hold more buffers: growth that load explains by half is no leak.
        let (first_requests, more_requests) = (*requests.first()?, requests.last()?.saturating_sub(*requests.first()?));
        let (first_count, more_count) = (*counts.first()?, holder.buffers.saturating_sub(*counts.first()?));
        let is_explained = more_requests * 2 * first_count >= more_count * first_requests;
        let is_more_load = more_requests > 0 && (more_requests > first_requests / LOAD_PART || is_explained);
        let over = Duration::from_micros(end.at_us.saturating_sub(begin.at_us));
        let is_built = more_count * 2 > end.requests - begin.requests || holder.bytes <= held_bytes / 2;
        let (since, before) = match begin.of(&holder.tag) {
            Some(before) => (begin, before.clone()),
            // The tag began with the pool, and its oldest buffer is from the first window.
            None if begin.at_us == 0 && !is_built => {
                let oldest = holder.oldest.map(|_| Duration::ZERO);
                (ends.get(1)?, Holder { oldest, ..Holder::default() })
            }
            None => return None,
        };
        let aged = Duration::from_micros(end.at_us.saturating_sub(since.at_us));
        // Ages are exact to about a second.
        let is_aging = match (before.oldest, holder.oldest) {
            (Some(then), Some(now)) => now + Duration::from_secs(2) >= then + aged,
            (None, None) => true,
            _ => false,
        };
        (is_growing && !is_more_load && is_aging).then(|| Leak {
            holder: holder.clone(),
            // Two holders may have one tag.
            more_buffers: holder.buffers.saturating_sub(before.buffers),
            more_bytes: holder.bytes.saturating_sub(before.bytes),
            over,
        })
    }
}
