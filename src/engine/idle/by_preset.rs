//! The idle buffers of one pool: exact or adaptive, by its preset.
//!
//! Passes each call on, and says what the exact variant does not do. Owns nothing else.

use super::adaptive::AdaptiveIdle;
use super::exact::ExactIdle;
use super::thread_cache::{Entry, Shard};
use super::{LoweredLimit, PutOutcome};
use crate::size_class::Class;
use crate::stats::Stats;

/// The idle buffers of one pool.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // One per pool, and a hit follows no pointer to it.
pub(in crate::engine) enum Idle<T> {
    Exact(ExactIdle<T>),
    Adaptive(AdaptiveIdle<T>),
}

/// Makes the same call on either variant.
macro_rules! on_variant {
    ($self:ident, $idle:ident => $call:expr) => {
        match $self {
            Idle::Exact($idle) => $call,
            Idle::Adaptive($idle) => $call,
        }
    };
}

impl<T> Idle<T> {
    /// Buffers idle for `idle_us` return to the arena, under the rules that have one.
    pub(in crate::engine) fn new(is_adaptive: bool, limit: u64, auto_resize: bool, idle_us: u64) -> Self {
        if is_adaptive {
            Self::Adaptive(AdaptiveIdle::new(limit, auto_resize, idle_us))
        } else {
            Self::Exact(ExactIdle::new(limit, auto_resize))
        }
    }

    /// An idle buffer of `class`: a hit.
    pub(in crate::engine) fn take(&self, class: Class) -> Option<Box<Entry<T>>> {
        on_variant!(self, idle => idle.take(class))
    }

    /// Keeps `entry`, of `class`.
    pub(in crate::engine) fn put(&self, entry: Box<Entry<T>>, class: Class) -> PutOutcome<T> {
        match self {
            Self::Exact(idle) => idle.put(entry, class),
            Self::Adaptive(idle) => idle.put(entry),
        }
    }

    /// Keeps `entry`, of a class that a cache of threads gave out, for the thread that took it, unless there is more to be done.
    pub(in crate::engine) fn put_remote(&self, entry: Box<Entry<T>>) -> Result<(), Box<Entry<T>>> {
        match self {
            Self::Exact(_) => Err(entry),
            Self::Adaptive(idle) => idle.put_remote(entry),
        }
    }

    /// A get was served by the underlying allocator.
    pub(in crate::engine) fn count_allocated(&self) {
        on_variant!(self, idle => idle.count_allocated());
    }

    /// A put whose buffer is not kept here.
    pub(in crate::engine) fn count_put(&self) {
        if let Self::Adaptive(idle) = self {
            idle.count_put();
        }
    }

    /// A get found nothing idle at `now_us`, so the limit stays up.
    pub(in crate::engine) fn note_miss(&self, now_us: u64) {
        if let Self::Adaptive(idle) = self {
            idle.note_miss(now_us);
        }
    }

    /// The buffer that was put back longest ago, to make room.
    pub(in crate::engine) fn reclaim(&self) -> Option<Box<Entry<T>>> {
        on_variant!(self, idle => idle.reclaim())
    }

    /// Buffers that have been idle too long at `now_us`.
    pub(in crate::engine) fn expire(&self, now_us: u64) -> Vec<Box<Entry<T>>> {
        match self {
            Self::Exact(_) => Vec::new(),
            Self::Adaptive(idle) => idle.expire(now_us),
        }
    }

    /// Lowers a limit that no get has needed for long.
    pub(in crate::engine) fn lower_limit(&self, now_us: u64) -> Option<LoweredLimit<T>> {
        match self {
            Self::Exact(_) => None,
            Self::Adaptive(idle) => idle.lower_limit(now_us),
        }
    }

    /// Everything; a new window begins.
    pub(in crate::engine) fn clear(&self) -> Vec<Box<Entry<T>>> {
        on_variant!(self, idle => idle.clear())
    }

    /// Everything; from now on nothing is kept.
    pub(in crate::engine) fn seal(&self) -> Vec<Box<Entry<T>>> {
        on_variant!(self, idle => idle.seal())
    }

    /// The calling thread's shard, whose short path serves most hits; `None` where each hit needs the one order of all.
    pub(in crate::engine) fn own_shard(&self) -> Option<&Shard<T>> {
        match self {
            Self::Exact(_) => None,
            Self::Adaptive(idle) => Some(idle.own_shard()),
        }
    }

    /// The clock was read: it is `now_us`, and what was put before was put by `put_by_us`.
    pub(in crate::engine) fn tick(&self, now_us: u64, put_by_us: u64) {
        if let Self::Adaptive(idle) = self {
            idle.tick(now_us, put_by_us);
        }
    }

    /// While `attends`, each hit and put takes the slow path, which looks at more. What was put before is found by a take.
    pub(in crate::engine) fn attend(&self, attends: bool) {
        if let Self::Adaptive(idle) = self {
            idle.set_attention(attends);
        }
    }

    /// Idle buffers of `class`. Walks them.
    pub(in crate::engine) fn count_of(&self, class: Class) -> u64 {
        on_variant!(self, idle => idle.count_of(class))
    }

    /// Bytes of the idle buffers.
    pub(in crate::engine) fn bytes(&self) -> u64 {
        on_variant!(self, idle => idle.bytes())
    }

    /// Idle buffers.
    pub(in crate::engine) fn count(&self) -> u64 {
        on_variant!(self, idle => idle.count())
    }

    pub(in crate::engine) fn fill(&self, stats: &mut Stats) {
        on_variant!(self, idle => idle.fill(stats));
    }
}
