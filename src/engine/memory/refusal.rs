//! The text of a refusal: the reason that a pool has no memory for a request, and a remedy.

use pinpool_os::format::Size;

use super::{Memory, Refusal};
use crate::backend::lock_limit;
use crate::error::{Retry, SourceError};
use crate::quota::{LimitLevel, QuotaExceeded};
use crate::report::{ExplainedRefusal, RefusedBy};
use crate::size_class::Class;

impl Memory {
    /// Returns whether waiting may help a request that the source refused: some pool has memory that may be released, or the
    /// source is only busy.
    pub(in crate::engine) fn may_recover(&self, error: &SourceError) -> bool {
        match error.retry {
            Retry::Soon => true,
            Retry::Later => self.budget.has_claims_nearby(),
            Retry::Never => self.budget.used_bytes() > 0,
        }
    }

    /// Explains the refusal of a request of `class` as text. The error, the log lines, the dump and the diagnosis print the
    /// result.
    pub(in crate::engine) fn explain(&self, refusal: &Refusal, class: Class) -> ExplainedRefusal {
        let mut needed_bytes = self.supply.block_bytes(class);
        let (by, found, remedy) = match refusal {
            Refusal::Limit(QuotaExceeded { level: LimitLevel::Shared, .. }) => {
                let (found, remedy) = self.budget.describe_shared(needed_bytes);
                (RefusedBy::Shared { by_others: self.budget.is_held_by_others() }, found, remedy.to_owned())
            }
            Refusal::Limit(QuotaExceeded { level: LimitLevel::Partition, could_fit, .. }) => {
                let found = if *could_fit { "the partition is full" } else { "exceeds the limit of the partition" };
                let remedy = if *could_fit { "return its buffers sooner" } else { "request a smaller buffer" };
                let by = RefusedBy::Limit { could_fit: *could_fit };
                (by, found.to_owned(), format!("{remedy} or make the partition larger"))
            }
            Refusal::Limit(QuotaExceeded { level: LimitLevel::Pool, could_fit, bytes }) => {
                let could_fit = *could_fit && self.supply.could_hold(class);
                // A new granule or region may exceed the limit even if the buffer does not.
                needed_bytes = needed_bytes.max(if could_fit { 0 } else { *bytes });
                let limit = self.limit_name(LimitLevel::Pool);
                let found = match self.budget.max_bytes().map(Size) {
                    Some(max) if !could_fit => format!("exceeds the pool limit of {max} ({limit})"),
                    Some(max) => format!("the pool limit of {max} is reached ({limit})"),
                    None => format!("the pool limit is reached ({limit})"),
                };
                (RefusedBy::Limit { could_fit }, found, self.remedy(could_fit).to_owned())
            }
            Refusal::Queued { level, waiting, first_bytes } => {
                let requests = match *waiting {
                    1 => "1 earlier request is waiting and has".to_owned(),
                    waiting => format!("{waiting} earlier requests are waiting and have"),
                };
                let found = format!("{requests} priority, the first for {}", Size(*first_bytes));
                let limit = self.limit_name(*level);
                let remedy = format!("wait longer (PINPOOL_WAIT), return buffers sooner or raise {limit}");
                (RefusedBy::Queue { first_bytes: *first_bytes }, found, remedy)
            }
            Refusal::Source(error) => {
                let (text, remedy) = error.clone().unstable_split();
                let found = format!("backend `{}`: {text}", self.source().name());
                let by = RefusedBy::Source { code: error.code() };
                (by, found, remedy.unwrap_or_default())
            }
            Refusal::Closed => (RefusedBy::Limit { could_fit: false }, "the pool is closed".to_owned(), String::new()),
        };
        ExplainedRefusal { by, needed_bytes, found, remedy }
    }

    /// Returns the remedy if the limit of the pool has no room.
    fn remedy(&self, could_fit: bool) -> &'static str {
        match (self.may_grow(), could_fit) {
            (false, true) => {
                "return buffers sooner, raise PINPOOL_RESERVE (all of it is in use), or set PINPOOL_GROWTH=1"
            }
            (false, false) => {
                "request a smaller buffer, raise PINPOOL_RESERVE (it is too small), or set PINPOOL_GROWTH=1"
            }
            (true, _) if self.is_lock_limited() => {
                "request a smaller buffer or raise the limit (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=)"
            }
            (true, false) => "request a smaller buffer or raise PINPOOL_MAX_BYTES",
            (true, true) if self.pageable.is_some() => {
                "return buffers sooner or raise PINPOOL_MAX_BYTES (it also limits pageable memory)"
            }
            (true, true) => "return buffers sooner or raise PINPOOL_MAX_BYTES",
        }
    }

    /// Returns the name of the setting to raise if the limit of `level` refuses.
    pub(in crate::engine) fn limit_name(&self, level: LimitLevel) -> &'static str {
        match level {
            LimitLevel::Partition => "the limit of the partition",
            LimitLevel::Pool | LimitLevel::Shared if !self.may_grow() => "PINPOOL_RESERVE",
            LimitLevel::Pool | LimitLevel::Shared if self.is_lock_limited() => "RLIMIT_MEMLOCK",
            LimitLevel::Pool | LimitLevel::Shared => "PINPOOL_MAX_BYTES",
        }
    }

    /// Returns whether the pool's limit equals the number of bytes that the process may lock, so that no setting raises it.
    fn is_lock_limited(&self) -> bool {
        // `lock_limit` tries to lock more: RLIMIT_MEMLOCK does not bind a process with CAP_IPC_LOCK.
        let locked_bytes = || *self.lock_limit.get_or_init(lock_limit);
        let is_limit = |max_bytes| locked_bytes() == Some(max_bytes);
        self.source().name() == "mlock" && self.budget.max_bytes().is_some_and(is_limit)
    }
}
