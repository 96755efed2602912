//! The idle buffers of a pool, under the rules of its preset.
//!
//! | preset | side | order of reuse | lock |
//! | --- | --- | --- | --- |
//! | `tensorflow` | [`ExactIdle`] over [`store::Exact`](crate::engine::idle::exact_store::ExactStore) | oldest first, evicted oldest first | one |
//! | `adaptive` | [`AdaptiveIdle`] over [`Front`](crate::engine::idle::thread_cache::Front) | newest first, evicted oldest first | one a thread |
//!
//! One structure cannot serve both: TensorFlow's order is one line for the whole process, and keeping it costs every put
//! a lock that all threads share.
//!
//! Counts what it does; never releases, waits or logs. What leaves, leaves by value.

mod adaptive;
mod exact;
pub(crate) mod exact_store;
pub mod thread_cache;

use super::block::Block;
use crate::policy::{Check, Window};
use crate::size_class::Class;

pub(super) use adaptive::AdaptiveIdle;
pub(super) use exact::ExactIdle;

/// One of the two sides.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // One for each pool, and a hit follows no pointer to it.
pub(super) enum Idle {
    Exact(ExactIdle),
    Adaptive(AdaptiveIdle),
}

/// What a put leaves to do, outside of every lock.
#[derive(Debug, Default)]
pub(super) struct Aftermath {
    /// The buffer that the limit pushed out.
    pub(super) victim: Option<Block>,
    /// The buffer itself: nothing is kept under a limit of 0, or any more.
    pub(super) unkept: Option<Block>,
    /// The rates were looked at.
    pub(super) check: Option<Check>,
}

/// What a side counted.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Figures {
    pub(super) window: Window,
    pub(super) total: Window,
    pub(super) limit: u64,
    pub(super) buffers: u64,
    pub(super) bytes: u64,
    pub(super) reclaimed: u64,
    pub(super) aged: u64,
    pub(super) checks: u64,
    pub(super) raises: u64,
    pub(super) lowers: u64,
}

/// Passes a call to whichever side there is.
macro_rules! side {
    ($self:ident, $idle:ident => $call:expr) => {
        match $self {
            Idle::Exact($idle) => $call,
            Idle::Adaptive($idle) => $call,
        }
    };
}

impl Idle {
    /// An idle block of `class`: a hit.
    #[inline]
    pub(super) fn take(&self, class: Class) -> Option<Block> {
        side!(self, idle => idle.take(class))
    }

    /// Keeps `block`, which came back at `now_us`.
    #[inline]
    pub(super) fn put(&self, block: Block, now_us: u64) -> Aftermath {
        side!(self, idle => idle.put(block, now_us))
    }

    /// A get was served by the underlying allocator.
    pub(super) fn count_allocated(&self) {
        side!(self, idle => idle.count_allocated());
    }

    /// The block that came back longest ago, to make room.
    pub(super) fn reclaim(&self) -> Option<Block> {
        side!(self, idle => idle.reclaim())
    }

    /// Everything; a new window begins.
    pub(super) fn clear(&self) -> Vec<Block> {
        side!(self, idle => idle.clear())
    }

    /// Everything; from now on nothing is kept.
    pub(super) fn seal(&self) -> Vec<Block> {
        side!(self, idle => idle.seal())
    }

    /// Has it been sealed?
    pub(super) fn is_sealed(&self) -> bool {
        side!(self, idle => idle.is_sealed())
    }

    /// Was it sealed while a put that it kept was on its way, so that who sealed it may have missed that put's count? The
    /// exact side counts and refuses under one lock.
    #[inline]
    pub(super) fn was_sealed_meanwhile(&self) -> bool {
        match self {
            Self::Exact(_) => false,
            Self::Adaptive(idle) => idle.is_sealed(),
        }
    }

    /// After this every put is counted, or sees the seal.
    pub(super) fn order_with_puts(&self) {
        if let Self::Adaptive(idle) = self {
            idle.order_with_puts();
        }
    }

    /// Bytes of the idle blocks.
    pub(super) fn bytes(&self) -> u64 {
        side!(self, idle => idle.bytes())
    }

    pub(super) fn figures(&self) -> Figures {
        side!(self, idle => idle.figures())
    }
}
