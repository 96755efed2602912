//! The lines about limits: of the pool, of a partition, and the shared limit of a host.

use pinpool_os::words::Size;

use super::texts::Limit;
use super::{PoolLog, log};
use crate::shared_limit::{Loss, SharedLimitReport};

impl PoolLog {
    /// `set_max_bytes` was called, or the limit of the cgroup changed (`auto`). To do: nothing.
    pub(crate) fn limit_changed(&self, from: Option<u64>, to: Option<u64>, why: &str) {
        log::info!(limit, "{self}limit_changed: max={}->{}: {why}", Limit(from), Limit(to));
    }

    /// The process may lock less memory than the pool's limit. To do: what the line says, or a lower limit.
    pub(crate) fn lock_limited(&self, limit_bytes: u64) {
        let max = Size(limit_bytes);
        log::warn!(
            limit,
            "{self}lock_limit: RLIMIT_MEMLOCK lowers the pool limit max={max}; raise it (`ulimit -l`, LimitMEMLOCK=, --ulimit \
             memlock=) or grant CAP_IPC_LOCK"
        );
    }

    /// A partition was created. To do: raise the pool's limit if it is lower.
    pub(crate) fn partitioned(&self, name: &str, max_bytes: u64, pool_max_bytes: Option<u64>) {
        let lower = pool_max_bytes.filter(|&bytes| bytes < max_bytes);
        let lower =
            lower.map_or_else(String::new, |bytes| format!("; the pool's lower limit of {} applies", Size(bytes)));
        log::info!(limit, "{self}partition: name={name} max={}{lower}", Size(max_bytes));
    }

    /// The pool joined a shared limit (`PINPOOL_LEDGER`). To do: nothing.
    pub(crate) fn joined_shared_limit(&self, report: &SharedLimitReport) {
        let SharedLimitReport { name, max_bytes, held_bytes, owners, .. } = report;
        let (max, held, others) = (Limit(*max_bytes), Size(*held_bytes), owners.len().saturating_sub(1));
        log::info!(shared_limit, "{self}shared_limit: joined name={name} max={max} held={held} other_pools={others}");
    }

    /// The first process set another shared limit. To do: what the line says.
    pub(crate) fn shared_limit_differs(&self, name: &str, max_bytes: Option<u64>, asked_bytes: u64) {
        let (max, ignored) = (Limit(max_bytes), Size(asked_bytes));
        log::warn!(
            shared_limit,
            "{self}shared_limit: the first process set it name={name} max={max} ignored={ignored}; give all processes the same \
             PINPOOL_MAX_BYTES"
        );
    }

    /// The shared limit is not used, for this reason. To do: remove the reason.
    pub(crate) fn shared_limit_unused(&self, why: &str) {
        log::warn!(shared_limit, "{self}shared_limit: not used, the pool has only its own limit: {why}");
    }

    /// Idle memory was released for another process. To do: nothing.
    pub(crate) fn released_for_others(&self, name: &str, bytes: u64) {
        log::debug!(
            shared_limit,
            "{self}shared_limit: released idle memory for another process name={name} bytes={bytes}B"
        );
    }

    /// Why the pool can no longer grow under its shared limit, once.
    pub(crate) fn shared_limit_lost(&self, name: &str, news: Option<Loss>) {
        match news {
            None => {}
            Some(Loss::Removed) => self.shared_limit_removed(name),
            Some(Loss::Closed) => self.shared_limit_closed(name),
        }
    }

    /// The file of the shared limit was removed; buffers stay valid, but new processes use another limit. To do: restart all its
    /// processes; exclude the file from cleaners of `/dev/shm`.
    fn shared_limit_removed(&self, name: &str) {
        log::error!(
            shared_limit,
            "{self}shared_limit: its file was removed, this pool can no longer grow name={name}; restart all its processes and \
             keep the file (RemoveIPC=no in logind.conf, cleaners of /dev/shm)"
        );
    }

    /// Other code closed the descriptor of the shared limit; buffers stay valid but no longer count. To do: exclude the descriptor
    /// from `closefrom` and `close_range`, and restart the process.
    fn shared_limit_closed(&self, name: &str) {
        log::error!(
            shared_limit,
            "{self}shared_limit: this process closed its descriptor, this pool can no longer grow name={name}; close only your \
             own descriptors and restart this process"
        );
    }
}
