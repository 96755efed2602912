//! Why buffers ceased to exist.

use super::EvictionReasons;

/// Why a buffer ceased to exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EvictionReason {
    OverLimit,
    Reclaimed,
    Expired,
    Other,
}

impl EvictionReasons {
    pub(crate) fn count(&mut self, reason: EvictionReason) {
        match reason {
            EvictionReason::OverLimit => self.over_limit += 1,
            EvictionReason::Reclaimed => self.reclaimed += 1,
            EvictionReason::Expired => self.expired += 1,
            EvictionReason::Other => self.other += 1,
        }
    }
}
