//! The idle buffers of a pool, by the rules of its preset.
//!
//! | preset | file | reuse | eviction | lock |
//! | --- | --- | --- | --- | --- |
//! | `tensorflow` | `exact.rs` | oldest of the class first | oldest of all first | one |
//! | `adaptive` | `adaptive.rs` over `thread_cache` | newest of the class first | oldest of all first | one per thread |
//!
//! One structure cannot serve both: TensorFlow's order is one list for the whole process, and keeping it costs every put
//! a lock that all threads share.
//!
//! Generic over what is held, so that tests hold integers. Owns the counts of hits, puts and evictions, and the limit.
//! Never releases, waits or logs: victims leave by return value, to be released outside every lock.

mod adaptive;
mod exact;
pub mod thread_cache;

use self::adaptive::AdaptiveIdle;
use self::exact::ExactIdle;
use self::thread_cache::Entry;
use crate::policy::{Check, Window};
use crate::size_class::Class;

/// The idle buffers of one pool.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // One per pool, and a hit follows no pointer to it.
pub(super) enum Idle<T> {
    Exact(ExactIdle<T>),
    Adaptive(AdaptiveIdle<T>),
}

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

/// What the idle buffers and their counts are now.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct IdleStats {
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

/// The same call on either variant.
macro_rules! on_variant {
    ($self:ident, $idle:ident => $call:expr) => {
        match $self {
            Idle::Exact($idle) => $call,
            Idle::Adaptive($idle) => $call,
        }
    };
}

impl<T> Idle<T> {
    /// By TensorFlow's rules.
    pub(super) fn exact(limit: u64, auto_resize: bool) -> Self {
        Self::Exact(ExactIdle::new(limit, auto_resize))
    }

    /// By the rules of the adaptive preset.
    pub(super) fn adaptive(limit: u64, auto_resize: bool) -> Self {
        Self::Adaptive(AdaptiveIdle::new(limit, auto_resize))
    }

    /// An idle buffer of `class`: a hit.
    #[inline]
    pub(super) fn take(&self, class: Class) -> Option<Box<Entry<T>>> {
        on_variant!(self, idle => idle.take(class))
    }

    /// Keeps `entry`, of `class`, from `now_us` on.
    #[inline]
    pub(super) fn put(&self, entry: Box<Entry<T>>, class: Class, now_us: u64) -> PutOutcome<T> {
        match self {
            Self::Exact(idle) => idle.put(entry, class),
            Self::Adaptive(idle) => idle.put(entry, now_us),
        }
    }

    /// A get was served by the underlying allocator.
    pub(super) fn count_allocated(&self) {
        on_variant!(self, idle => idle.count_allocated());
    }

    /// A get found nothing idle at `now_us`, so the limit stays up.
    pub(super) fn note_miss(&self, now_us: u64) {
        if let Self::Adaptive(idle) = self {
            idle.note_miss(now_us);
        }
    }

    /// The buffer that was put back longest ago, to make room.
    pub(super) fn reclaim(&self) -> Option<Box<Entry<T>>> {
        on_variant!(self, idle => idle.reclaim())
    }

    /// Buffers that have been idle too long at `now_us`.
    pub(super) fn expire(&self, now_us: u64) -> Vec<Box<Entry<T>>> {
        match self {
            Self::Exact(_) => Vec::new(),
            Self::Adaptive(idle) => idle.expire(now_us),
        }
    }

    /// Lowers a limit that no get has needed for long.
    pub(super) fn lower_limit(&self, now_us: u64) -> Option<LoweredLimit<T>> {
        match self {
            Self::Exact(_) => None,
            Self::Adaptive(idle) => idle.lower_limit(now_us),
        }
    }

    /// Everything; a new window begins.
    pub(super) fn clear(&self) -> Vec<Box<Entry<T>>> {
        on_variant!(self, idle => idle.clear())
    }

    /// Everything; from now on nothing is kept.
    pub(super) fn seal(&self) -> Vec<Box<Entry<T>>> {
        on_variant!(self, idle => idle.seal())
    }

    pub(super) fn is_sealed(&self) -> bool {
        on_variant!(self, idle => idle.is_sealed())
    }

    /// True if a put that was kept raced with the seal, which may have missed its count. The exact variant counts and
    /// rejects under one lock.
    #[inline]
    pub(super) fn may_have_raced_with_seal(&self) -> bool {
        match self {
            Self::Exact(_) => false,
            Self::Adaptive(idle) => idle.is_sealed(),
        }
    }

    /// After this barrier earlier puts are counted, and later puts see the seal.
    pub(super) fn order_with_puts(&self) {
        if let Self::Adaptive(idle) = self {
            idle.order_with_puts();
        }
    }

    /// Bytes of the idle buffers.
    pub(super) fn bytes(&self) -> u64 {
        on_variant!(self, idle => idle.bytes())
    }

    pub(super) fn stats(&self) -> IdleStats {
        on_variant!(self, idle => idle.stats())
    }
}
