//! The lines about limits: of the pool, of a partition, and of the host ledger.

use std::time::Duration;

use super::{PoolLog, log};
use crate::ledger::{LedgerNews, LedgerReport};

impl PoolLog {
    /// `ceiling changed from A to B: ...` (info): nothing: by `set_max_bytes`, or because the limit of the control
    /// group has changed (`auto`).
    pub(crate) fn ceiling_changed(&self, from: Option<u64>, to: Option<u64>, why: &str) {
        let bytes = |ceiling: Option<u64>| ceiling.map_or_else(|| "none".to_owned(), |bytes| format!("{bytes} bytes"));
        log::info!(limit, "{self}ceiling changed from {} to {}: {why}", bytes(from), bytes(to));
    }

    /// `locked memory is limited ...` (warn): raise `RLIMIT_MEMLOCK` or set `PINPOOL_MAX_BYTES`.
    pub(crate) fn lock_limited(&self, limit_bytes: u64) {
        log::warn!(
            limit,
            "{self}locked memory is limited to {limit_bytes} bytes for this process (RLIMIT_MEMLOCK), and so is the \
             ceiling; raise the limit (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=) or grant CAP_IPC_LOCK for more"
        );
    }

    /// `partition P: limit N bytes ...` (info): nothing: part of the pool has a limit of its own. If the pool's limit is lower, the
    /// line says so: make the partition smaller, or raise `PINPOOL_MAX_BYTES`.
    pub(crate) fn partitioned(&self, name: &str, max_bytes: u64, pool_max_bytes: Option<u64>) {
        let lower = pool_max_bytes.filter(|&bytes| bytes < max_bytes);
        let lower =
            lower.map_or_else(String::new, |bytes| format!("; the pool's limit of {bytes} bytes is lower and applies"));
        log::info!(limit, "{self}partition {name}: limit {max_bytes} bytes of the memory of this pool{lower}");
    }

    /// The pool has a place in the host ledger.
    ///
    /// `ledger: the ceiling of ...` (info): nothing: the pool shares the ceiling of a host ledger (`PINPOOL_LEDGER`).
    pub(crate) fn joined_ledger(&self, report: &LedgerReport) {
        let LedgerReport { name, max_bytes, held_bytes, owners, .. } = report;
        let ceiling = max_bytes.map_or_else(|| "none".to_owned(), |bytes| format!("{bytes} bytes"));
        let others = owners.len().saturating_sub(1);
        log::info!(
            ledger,
            "{self}ledger: the ceiling of {name} holds for this pool and {others} others: {ceiling}, of which {held_bytes} are \
             held"
        );
    }

    /// `ledger: the ceiling of ... stays ...` (warn): give all processes of the ledger the same `PINPOOL_MAX_BYTES`:
    /// the first one sets its ceiling.
    pub(crate) fn ledger_has_other_ceiling(&self, name: &str, max_bytes: Option<u64>, asked_bytes: u64) {
        let ceiling = max_bytes.map_or_else(|| "none".to_owned(), |bytes| format!("{bytes} bytes"));
        log::warn!(
            ledger,
            "{self}ledger: the ceiling of {name} stays {ceiling}, as its first owner has set it, not {asked_bytes} bytes; give all \
             its processes the same PINPOOL_MAX_BYTES"
        );
    }

    /// `ledger: none is used ...` (warn): what the line says; until then the pool has its own ceiling alone.
    pub(crate) fn no_ledger(&self, why: &str) {
        log::warn!(ledger, "{self}ledger: none is used, and the pool has its own ceiling alone: {why}");
    }

    /// A get waited for room that other owners made.
    ///
    /// `ledger: L had room for N bytes ...` (debug): nothing: idle memory of other processes served a get.
    pub(crate) fn ledger_had_room(&self, name: &str, asked_bytes: u64, waited: Duration) {
        log::debug!(ledger, "{self}ledger: {name} had room for {asked_bytes} bytes after {waited:?}");
    }

    /// A get waited for room that other owners did not make.
    ///
    /// `ledger: L had no room for N bytes ...` (info): what other processes hold stands in the line: put buffers back
    /// there, or raise the ceiling.
    pub(crate) fn ledger_had_no_room(&self, name: &str, asked_bytes: u64, waited: Duration, others: &str) {
        log::info!(ledger, "{self}ledger: {name} had no room for {asked_bytes} bytes in {waited:?}: {others}");
    }

    /// Idle memory was released because other owners lack it.
    ///
    /// `ledger: L was given N bytes ...` (debug): nothing: another process needed what was idle here.
    pub(crate) fn ledger_was_given(&self, name: &str, bytes: u64) {
        log::debug!(ledger, "{self}ledger: {name} was given {bytes} bytes of idle memory, which other owners want");
    }

    /// What became of the pool's place in a ledger, if anything did.
    ///
    /// `ledger: the place in ... is lost ...` (error): code of the process has closed descriptors that are not its own
    /// (`closefrom`, `close_range`), or another owner has written to the slot, as the line says: what the pool holds
    /// counts in the ledger no more, and it pins no more; exclude them, and start the process again.
    ///
    /// `ledger: the file of ... was ...` (error): something has removed or cut the file: set `RemoveIPC=no` in
    /// `logind.conf`, or exclude it from cleaners of `/dev/shm`. The line says if no other file can be had, and then
    /// the pool pins no more until there is one.
    pub(crate) fn ledger_news(&self, name: &str, news: Option<LedgerNews>) {
        match news {
            None => {}
            Some(LedgerNews::Closed) => log::error!(
                ledger,
                "{self}ledger: the place in {name} is lost, as this process has closed its descriptor: what is held counts there \
                 no more, and nothing more is pinned; close only descriptors of your own, and start this process again"
            ),
            Some(LedgerNews::Taken) => log::error!(
                ledger,
                "{self}ledger: the place in {name} is lost, as another owner has written to it: what is held counts there no more, \
                 and nothing more is pinned; start this process again"
            ),
            Some(LedgerNews::Moved { what }) => log::error!(
                ledger,
                "{self}ledger: the file of {name} was {what} while it was used: this pool has moved to the one that has the name \
                 now, with all that it holds; keep others from removing it (RemoveIPC=no in logind.conf, cleaners of /dev/shm)"
            ),
            Some(LedgerNews::NotMoved { what, why }) => log::error!(
                ledger,
                "{self}ledger: the file of {name} was {what} while it was used, and there is no other: nothing more is pinned \
                 until there is one: {why}"
            ),
        }
    }
}
