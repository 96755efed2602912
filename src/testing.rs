//! For tests of code that uses pinpool: virtual time, and a look at what the library keeps to itself (feature `testing`).
//!
//! | item | for |
//! | --- | --- |
//! | [`ManualClock`] | the time of a pool, moved by hand ([`PoolBuilder::clock`](crate::PoolBuilder::clock)) |
//! | [`look`], [`prepare_step`] | what the maintenance thread of a pool does, one step after the other |
//! | [`short_path`] | which path a get takes |
//! | [`setting`], [`page_tiers`] | the value of a variable in a pool; what an smaps file says of some addresses |
//! | [`arena`], [`thread_cache`] | two parts, to be measured alone; they change without notice |
//!
//! Scripted failures and the contract of back-ends are in the crate `pinpool-testing`.

/// The arena: where a buffer is placed in memory, and what goes back. Numbers in, plans out.
pub mod arena {
    pub use crate::arena::*;
}
pub mod short_path;

pub use crate::engine::ManualClock;
pub use crate::engine::idle::thread_cache;

use crate::backend::PageTiers;
use crate::config::env;
use crate::pool::Pool;

/// The value that the variable `name` would have in a pool with the settings of `pool`.
pub fn setting(pool: &Pool, name: &str) -> String {
    env::values(pool.config()).find(|(found, _)| found == name).map(|(_, value)| value).unwrap_or_default()
}

/// The pages behind `len_bytes` addresses from `start`, as the text of an smaps file says.
pub fn page_tiers(smaps: &str, start: usize, len_bytes: usize) -> PageTiers {
    PageTiers::in_smaps(smaps, start, len_bytes)
}

/// Completes copies and does what is due by the pool's clock, as its maintenance thread does when it wakes. Prepares no memory.
pub fn look(pool: &Pool) {
    pool.core().look();
}

/// Moves a few granules to where a get will want them, as the maintenance thread does while nothing is due (`policy-R13`).
/// Returns whether there were any to move.
pub fn prepare_step(pool: &Pool) -> bool {
    pool.core().prepare_step()
}
