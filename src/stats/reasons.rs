//! Why gets missed, and why buffers left.

/// A structure with a counter for each reason, and the enumeration of the reasons: a new one is a line.
macro_rules! reasons {
    (
        $(#[$doc:meta])* $counters:ident, $reason:ident, $all:literal;
        $($(#[$field_doc:meta])* $field:ident = $variant:ident,)+
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize))]
        #[non_exhaustive]
        pub struct $counters {
            $($(#[$field_doc])* pub $field: u64,)+
        }

        #[doc = concat!("One of the [`", stringify!($counters), "`].")]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum $reason {
            $($variant,)+
        }

        impl $counters {
            pub(crate) fn count(&mut self, reason: $reason) {
                match reason {
                    $($reason::$variant => self.$field += 1,)+
                }
            }

            /// Each reason by the name of its field.
            pub fn by_name(&self) -> [(&'static str, u64); [$(stringify!($field)),+].len()] {
                [$((stringify!($field), self.$field)),+]
            }

            #[doc = $all]
            pub fn total(&self) -> u64 {
                self.by_name().iter().map(|(_, count)| count).sum()
            }
        }
    };
}

reasons! {
    /// Why a get was not served by an idle buffer. The first of the rules that holds:
    ///
    /// 1. It had to wait or to fall back, since it had been refused before: `in_line`, `at_ceiling`, `backend_failed`.
    /// 2. Its class never had a buffer: `first_of_size`.
    /// 3. Its class had more buffers at some time than it has now: `evicted_earlier`.
    /// 4. A buffer of its class is in flight: `in_flight`. Else `all_in_use`.
    ///
    /// Under `PINPOOL_ROUNDING=exact` or `pow2`, a class may be forgotten that has no buffer, if there are over 1024.
    MissReasons, MissReason, "All misses.";
    /// No buffer of this class was there before.
    first_of_size = FirstOfSize,
    /// A buffer of this class was there before and has left, for one of the [reasons](EvictionReasons).
    evicted_earlier = EvictedEarlier,
    /// Users hold all buffers of this class, more than ever before.
    all_in_use = AllInUse,
    /// Users hold all buffers of this class but for at least one that a device may still be reading.
    in_flight = InFlight,
    /// The ceiling left no room: served after a wait, or by memory that is not pinned.
    at_ceiling = AtCeiling,
    /// Stood in line behind other gets, and was served when its turn came, or by memory that is not pinned.
    in_line = InLine,
    /// The back-end had refused: served at a later attempt, or by memory that is not pinned.
    backend_failed = BackendFailed,
}

reasons! {
    /// Why pinned buffers left the pool, to the arena or to the back-end.
    EvictionReasons, EvictionReason, "All buffers that left.";
    /// Over the count limit: what TensorFlow counts.
    over_limit = OverLimit,
    /// The count limit was lowered.
    limit_lowered = LimitLowered,
    /// A get needed the memory, of this pool or of another on the same arena. A put that makes room for a waiting get counts.
    reclaimed = Reclaimed,
    /// Over `PINPOOL_MAX_IDLE_BYTES`, or over a ceiling that was lowered.
    over_bytes = OverBytes,
    /// The system is short of memory.
    pressure = Pressure,
    /// Idle for too long.
    expired = Expired,
    /// [`Pool::trim`](crate::Pool::trim), or room for [`Pool::prewarm`](crate::Pool::prewarm).
    trimmed = Trimmed,
    /// [`Pool::clear`](crate::Pool::clear).
    cleared = Cleared,
    /// Put while sizes vary, so that its memory merges with what is free beside it.
    merged = Merged,
    /// Put to a pool that keeps none: its count limit is 0.
    not_kept = NotKept,
}
