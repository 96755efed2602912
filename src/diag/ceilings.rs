//! The lines about limits: of the pool, of a partition, and of the host ledger.

use std::time::Duration;

use super::{PoolLog, log};
use crate::ledger::{LedgerReport, Loss};

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

    /// Why the pool claims nothing more in a ledger, once.
    ///
    /// `ledger: the file of ... was removed ...` (error): buffers stay valid, but the pool can no longer grow, and new
    /// processes use a limit of their own: restart all processes of the ledger, set `RemoveIPC=no` in `logind.conf`, and
    /// exclude the file from cleaners of `/dev/shm`.
    ///
    /// `ledger: this process has closed the descriptor of ...` (error): other code has closed a descriptor that is not its
    /// own (`closefrom`, `close_range`). Buffers stay valid but no longer count in the ledger, and the pool can no longer
    /// grow: exclude the descriptor, and restart the process.
    pub(crate) fn ledger_news(&self, name: &str, news: Option<Loss>) {
        match news {
            None => {}
            Some(Loss::Removed) => log::error!(
                ledger,
                "{self}ledger: the file of {name} was removed while in use: buffers stay valid, but this pool can no longer grow;                  restart all processes of the ledger, and keep the file from being removed (RemoveIPC=no in logind.conf, cleaners                  of /dev/shm)"
            ),
            Some(Loss::Closed) => log::error!(
                ledger,
                "{self}ledger: this process has closed the descriptor of {name}: buffers stay valid but no longer count there, and                  this pool can no longer grow; close only your own descriptors, and restart this process"
            ),
        }
    }
}
