//! Why a pool has no memory for a get, and what helps, in words.

use std::path::Path;

use super::super::supply::Refusal;
use super::{Backing, Supply};
use crate::dump::OUTER_PARTITION;
use crate::error::{Error, ErrorKind, Report, UsageReport};
use crate::quota::{Level, Over};
use crate::size_class::Class;
use pinpool_os::host::limits;

impl Backing {
    /// Why a block of `class` can never be held.
    pub(in crate::engine) fn refusal_for_good(&self, class: Class) -> Refusal {
        let needed_bytes = class.bytes as u64;
        let over = self.own.never(needed_bytes).or_else(|| self.supply_quota().never(needed_bytes));
        Refusal::Over { needed_bytes, over: over.unwrap_or_else(|| self.supply_quota().full(needed_bytes)) }
    }

    /// The error of a get of `len` bytes that was refused while the pool held `usage`.
    pub(in crate::engine) fn error(&self, len: usize, refusal: Refusal, usage: UsageReport, report: Report) -> Error {
        let asked_bytes = len as u64;
        let kind = match refusal {
            Refusal::Over { needed_bytes, over: Over { level: Level::Shared, .. } } => {
                let (found, remedy) = self.ledger_in_words(needed_bytes);
                ErrorKind::Ledger { asked_bytes, needed_bytes, found, remedy, usage, report }
            }
            Refusal::Over { needed_bytes, over } => {
                ErrorKind::Limit { asked_bytes, needed_bytes, usage, remedy: self.remedy(needed_bytes, over), report }
            }
            Refusal::Line { needed_bytes, waiting, first_bytes } => {
                let limit = self.limit_for(needed_bytes);
                ErrorKind::Line { asked_bytes, needed_bytes, waiting, first_bytes, limit, usage, report }
            }
            Refusal::Source(source) => {
                ErrorKind::Backend { backend: self.source().name(), asked_bytes, usage, source, report }
            }
        };
        kind.into()
    }

    /// Why there is no memory, for the log line of a shortage.
    pub(in crate::engine) fn why(&self, refusal: &Refusal) -> String {
        match refusal {
            Refusal::Over { needed_bytes, over: Over { level: Level::Shared, .. } } => {
                let (found, remedy) = self.ledger_in_words(*needed_bytes);
                format!("{found}: {remedy}")
            }
            Refusal::Over { needed_bytes, over } => {
                format!("the ceiling is reached: {}", self.remedy(*needed_bytes, *over))
            }
            Refusal::Line { waiting, first_bytes, .. } => {
                let gets = if *waiting == 1 { "get waits" } else { "gets wait" };
                format!("{waiting} {gets} in line, the first for {first_bytes} B")
            }
            Refusal::Source(source) => source.to_string(),
        }
    }

    /// What the shared ceiling says to a request for `needed_bytes` that it has no room for, and what helps.
    pub(in crate::engine) fn ledger_in_words(&self, needed_bytes: u64) -> (String, &'static str) {
        match self.ledger() {
            Some(ledger) => ledger.in_words(needed_bytes),
            None => ("the shared ceiling is reached".to_owned(), "put buffers back first"),
        }
    }

    /// What helps where `over` has no room for `needed_bytes`.
    fn remedy(&self, needed_bytes: u64, Over { level, max_bytes, could_ever, .. }: Over) -> String {
        match (level, could_ever) {
            (Level::Partition { depth: 0 }, false) => {
                "it can never fit in this partition: ask for less, or make the partition larger".to_owned()
            }
            (Level::Partition { depth: 0 }, true) => {
                "this partition is full: put its buffers back first, or make the partition larger".to_owned()
            }
            (Level::Partition { .. }, false) => format!(
                "it can never fit in the partition of {max_bytes} B around this one: ask for less, or make that one larger"
            ),
            (Level::Partition { .. }, true) => format!(
                "the partition of {max_bytes} B around this one is full: put its buffers back first, or make that one larger"
            ),
            (Level::Pool | Level::Shared, _) => self.remedy_of_pool(needed_bytes).to_owned(),
        }
    }

    fn remedy_of_pool(&self, needed_bytes: u64) -> &'static str {
        let (may_grow, could_hold) = match &self.supply {
            Supply::Direct(_) => (true, self.own.max_bytes().is_none_or(|max_bytes| needed_bytes <= max_bytes)),
            Supply::Shared(domain) => (domain.arena().may_grow(), domain.arena().could_hold(needed_bytes)),
        };
        match (may_grow, could_hold) {
            (false, true) => {
                "PINPOOL_GROWTH=0 and the reserve is in use: put buffers back first, raise PINPOOL_RESERVE, or set \
                 PINPOOL_GROWTH=1"
            }
            (false, false) => {
                "PINPOOL_GROWTH=0 and no reserve is that large: ask for less, raise PINPOOL_RESERVE, or set PINPOOL_GROWTH=1"
            }
            (true, _) if self.is_lock_limited() => {
                "the ceiling is RLIMIT_MEMLOCK: ask for less, or raise the limit (`ulimit -l`, LimitMEMLOCK=, --ulimit \
                 memlock=)"
            }
            (true, false) => "it can never fit under the ceiling: ask for less or raise PINPOOL_MAX_BYTES",
            (true, true) if self.fallback.is_some() => {
                "put buffers back first, or raise PINPOOL_MAX_BYTES or PINPOOL_MAX_FALLBACK_BYTES, whose memory is in use too"
            }
            (true, true) => "put buffers back first or raise PINPOOL_MAX_BYTES",
        }
    }

    /// The limit to raise for `needed_bytes` more, by the name of its setting; for none, that of the pool's own ceiling.
    pub(in crate::engine) fn limit_for(&self, needed_bytes: u64) -> &'static str {
        let full = self.own.refusing(needed_bytes).map(|over| over.level);
        let own = (self.is_partition && needed_bytes == 0).then_some(Level::Partition { depth: 0 });
        self.limit_name(own.or(full).unwrap_or(Level::Pool))
    }

    /// The limit to raise where that of `level` refuses, by the name of its setting.
    pub(in crate::engine) fn limit_name(&self, level: Level) -> &'static str {
        match (level, &self.supply) {
            (Level::Partition { depth: 0 }, _) => "the ceiling of the partition",
            (Level::Partition { .. }, _) => OUTER_PARTITION,
            (_, Supply::Shared(domain)) if !domain.arena().may_grow() => "PINPOOL_RESERVE",
            _ if self.is_lock_limited() => "RLIMIT_MEMLOCK",
            _ => "PINPOOL_MAX_BYTES",
        }
    }

    /// Whether the ceiling is what the process may lock, so that no setting raises it.
    fn is_lock_limited(&self) -> bool {
        let locked_bytes = || *self.lock_limit.get_or_init(|| limits::process_limits(Path::new("/")).locked_bytes);
        let is_limit = |max_bytes| locked_bytes() == Some(max_bytes);
        self.source().name() == "mlock" && self.supply_quota().max_bytes().is_some_and(is_limit)
    }
}
