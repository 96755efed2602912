//! Why requests missed and why buffers left, as the pool counts them.

use super::{EvictionReasons, MissReasons};

/// Why a request missed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MissReason {
    FirstOfSize,
    EvictedEarlier,
    AllInUse,
}

/// Why a buffer left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EvictionReason {
    OverLimit,
    Reclaimed,
    Expired,
    Released,
}

impl MissReasons {
    pub(crate) fn count(&mut self, reason: MissReason) {
        match reason {
            MissReason::FirstOfSize => self.first_of_size += 1,
            MissReason::EvictedEarlier => self.evicted_earlier += 1,
            MissReason::AllInUse => self.all_in_use += 1,
        }
    }
}

impl EvictionReasons {
    pub(crate) fn count(&mut self, reason: EvictionReason) {
        match reason {
            EvictionReason::OverLimit => self.over_limit += 1,
            EvictionReason::Reclaimed => self.reclaimed += 1,
            EvictionReason::Expired => self.expired += 1,
            EvictionReason::Released => self.released += 1,
        }
    }
}
