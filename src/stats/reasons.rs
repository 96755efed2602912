//! Why gets missed, and why buffers left.

/// Why a get was not served by an idle buffer. The first of the rules that holds:
///
/// 1. It had to wait or to fall back, since it had been refused before: `in_line`, `at_ceiling`, `backend_failed`.
/// 2. Its class never had a buffer: `first_of_size`.
/// 3. Its class had more buffers at some time than it has now: `evicted_earlier`.
/// 4. A buffer of its class is in flight: `in_flight`. Else `all_in_use`.
///
/// Under `PINPOOL_ROUNDING=exact` or `pow2`, a class may be forgotten that has no buffer, if there are over 1024.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct MissReasons {
    /// No buffer of this class was there before.
    pub first_of_size: u64,
    /// A buffer of this class was there before and has left, for one of the [reasons](EvictionReasons).
    pub evicted_earlier: u64,
    /// Users hold all buffers of this class, more than ever before.
    pub all_in_use: u64,
    /// Users hold all buffers of this class but for at least one that a device may still be reading.
    pub in_flight: u64,
    /// The ceiling left no room: served after a wait, or by memory that is not pinned.
    pub at_ceiling: u64,
    /// Stood in line behind other gets, and was served when its turn came, or by memory that is not pinned.
    pub in_line: u64,
    /// The back-end had refused: served at a later attempt, or by memory that is not pinned.
    pub backend_failed: u64,
}

/// One of the [`MissReasons`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MissReason {
    FirstOfSize,
    EvictedEarlier,
    AllInUse,
    InFlight,
    AtCeiling,
    InLine,
    BackendFailed,
}

impl MissReasons {
    pub(crate) fn count(&mut self, reason: MissReason) {
        let counter = match reason {
            MissReason::FirstOfSize => &mut self.first_of_size,
            MissReason::EvictedEarlier => &mut self.evicted_earlier,
            MissReason::AllInUse => &mut self.all_in_use,
            MissReason::InFlight => &mut self.in_flight,
            MissReason::AtCeiling => &mut self.at_ceiling,
            MissReason::InLine => &mut self.in_line,
            MissReason::BackendFailed => &mut self.backend_failed,
        };
        *counter += 1;
    }

    /// Each reason by the name of its field.
    pub fn by_name(&self) -> [(&'static str, u64); 7] {
        let Self { first_of_size, evicted_earlier, all_in_use, in_flight, at_ceiling, in_line, backend_failed } = *self;
        [
            ("first_of_size", first_of_size),
            ("evicted_earlier", evicted_earlier),
            ("all_in_use", all_in_use),
            ("in_flight", in_flight),
            ("at_ceiling", at_ceiling),
            ("in_line", in_line),
            ("backend_failed", backend_failed),
        ]
    }

    /// All misses.
    pub fn total(&self) -> u64 {
        self.by_name().iter().map(|(_, count)| count).sum()
    }
}

/// Why pinned buffers left the pool, to the arena or to the back-end.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct EvictionReasons {
    /// A put over the count limit: what TensorFlow counts.
    pub over_limit: u64,
    /// The count limit was lowered.
    pub limit_lowered: u64,
    /// A get needed the memory, of this pool or of another on the same arena. A put that makes room for a waiting get counts.
    pub reclaimed: u64,
    /// Over `PINPOOL_MAX_IDLE_BYTES`, or over a ceiling that was lowered.
    pub over_bytes: u64,
    /// The system is short of memory.
    pub pressure: u64,
    /// Idle for too long.
    pub expired: u64,
    /// [`Pool::trim`](crate::Pool::trim), or room for [`Pool::prewarm`](crate::Pool::prewarm).
    pub trimmed: u64,
    /// [`Pool::clear`](crate::Pool::clear).
    pub cleared: u64,
    /// Put while sizes vary, so that its memory merges with what is free beside it.
    pub merged: u64,
    /// Put to a pool that keeps none: its count limit is 0.
    pub not_kept: u64,
}

/// One of the [`EvictionReasons`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EvictionReason {
    OverLimit,
    LimitLowered,
    Reclaimed,
    OverBytes,
    Pressure,
    Expired,
    Trimmed,
    Cleared,
    Merged,
    NotKept,
}

impl EvictionReasons {
    pub(crate) fn count(&mut self, reason: EvictionReason) {
        let counter = match reason {
            EvictionReason::OverLimit => &mut self.over_limit,
            EvictionReason::LimitLowered => &mut self.limit_lowered,
            EvictionReason::Reclaimed => &mut self.reclaimed,
            EvictionReason::OverBytes => &mut self.over_bytes,
            EvictionReason::Pressure => &mut self.pressure,
            EvictionReason::Expired => &mut self.expired,
            EvictionReason::Trimmed => &mut self.trimmed,
            EvictionReason::Cleared => &mut self.cleared,
            EvictionReason::Merged => &mut self.merged,
            EvictionReason::NotKept => &mut self.not_kept,
        };
        *counter += 1;
    }

    /// Each reason by the name of its field.
    pub fn by_name(&self) -> [(&'static str, u64); 10] {
        let Self { over_limit, limit_lowered, reclaimed, over_bytes, pressure, .. } = *self;
        let Self { expired, trimmed, cleared, merged, not_kept, .. } = *self;
        [
            ("over_limit", over_limit),
            ("limit_lowered", limit_lowered),
            ("reclaimed", reclaimed),
            ("over_bytes", over_bytes),
            ("pressure", pressure),
            ("expired", expired),
            ("trimmed", trimmed),
            ("cleared", cleared),
            ("merged", merged),
            ("not_kept", not_kept),
        ]
    }

    /// All buffers that left.
    pub fn total(&self) -> u64 {
        self.by_name().iter().map(|(_, count)| count).sum()
    }
}
