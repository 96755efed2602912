//! Why a pool has no memory for a get, and what helps, in words.

use std::path::Path;

use super::super::Refusal;
use super::{Backing, Supply};
use crate::dump::OUTER_PARTITION;
use crate::error::{Error, ErrorKind, Report, UsageReport};
use crate::size_class::Class;
use pinpool_os::host::limits;

impl Backing {
    /// Why there is no room for `needed_bytes` beside the buffers.
    pub(in crate::engine) fn refusal_outside(&self, needed_bytes: u64) -> Refusal {
        match &self.supply {
            Supply::Direct(direct) => direct.refusal(needed_bytes),
            Supply::Shared(arena) => arena.refusal_outside(needed_bytes),
        }
    }

    /// Why a block of `class` can never be held.
    pub(in crate::engine) fn refusal_for_good(&self, class: Class) -> Refusal {
        let needed_bytes = class.bytes as u64;
        match self.ledger() {
            Some(ledger) if self.could_own(needed_bytes) && ledger.max_bytes() < needed_bytes => {
                Refusal::Ledger { needed_bytes, missing_bytes: needed_bytes }
            }
            _ => Refusal::Ceiling { needed_bytes },
        }
    }

    /// The error of a get of `len` bytes that was refused while the pool held `usage`.
    pub(in crate::engine) fn error(&self, len: usize, refusal: Refusal, usage: UsageReport, report: Report) -> Error {
        let asked_bytes = len as u64;
        let kind = match refusal {
            Refusal::Ceiling { needed_bytes } => {
                ErrorKind::Limit { asked_bytes, needed_bytes, usage, remedy: self.remedy(needed_bytes), report }
            }
            Refusal::Ledger { needed_bytes, .. } => {
                let (found, remedy) = self.ledger_in_words(needed_bytes);
                ErrorKind::Ledger { asked_bytes, needed_bytes, found, remedy, usage, report }
            }
            Refusal::Line { needed_bytes, waiting, first_bytes } => {
                let limit = self.limit_name(needed_bytes);
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
            Refusal::Ceiling { needed_bytes } => format!("the ceiling is reached: {}", self.remedy(*needed_bytes)),
            Refusal::Ledger { needed_bytes, .. } => {
                let (found, remedy) = self.ledger_in_words(*needed_bytes);
                format!("{found}: {remedy}")
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

    /// What prevents `needed_bytes`, and what helps.
    fn remedy(&self, needed_bytes: u64) -> String {
        let partition = self.own.refusing(needed_bytes).filter(|_| self.is_partition());
        match partition {
            Some((0, _, false)) => {
                "it can never fit in this partition: ask for less, or make the partition larger".to_owned()
            }
            Some((0, _, true)) => {
                "this partition is full: put its buffers back first, or make the partition larger".to_owned()
            }
            Some((_, max_bytes, false)) => format!(
                "it can never fit in the partition of {max_bytes} B around this one: ask for less, or make that one larger"
            ),
            Some((_, max_bytes, true)) => format!(
                "the partition of {max_bytes} B around this one is full: put its buffers back first, or make that one larger"
            ),
            None => self.remedy_of_pool(needed_bytes).to_owned(),
        }
    }

    fn remedy_of_pool(&self, needed_bytes: u64) -> &'static str {
        let (may_grow, could_hold) = match &self.supply {
            Supply::Direct(_) => (true, self.stats().max_bytes.is_none_or(|max_bytes| needed_bytes <= max_bytes)),
            Supply::Shared(arena) => (arena.may_grow(), arena.could_hold(needed_bytes)),
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

    /// The limit to raise for `needed_bytes` more, by the name of its setting.
    pub(in crate::engine) fn limit_name(&self, needed_bytes: u64) -> &'static str {
        let depth = self.own.refusing(needed_bytes).map(|(depth, ..)| depth);
        match &self.supply {
            _ if self.is_partition && (needed_bytes == 0 || depth == Some(0)) => "the ceiling of the partition",
            _ if self.is_partition && depth.is_some() => OUTER_PARTITION,
            Supply::Shared(arena) if !arena.may_grow() => "PINPOOL_RESERVE",
            _ if self.is_lock_limited() => "RLIMIT_MEMLOCK",
            _ => "PINPOOL_MAX_BYTES",
        }
    }

    /// Whether the ceiling is what the process may lock, so that no setting raises it.
    fn is_lock_limited(&self) -> bool {
        let locked_bytes = || *self.lock_limit.get_or_init(|| limits::process_limits(Path::new("/")).locked_bytes);
        let is_limit = |max_bytes| locked_bytes() == Some(max_bytes);
        self.source().name() == "mlock" && self.stats().max_bytes.is_some_and(is_limit)
    }
}
