//! The ceiling that a pool shares with others: that of a host ledger, else that of its process.

use super::{HostLedger, LedgerReport, Loss, ProcessCeiling, Want};
use pinpool_os::words::Size;

/// What the bytes of a pool are claimed under beside its own ceiling.
#[derive(Debug)]
pub(crate) enum SharedCeiling {
    OfHost(HostLedger),
    OfProcess(ProcessCeiling),
}

impl SharedCeiling {
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::OfHost(ledger) => ledger.name(),
            Self::OfProcess(_) => "(this process)",
        }
    }

    pub(crate) fn max_bytes(&self) -> u64 {
        match self {
            Self::OfHost(ledger) => ledger.max_bytes(),
            Self::OfProcess(ceiling) => ceiling.max_bytes(),
        }
    }

    /// Claims `bytes`; false if that would exceed the ceiling, or use what others wait for.
    pub(crate) fn claim(&self, bytes: u64) -> bool {
        match self {
            Self::OfHost(ledger) => ledger.claim(bytes),
            Self::OfProcess(ceiling) => ceiling.claim(bytes),
        }
    }

    /// `bytes` that were claimed are with the system again.
    pub(crate) fn give_back(&self, bytes: u64) {
        match self {
            _ if bytes == 0 => {}
            Self::OfHost(ledger) => ledger.give_back(bytes),
            Self::OfProcess(ceiling) => ceiling.give_back(bytes),
        }
    }

    /// Bytes that a claim of `bytes` may have. If these are fewer, the shares of dead owners are taken back first.
    pub(crate) fn room_for(&self, bytes: u64) -> u64 {
        match self {
            Self::OfHost(ledger) => ledger.room_for(bytes),
            Self::OfProcess(ceiling) => ceiling.room_for(bytes),
        }
    }

    /// A get or reserve of this owner that needs `needed_bytes` wants `bytes` of room from now on. Wakes the other owners if that
    /// is more than before. Returns what it wanted before.
    pub(crate) fn set_want(&self, want: &Want, bytes: u64, needed_bytes: u64) -> u64 {
        match self {
            Self::OfHost(ledger) => ledger.set_want(want, bytes, needed_bytes),
            Self::OfProcess(ceiling) => ceiling.set_want(want, bytes, needed_bytes),
        }
    }

    /// Whether other owners want memory; some of them may be dead.
    pub(crate) fn is_wanted(&self) -> bool {
        match self {
            Self::OfHost(ledger) => ledger.is_wanted(),
            Self::OfProcess(ceiling) => ceiling.is_wanted(),
        }
    }

    /// What living owners want and there is no room for.
    pub(crate) fn others_lack(&self) -> u64 {
        match self {
            Self::OfHost(ledger) => ledger.others_lack(),
            Self::OfProcess(ceiling) => ceiling.others_lack(),
        }
    }

    /// What a put of this owner is to make room for, because others lack it and this owner holds more than an even share; else 0.
    pub(crate) fn owed_bytes(&self) -> u64 {
        match self {
            Self::OfHost(ledger) => ledger.owed_bytes(),
            Self::OfProcess(ceiling) => ceiling.owed_bytes(),
        }
    }

    /// So much of what this owner holds is idle: for those who look.
    pub(crate) fn note_idle(&self, bytes: u64) {
        match self {
            Self::OfHost(ledger) => ledger.note_idle(bytes),
            Self::OfProcess(ceiling) => ceiling.note_idle(bytes),
        }
    }

    pub(crate) fn host_ledger(&self) -> Option<&HostLedger> {
        match self {
            Self::OfHost(ledger) => Some(ledger),
            Self::OfProcess(_) => None,
        }
    }

    pub(crate) fn process_ceiling(&self) -> Option<&ProcessCeiling> {
        match self {
            Self::OfHost(_) => None,
            Self::OfProcess(ceiling) => Some(ceiling),
        }
    }

    /// Who holds what, for a get of `needed_bytes` that found no room; and what helps.
    pub(crate) fn in_words(&self, needed_bytes: u64) -> (String, &'static str) {
        if let Self::OfHost(ledger) = self
            && let Some(loss) = ledger.loss()
        {
            let what = match loss {
                Loss::Removed => "its file in /dev/shm was removed",
                Loss::Closed => "this process has closed its descriptor",
            };
            let found = format!("PINPOOL_LEDGER={}: {what}, so this pool can no longer grow", ledger.name());
            return (found, "return buffers to this pool, or restart all processes that share the limit");
        }
        let is_too_large = needed_bytes > self.max_bytes();
        match self {
            Self::OfHost(ledger) => {
                let report = ledger.report();
                let LedgerReport { name, max_bytes, held_bytes, .. } = &report;
                let (max_bytes, others) = (max_bytes.unwrap_or(u64::MAX), report.others_in_words());
                let found = format!(
                    "exceeds the shared limit {name} of {}; {} are held ({others})",
                    Size(max_bytes),
                    Size(*held_bytes)
                );
                let remedy = if is_too_large {
                    "request less, or restart all its processes with a larger PINPOOL_MAX_BYTES"
                } else {
                    "return buffers in these processes, wait longer (PINPOOL_WAIT), or restart them with a larger PINPOOL_MAX_BYTES"
                };
                (found, remedy)
            }
            Self::OfProcess(ceiling) => {
                let remedy = if is_too_large {
                    "request less, or set PINPOOL_MAX_BYTES to a size"
                } else {
                    "return buffers in these pools, wait longer (PINPOOL_WAIT), or set PINPOOL_MAX_BYTES to a size, which applies to \
                     each pool"
                };
                (ceiling.in_words(), remedy)
            }
        }
    }
}

#[cfg(all(test, target_os = "linux", not(miri), not(pinpool_loom)))] // Shared memory.
mod tests {
    use std::sync::Arc;

    use super::super::report;
    use super::*;
    use crate::quota::Budget;

    #[test]
    fn a_claim_keeps_the_place_though_its_pool_has_ended() {
        let name = format!("unit-{}-outlives", std::process::id());
        let ledger = HostLedger::attach(&name, None, 100).unwrap();
        let pool = Budget::under(Some(Arc::new(SharedCeiling::OfHost(ledger))), None);
        let claim = pool.budget().claim(30).unwrap();
        drop(pool);
        assert_eq!(report(&name).unwrap().unwrap().held_bytes, 30);
        drop(claim);
        assert!(report(&name).unwrap().is_none());
    }
}
