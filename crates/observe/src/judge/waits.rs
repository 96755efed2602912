//! The gets of a recording that waited, and what would have been in use if none had.

use std::collections::HashMap;

use crate::record::{Event, Recording};

/// A get that waits for longer is in no record of the window that ends meanwhile.
const LONG_NS: u64 = 1_000_000_000;

/// A get that waited.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wait {
    /// When it was asked.
    pub(super) from_ns: u64,
    /// When it was served, or refused.
    pub(super) to_ns: u64,
    pub(super) bytes: u64,
}

/// Those of one pool.
#[derive(Debug, Default)]
pub(super) struct Waits {
    /// That ended in the window, at the ceiling.
    of_window: Vec<Wait>,
    /// Of the whole recording, that may last through the end of a window.
    long: Vec<Wait>,
    /// What was used at the begin of the window.
    used_before_bytes: u64,
    /// How that changed since: when, whether it is more, and by how much.
    used: Vec<(u64, u8, u64)>,
}

impl Waits {
    /// Those of each pool that has long ones. What a thread spent in calls of the back-end was no waiting.
    pub(super) fn of(recording: &Recording) -> HashMap<u32, Self> {
        let mut pools: HashMap<u32, Self> = HashMap::new();
        // Of each thread, since its last get.
        let mut in_calls: HashMap<u32, u64> = HashMap::new();
        for record in &recording.records {
            match record.event {
                Event::Pin { took_ns, .. } | Event::Unpin { took_ns, .. } | Event::Move { took_ns, .. } => {
                    *in_calls.entry(record.thread).or_default() += took_ns;
                }
                Event::Get { class_bytes: bytes, took_ns, .. } | Event::Refused { class_bytes: bytes, took_ns, .. } => {
                    let spent_ns = in_calls.remove(&record.thread).unwrap_or(0);
                    if took_ns.saturating_sub(spent_ns) >= LONG_NS {
                        let (from_ns, to_ns) = (record.time_ns.saturating_sub(took_ns), record.time_ns);
                        pools.entry(record.pool).or_default().long.push(Wait { from_ns, to_ns, bytes });
                    }
                }
                _ => {}
            }
        }
        pools
    }

    /// A get has waited at the ceiling.
    pub(super) fn ended(&mut self, wait: Wait) {
        self.of_window.push(wait);
    }

    /// More, or less, is used from `at_ns` on.
    pub(super) fn changed(&mut self, at_ns: u64, is_more: bool, bytes: u64) {
        self.used.push((at_ns, u8::from(is_more), bytes));
    }

    pub(super) fn begin_window(&mut self, used_bytes: u64) {
        self.of_window.clear();
        self.used.clear();
        self.used_before_bytes = used_bytes;
    }

    /// Gets that wait at `at_ns`, the end of a window.
    pub(super) fn at(&self, at_ns: u64) -> impl Iterator<Item = Wait> {
        self.long.iter().filter(move |wait| wait.from_ns < at_ns && at_ns < wait.to_ns).copied()
    }

    /// The most bytes that were used and waited for at one time of the window, with the gets that `still` wait at its end. What was
    /// used stays below `full_bytes`: gets that waited there did not fit. 0 if none waited.
    pub(super) fn most_wanted(&self, still: &[Wait], full_bytes: u64) -> u64 {
        let waits = || self.of_window.iter().chain(still);
        let Some(least) = waits().map(|wait| wait.bytes).min() else { return 0 };
        let edges = waits().flat_map(|wait| [(wait.from_ns, 1, wait.bytes), (wait.to_ns, 0, wait.bytes)]);
        let mut edges: Vec<_> = edges.chain(self.used.iter().copied()).collect();
        edges.sort_unstable();
        let (mut wanted, mut most) = (self.used_before_bytes, 0);
        for (_, is_more, bytes) in edges {
            wanted = if is_more == 1 { wanted + bytes } else { wanted.saturating_sub(bytes) };
            most = most.max(wanted);
        }
        most.max(full_bytes + least)
    }
}
