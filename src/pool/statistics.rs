//! What a pool tells of itself.

use super::Pool;
use crate::backend::PageTiers;
use crate::config::Config;
use crate::dump::Dump;
use crate::stats::{ClassStats, Stats};
use crate::why::Why;

impl Pool {
    /// What the pool holds and for whom, what the system has left, and, if little is left, what would help: text of
    /// some 20 lines, for people. Waits for no driver, and for no lock that anybody holds while calling one. Reads files of
    /// the kernel, at most once a second. In a child of `fork` all its figures are 0.
    pub fn dump(&self) -> Dump {
        self.core().dump()
    }

    /// Why the pool is as fast as it is: the cause with evidence, a cure, and the seconds that it costs, of the last 10 s with
    /// 20 gets or more. The maintenance thread looks, and [`poll`](Pool::maintain); each line of the log about a verdict is one of these.
    pub fn why(&self) -> Why {
        Why(self.core().why())
    }

    /// A snapshot of the statistics. Exact while no other thread uses the pool; otherwise its numbers may be some
    /// operations apart. Its [`Display`](std::fmt::Display) is a table.
    ///
    /// Takes some microseconds, and waits for no call of a driver, a listener or a fence, nor for a lock that a thread holds
    /// around one. A finished copy no longer counts as in flight if a load shows that it has finished (a timeline, under
    /// `adaptive`). A copy that must be queried (an event) counts until [`poll`](Pool::maintain), a miss,
    /// [`Completion::wait`](crate::Completion::wait) or, within 0.1 s, the maintenance thread finds it. `in_flight_time` is measured to
    /// the time at which the end of a copy was found.
    pub fn stats(&self) -> Stats {
        self.core().complete_by_loads();
        self.account().map_or_else(|| self.core().stats(), |account| account.stats())
    }

    /// What the pool has counted of each size class that it had buffers of, the smallest first. Waits as little as
    /// [`stats`](Pool::stats), for as long as it takes to look at each buffer in flight and each idle one.
    pub fn class_stats(&self) -> Vec<ClassStats> {
        self.core().class_stats()
    }

    /// The [`stats`](Pool::stats) of each [partition](Pool::partition) of this pool that has not been dropped, in the order
    /// in which they were made. Of a partition, none.
    pub fn partition_stats(&self) -> Vec<Stats> {
        let accounts = if self.account().is_some() { Vec::new() } else { self.core().existing_accounts() };
        accounts.iter().map(|account| account.stats()).collect()
    }

    /// The kinds of pages that the held memory is in. Reads a file of the kernel, so keep it off hot paths. `None` under
    /// the preset `tensorflow`, which keeps no list of its memory.
    #[doc(hidden)]
    pub fn page_tiers(&self) -> Option<PageTiers> {
        self.core().backing().page_tiers()
    }

    /// The name in the pool's log lines ([`PoolBuilder::name`](crate::PoolBuilder::name)).
    pub fn name(&self) -> Option<&str> {
        self.account().map_or_else(|| self.core().name(), |account| Some(account.name()))
    }

    /// The back-end that the pool's memory comes from, by its name: `vmm`, where the setting may be `auto`.
    pub fn backend(&self) -> &'static str {
        self.core().backing().source().name()
    }

    /// Whether this back-end page-locks. A full pool may give other memory all the same: [`PinnedBuf::is_pinned`](crate::PinnedBuf::is_pinned)
    /// tells of each buffer, and [`OnFull::Error`](crate::OnFull::Error) rules it out.
    pub fn is_pinned(&self) -> bool {
        self.core().backing().source().is_pinned()
    }

    /// The settings in effect, with variables and defaults resolved.
    #[doc(hidden)]
    pub fn config(&self) -> &Config {
        self.core().config()
    }
}
