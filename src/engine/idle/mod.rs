//! The idle buffers of a pool, by the rules of its preset.
//!
//! | preset | file | reuse | eviction | lock |
//! | --- | --- | --- | --- | --- |
//! | `tensorflow` | `exact.rs` | oldest of the class first | oldest of all first | one |
//! | `adaptive` | `adaptive.rs` over `thread_cache` | newest of the class first | oldest of all first | one per thread |
//!
//! `by_preset.rs` has the type that is one of the two. One structure cannot serve both: TensorFlow's order is one list for
//! the whole process, and keeping it costs every put a lock that all threads share.
//!
//! Generic over what is held, so that tests hold integers. Owns the counts of hits, puts and evictions, and the limit.
//! Never releases, waits or logs: victims leave by return value, to be released outside every lock.

mod adaptive;
mod by_preset;
mod exact;
pub mod thread_cache;

use self::thread_cache::Entry;
use crate::policy::{Check, Window};
use crate::stats::Stats;

pub(super) use by_preset::Idle;

/// What a put leaves to do outside every lock.
#[derive(Debug)]
pub(super) struct PutOutcome<T> {
    /// Evicted by the limit.
    pub(super) victim: Option<Box<Entry<T>>>,
    /// The buffer itself: nothing is kept under a limit of 0 or after the seal.
    pub(super) rejected: Option<Box<Entry<T>>>,
    /// The result of a check of the rates.
    pub(super) check: Option<Check>,
}

impl<T> Default for PutOutcome<T> {
    fn default() -> Self {
        Self { victim: None, rejected: None, check: None }
    }
}

/// A limit that came down, and the buffers over it.
#[derive(Debug)]
pub(super) struct LoweredLimit<T> {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) victims: Vec<Box<Entry<T>>>,
}

/// What `total` counts over the life of a pool.
fn fill_totals(stats: &mut Stats, total: Window) {
    stats.gets += total.gets();
    stats.hits += total.get_from_pool;
    stats.misses += total.allocated;
    stats.puts += total.put;
    stats.evicted += total.evicted;
}
