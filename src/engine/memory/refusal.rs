//! Why a pool has no memory for a get, and what helps, in words.

use pinpool_os::words::Size;

use super::{Memory, Refusal};
use crate::backend::lock_limit;
use crate::error::{Error, ErrorKind, Report, Retry, SourceError, UsageReport};
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

    /// The error of a get of `len` bytes that was refused while the pool held `usage`.
    pub(in crate::engine) fn error(&self, len: usize, refusal: Refusal, usage: UsageReport, report: Report) -> Error {
        let asked_bytes = len as u64;
        if let Refusal::Source(source) = refusal {
            let backend = self.source().name();
            return ErrorKind::Backend { backend, asked_bytes, usage, source, report }.into();
        }
        let (needed_bytes, found, remedy) = self.in_words(&refusal);
        ErrorKind::Limit { asked_bytes, needed_bytes, found, usage, remedy, report }.into()
    }

    /// Why there is no memory, for the log line of a shortage.
    pub(in crate::engine) fn why(&self, refusal: &Refusal) -> String {
        let (_, found, remedy) = self.in_words(refusal);
        if remedy.is_empty() { found } else { format!("{found}: {remedy}") }
    }

    /// What was needed with rounding, why there is no memory, and what helps; a source says that itself.
    fn in_words(&self, refusal: &Refusal) -> (u64, String, String) {
        match refusal {
            Refusal::Over { needed_bytes, over: QuotaExceeded { level: Level::Shared, .. } } => {
                let (found, remedy) = self.budget().shared_in_words(*needed_bytes);
                (*needed_bytes, found, remedy.to_owned())
            }
            Refusal::Over { needed_bytes, over } => {
                let limit = self.limit_name(over.level);
                let found = match (over.level, self.max_bytes()) {
                    (Level::Account, _) => "the partition is full".to_owned(),
                    (_, Some(max_bytes)) if *needed_bytes > max_bytes => {
                        format!("exceeds the pool limit of {} ({limit})", Size(max_bytes))
                    }
                    (_, Some(max_bytes)) => format!("the pool limit of {} is reached ({limit})", Size(max_bytes)),
                    (_, None) => format!("the pool limit is reached ({limit})"),
                };
                (*needed_bytes, found, self.remedy(*needed_bytes, *over).to_owned())
            }
            Refusal::Line { needed_bytes, waiting, first_bytes } => {
                let are = if *waiting == 1 { "request is waiting and has" } else { "requests are waiting and have" };
                let first = Size(*first_bytes);
                let found = format!("{waiting} earlier {are} priority, the first for {first}");
                let remedy = "wait longer (PINPOOL_WAIT), return buffers sooner or raise";
                (*needed_bytes, found, format!("{remedy} {}", self.limit_name(Level::Pool)))
            }
            Refusal::Source(source) => (0, source.to_string(), String::new()),
        }
    }

    /// What helps where `over` has no room for `needed_bytes`.
    fn remedy(&self, needed_bytes: u64, over: QuotaExceeded) -> &'static str {
        match (over.level, over.could_ever) {
            (Level::Account, true) => "return its buffers sooner or make the partition larger",
            (Level::Account, false) => "request less or make the partition larger",
            (Level::Pool | Level::Shared, _) => self.remedy_of_pool(needed_bytes),
        }
    }

    fn remedy_of_pool(&self, needed_bytes: u64) -> &'static str {
        // The text for whole pages, which every supply can tell.
        let class = Class { bytes: usize::try_from(needed_bytes).unwrap_or(usize::MAX), index: 0 };
        let (may_grow, could_hold) = (self.may_grow(), self.could_hold(class));
        match (may_grow, could_hold) {
            (false, true) => {
                "return buffers sooner, raise PINPOOL_RESERVE (all of it is in use), or set PINPOOL_GROWTH=1"
            }
            (false, false) => "request less, raise PINPOOL_RESERVE (it is too small), or set PINPOOL_GROWTH=1",
            (true, _) if self.is_lock_limited() => {
                "request less or raise the limit (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=)"
            }
            (true, false) => "request less or raise PINPOOL_MAX_BYTES",
            (true, true) if self.pageable.is_some() => {
                "return buffers sooner or raise PINPOOL_MAX_BYTES (the limit on unpinned memory is reached too)"
            }
            (true, true) => "return buffers sooner or raise PINPOOL_MAX_BYTES",
        }
    }

    /// The limit to raise where that of `level` refuses, by the name of its setting.
    pub(in crate::engine) fn limit_name(&self, level: Level) -> &'static str {
        match level {
            Level::Account => "the limit of the partition",
            _ if !self.may_grow() => "PINPOOL_RESERVE",
            _ if self.is_lock_limited() => "RLIMIT_MEMLOCK",
            _ => "PINPOOL_MAX_BYTES",
        }
    }

    /// Whether the ceiling is what the process may lock, so that no setting raises it.
    fn is_lock_limited(&self) -> bool {
        // By a trial: a process with CAP_IPC_LOCK has a limit that does not bind it.
        let locked_bytes = || *self.lock_limit.get_or_init(lock_limit);
        let is_limit = |max_bytes| locked_bytes() == Some(max_bytes);
        self.source().name() == "mlock" && self.max_bytes().is_some_and(is_limit)
    }
}
