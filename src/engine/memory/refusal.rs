//! Why a pool has no memory for a request, and what helps.

use super::{Memory, Refusal};
use crate::backend::lock_limit;
use crate::dump::{Refused, RefusedBy};
use crate::error::{Retry, SourceError};
use crate::quota::{Level, QuotaExceeded};
use crate::size_class::Class;

impl Memory {
    /// Whether waiting may help a request that the source refused: some pool has memory that may come back, or the source is
    /// only busy.
    pub(in crate::engine) fn may_recover(&self, error: &SourceError) -> bool {
        match error.retry {
            Retry::Soon => true,
            Retry::Later => self.budget().has_claims_nearby(),
            Retry::Never => self.budget().used_bytes() > 0,
        }
    }

    /// Why a block of `class` can never be held.
    pub(in crate::engine) fn refusal_for_good(&self, class: Class) -> Refusal {
        let needed_bytes = class.bytes as u64;
        let over = self.budget().never(needed_bytes).unwrap_or_else(|| self.budget().full(needed_bytes));
        Refusal::Over { needed_bytes, over }
    }

    /// Why there was no memory for a request of `class`, and what helps. The error, the log lines, the dump and the diagnosis print
    /// the result.
    pub(in crate::engine) fn explain(&self, refusal: &Refusal, class: Class) -> Refused {
        let (level, needed_bytes, found, remedy) = match refusal {
            Refusal::Over { needed_bytes, over: QuotaExceeded { level: Level::Shared, .. } } => {
                let (found, remedy) = self.budget().shared_in_words(*needed_bytes);
                (RefusedBy::Shared, *needed_bytes, found, remedy.to_owned())
            }
            Refusal::Over { needed_bytes, over } => {
                let is_of_pool = over.level == Level::Pool;
                let could_fit = over.could_ever && (!is_of_pool || self.could_hold(class));
                let (found, remedy) =
                    if is_of_pool { self.limit_in_words(could_fit) } else { partition_in_words(could_fit) };
                (RefusedBy::Limit { could_fit }, *needed_bytes, found.to_owned(), remedy.to_owned())
            }
            Refusal::Line { needed_bytes, waiting, first_bytes } => {
                let requests = if *waiting == 1 { "earlier request is" } else { "earlier requests are" };
                let found = format!("{waiting} {requests} waiting and have priority, the first for {first_bytes} B");
                let limit = self.limit_name(Level::Pool);
                let remedy = format!("wait longer (PINPOOL_WAIT), return buffers first, or raise {limit}");
                let found = if *waiting == 1 { found.replacen("have", "has", 1) } else { found };
                (RefusedBy::Queue { first_bytes: *first_bytes }, *needed_bytes, found, remedy)
            }
            Refusal::Source(error) => {
                let (text, remedy) = error.clone().split();
                let found = format!("backend `{}`: {text}", self.source().name());
                let level = RefusedBy::Source { code: error.code() };
                (level, class.bytes as u64, found, remedy.unwrap_or_default().to_owned())
            }
        };
        Refused { level, needed_bytes, found, remedy }
    }

    /// The limit of the pool has no room: why, and what helps.
    fn limit_in_words(&self, could_fit: bool) -> (&'static str, &'static str) {
        match (self.may_grow(), could_fit) {
            (false, true) => (
                "the reserve is in use and PINPOOL_GROWTH=0",
                "return buffers first, raise PINPOOL_RESERVE, or set PINPOOL_GROWTH=1",
            ),
            (false, false) => (
                "the request exceeds the reserve and PINPOOL_GROWTH=0",
                "request less, raise PINPOOL_RESERVE, or set PINPOOL_GROWTH=1",
            ),
            (true, _) if self.is_lock_limited() => (
                "the process may not lock more memory (RLIMIT_MEMLOCK)",
                "request less, or raise the limit (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=)",
            ),
            (true, false) => ("the request exceeds the pool limit", "request less or raise PINPOOL_MAX_BYTES"),
            (true, true) if self.pageable.is_some() => (
                "the pool limit is reached, and as much unpinned memory is in use",
                "return buffers first or raise PINPOOL_MAX_BYTES",
            ),
            (true, true) => ("the pool limit is reached", "return buffers first or raise PINPOOL_MAX_BYTES"),
        }
    }

    /// The name of the setting to raise if the limit of `level` refuses.
    pub(in crate::engine) fn limit_name(&self, level: Level) -> &'static str {
        match level {
            Level::Account => "the partition limit",
            _ if !self.may_grow() => "PINPOOL_RESERVE",
            _ if self.is_lock_limited() => "RLIMIT_MEMLOCK",
            _ => "PINPOOL_MAX_BYTES",
        }
    }

    /// Whether the limit is what the process may lock, so that no setting raises it.
    fn is_lock_limited(&self) -> bool {
        // By a trial: a process with CAP_IPC_LOCK has a limit that does not bind it.
        let locked_bytes = || *self.lock_limit.get_or_init(lock_limit);
        let is_limit = |max_bytes| locked_bytes() == Some(max_bytes);
        self.source().name() == "mlock" && self.max_bytes().is_some_and(is_limit)
    }
}

fn partition_in_words(could_fit: bool) -> (&'static str, &'static str) {
    if could_fit {
        ("the partition limit is reached", "return its buffers first, or make the partition larger")
    } else {
        ("the request exceeds the partition limit", "request less, or make the partition larger")
    }
}
