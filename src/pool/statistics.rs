//! Statistics, reports and the diagnosis of a pool.

use super::Pool;
use crate::config::Config;
use crate::report::{Diagnosis, Dump};
use crate::stats::{ClassStats, Stats};

impl Pool {
    /// Returns a report of about 20 lines: what the pool holds and for whom, what the system has left, and, if little is left,
    /// what to change.
    ///
    /// Does not wait for driver calls, except to [choose the backend](crate::PoolBuilder::build). Reads kernel files, at most
    /// once a second. In a forked child all numbers are 0.
    pub fn dump(&self) -> Dump {
        self.core().dump()
    }

    /// Returns the main cause of lost time in the windows of the last five minutes (or in the last window, if it is older), and a
    /// recommendation. A window lasts at least 10 s, and usually covers at least 20 requests. Until the first window has ended,
    /// the result is the cause in the time so far.
    ///
    /// The maintenance thread or [`maintain`](Pool::maintain) evaluates windows and logs changes of the diagnosis.
    pub fn diagnose(&self) -> Diagnosis {
        self.core().diagnose().into()
    }

    /// Returns a snapshot of the statistics. Its [`Display`](std::fmt::Display) is a table.
    ///
    /// Takes a few microseconds and makes no driver calls, except to [choose the backend](crate::PoolBuilder::build), and to
    /// return buffers with completed copies: that zeroes them under `PINPOOL_ZERO`, and may release memory under
    /// `PINPOOL_MAX_IDLE_BYTES` or a shared limit. The numbers are exact while no other thread, the maintenance thread included,
    /// uses the pool. Otherwise they may be a few operations apart.
    ///
    /// A completed copy counts as in flight until the pool detects its end. With timelines (`adaptive`) the pool detects it
    /// immediately, otherwise at the next miss, [`maintain`](Pool::maintain) or [`Completion::wait`](crate::Completion::wait),
    /// or within 0.1 s.
    pub fn stats(&self) -> Stats {
        self.if_started(|core| core.sweep_by_loads());
        self.core().stats()
    }

    /// Returns the statistics of each size class that has had buffers, the smallest first. Empty in a forked child.
    pub fn class_stats(&self) -> Vec<ClassStats> {
        self.core().class_stats()
    }

    /// Returns the [`stats`](Pool::stats) of each live [partition](Pool::open_partition), in order of creation.
    pub fn partition_stats(&self) -> Vec<Stats> {
        self.core().live_partitions().iter().map(|partition| partition.stats()).collect()
    }

    /// Returns the name in the pool's log lines ([`PoolBuilder::name`](crate::PoolBuilder::name)).
    pub fn name(&self) -> Option<&str> {
        self.handle.start.log.name.as_deref()
    }

    /// Returns the settings in effect, with variables and defaults resolved.
    #[doc(hidden)]
    pub fn unstable_config(&self) -> &Config {
        self.handle.existing_core().map_or(&self.handle.start.settings.config, |core| core.config())
    }
}
