//! Which path the gets of a pool take, for tests that count.

use crate::buffer::PinnedBuf;
use crate::pool::Pool;

/// Whether gets and puts of the calling thread may take the short path: the preset has one, and no get waits.
pub fn is_open(pool: &Pool) -> bool {
    pool.core().has_short_path()
}

/// A request that only takes the short path: `None` where another path would have to serve it.
pub fn get(pool: &Pool, len: usize) -> Option<PinnedBuf> {
    let block = pool.core().cached_shard()?.take(len)?;
    Some(PinnedBuf::over_plain(block, len))
}
