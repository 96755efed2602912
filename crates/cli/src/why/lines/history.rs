//! Assigns a log's messages, in order, to pools, and finds the limit in force and the raises that were not printed.
//!
//! One message in ten is printed, counted over all pools of a process. In addition, lines get lost, processes share a file, and
//! programs restart. Therefore the numbers of each message decide first (`limits.rs`). The neighboring messages decide only if
//! the numbers fit several limits. A pool's limit never falls, and its counters never fall while its limit is unchanged,
//! so a message that contradicts this belongs to another pool, or to a restarted program.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use pinpool_observe::diagnosis::Snapshot;

use super::limits::{Chain, Fit};
use super::message::{Counters, Message, Numbers, START_LIMIT, TOLERABLE_RATE};

/// Maximum number of starting limits that are distinguished.
const CHAINS_MAX: usize = 16;
/// Maximum number of pools and starts of programs that are distinguished, because each message is compared with all of them.
const POOLS_MAX: usize = 1_000;

/// The pools of a log, and the limit at each message.
#[derive(Debug)]
pub(super) struct History {
    /// One entry for each message, in the same order.
    pub(super) entries: Vec<MessageContext>,
    /// The pools, in the order of their first messages.
    pub(super) pools: Vec<PoolHistory>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MessageContext {
    /// [`PoolHistory::number`].
    pub(super) pool: usize,
    /// The limit in force when the message was printed, which for a raise is the limit before it. `None` if unknown.
    pub(super) limit: Option<u64>,
    /// Requests since the last raise that went to the underlying allocator; `None` for a raise, or if unknown.
    pub(super) allocated: Option<u64>,
    /// Number of unprinted raises since the pool's previous message, or since its start.
    pub(super) silent_raises: u64,
}

/// One pool of one process.
#[derive(Debug, Clone, Default)]
pub(super) struct PoolHistory {
    /// The number of the pool, from 1, in the order of the first messages.
    pub(super) number: usize,
    /// The launcher's prefix for the lines of its process.
    pub(super) origin: Option<String>,
    /// The limit after the pool's last message; `None` if unknown.
    pub(super) limit: Option<u64>,
    pub(super) printed_raises: u64,
    pub(super) silent_raises: u64,
    /// The printed counters, in order.
    pub(super) checks: Vec<Counters>,
    /// One snapshot for each message: requests, misses, evictions and the limit so far.
    pub(super) points: Vec<Snapshot>,
    /// The last counters, if the limit was not raised after them.
    window: Option<Counters>,
    /// Requests and evictions before `window`, because the counters restart at each raise.
    earlier: (u64, u64),
    /// Number of the process's messages up to the pool's last check.
    checked_at: usize,
}

impl PoolHistory {
    /// Returns whether the limit was raised after the last check in the log.
    pub(super) fn is_raised(&self) -> bool {
        self.window.is_none() && self.printed_raises > 0
    }

    fn add_check(&mut self, counters: &Counters, limit: Option<u64>, silent_raises: u64) {
        let continues = |last: &Counters| {
            silent_raises == 0 && counters.requests() >= last.requests() && counters.evicted >= last.evicted
        };
        if !self.window.as_ref().is_some_and(continues) {
            self.close_window();
        }
        self.window = Some(*counters);
        self.checks.push(*counters);
        let requests = self.earlier.0.saturating_add(counters.requests());
        let evicted = self.earlier.1.saturating_add(counters.evicted);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 0; saturates.
        let misses = (counters.unsatisfied_rate * requests as f64) as u64;
        let last = self.points.last().cloned().unwrap_or_default();
        let pool_size_limit = limit.or(last.pool_size_limit);
        self.points.push(Snapshot { requests, misses, evicted, pool_size_limit, ..last });
    }

    fn add_raise(&mut self, to: u64) {
        self.close_window();
        self.limit = Some(to);
        self.printed_raises += 1;
        let last = self.points.last().cloned().unwrap_or_default();
        self.points.push(Snapshot { requests: self.earlier.0, pool_size_limit: Some(to), ..last });
    }

    fn close_window(&mut self) {
        if let Some(last) = self.window.take() {
            let (requests, evicted) = self.earlier;
            self.earlier = (requests.saturating_add(last.requests()), evicted.saturating_add(last.evicted));
        }
    }
}

impl History {
    /// # Errors
    ///
    /// If there are too many pools.
    pub(super) fn of(messages: &[Message]) -> Result<Self, String> {
        // Processes are told apart by the launcher's prefix, and the pools of a process by their numbers.
        let mut processes: BTreeMap<&Option<String>, Process<'_>> = BTreeMap::new();
        for message in messages {
            processes.entry(&message.origin).or_default().messages.push(message);
        }
        processes.values_mut().for_each(|process| process.chains = chains(&process.messages));
        let (mut entries, mut pools) = (Vec::new(), 0);
        for message in messages {
            entries.extend(processes.get_mut(&message.origin).and_then(|process| process.add_next(&mut pools)));
            if pools > POOLS_MAX {
                return Err(format!(
                    "line {}: more than {POOLS_MAX} pools or starts of programs, the most that are distinguished; split the log",
                    message.line
                ));
            }
        }
        let mut pools: Vec<_> = processes.into_values().flat_map(|process| process.pools).collect();
        pools.sort_by_key(|pool| pool.number);
        Ok(Self { entries, pools })
    }

    /// Returns the numbers of printed and of unprinted raises of all pools.
    pub(super) fn raises(&self) -> (u64, u64) {
        self.pools
            .iter()
            .fold((0, 0), |(printed, silent), pool| (printed + pool.printed_raises, silent + pool.silent_raises))
    }
}

/// Returns TensorFlow's chain of limits, and the chains of raises that do not belong to it.
fn chains(messages: &[&Message]) -> Vec<Chain> {
    let mut chains = vec![Chain::from(START_LIMIT)];
    for message in messages {
        if let Numbers::Raise { from, to } = message.numbers
            && chains.len() < CHAINS_MAX
            && !chains.iter().any(|chain| chain.has_raise(from, to))
        {
            chains.push(Chain::from(from));
        }
    }
    chains
}

/// The messages of one process, and its pools.
#[derive(Default)]
struct Process<'a> {
    messages: Vec<&'a Message>,
    /// Number of messages that were added to the pools.
    added: usize,
    chains: Vec<Chain>,
    pools: Vec<PoolHistory>,
    /// The index of the pool of the last message.
    last: Option<usize>,
}

impl Process<'_> {
    /// Adds the next message to its pool. A new pool gets number `pools + 1` of the log.
    fn add_next(&mut self, pools: &mut usize) -> Option<MessageContext> {
        let numbers = self.messages.get(self.added)?.numbers;
        self.added += 1;
        let (at, limit, allocated) = match numbers {
            Numbers::After(counters) => self.check(&counters),
            Numbers::Raise { from, .. } => (self.pool_at(from, None), Some(from), None),
        };
        let at = at.unwrap_or_else(|| {
            *pools += 1;
            let origin = self.messages[0].origin.clone();
            self.pools.push(PoolHistory { number: *pools, origin, ..PoolHistory::default() });
            self.pools.len() - 1
        });
        let silent_raises =
            limit.and_then(|limit| self.raises_between(self.pools[at].limit, limit)).unwrap_or(0) as u64;
        let pool = &mut self.pools[at];
        pool.silent_raises += silent_raises;
        pool.limit = limit.or(pool.limit);
        match numbers {
            Numbers::After(counters) => {
                pool.add_check(&counters, limit, silent_raises);
                pool.checked_at = self.added;
            }
            Numbers::Raise { to, .. } => pool.add_raise(to),
        }
        self.last = Some(at);
        Some(MessageContext { pool: pool.number, limit, allocated, silent_raises })
    }

    /// Returns the pool of a check, if it is known, its limit, and the number of requests that went to the underlying
    /// allocator.
    fn check(&self, counters: &Counters) -> (Option<usize>, Option<u64>, Option<u64>) {
        let fit = self.fit(counters);
        let by_raise = || self.raise_after().filter(|_| self.fits(counters).is_empty());
        let (limit, allocated) = (fit.map(|fit| fit.limit).or_else(by_raise), fit.map(|fit| fit.allocated));
        (limit.map_or(self.last, |limit| self.pool_at(limit, Some(counters))), limit, allocated)
    }

    /// Returns the limits in all chains that the numbers fit.
    fn fits(&self, counters: &Counters) -> Vec<Fit> {
        let mut fits: Vec<Fit> = self.chains.iter().flat_map(|chain| chain.fits(counters)).collect();
        fits.sort_unstable_by_key(|fit| fit.limit);
        fits.dedup();
        fits
    }

    /// Returns the limit that the numbers fit. If they fit several limits, the neighboring messages decide.
    fn fit(&self, counters: &Counters) -> Option<Fit> {
        let fits = self.fits(counters);
        let only = |is_likely: &dyn Fn(u64) -> bool| {
            let mut likely = fits.iter().filter(|fit| is_likely(fit.limit));
            likely.next().copied().filter(|_| likely.next().is_none())
        };
        let raised_from = self.raise_after();
        let continues = |limit| {
            let is_window =
                |pool: &PoolHistory| pool.limit == Some(limit) && increase(pool.window.as_ref(), counters).is_some();
            self.pools.iter().any(is_window)
        };
        only(&|_| true).or_else(|| only(&|limit| Some(limit) == raised_from)).or_else(|| only(&continues))
    }

    /// Returns the pool that may print its next message at `limit`. Among several pools, these criteria decide, in this order:
    ///
    /// 1. the highest limit so far;
    /// 2. for a check at the pool's present limit, the closest lower counters; otherwise a last check that may raise the limit;
    /// 3. for a raise, the latest check, because a raise is printed together with its check;
    /// 4. the latest pool.
    fn pool_at(&self, limit: u64, counters: Option<&Counters>) -> Option<usize> {
        let distance = |pool: &PoolHistory| {
            let is_due = pool.window.as_ref().is_some_and(may_raise);
            match (pool.limit, counters) {
                (None, _) => Some(0),
                (Some(last), Some(counters)) if last == limit => increase(pool.window.as_ref(), counters),
                (Some(last), None) if last == limit => Some(u128::from(!is_due)),
                (last, _) => self.raises_between(last, limit).filter(|&raises| raises > 0).map(|_| u128::from(!is_due)),
            }
        };
        let checked_at = |pool: &PoolHistory| if counters.is_none() { pool.checked_at } else { 0 };
        let pools = self.pools.iter().enumerate();
        let pools = pools.filter_map(|(at, pool)| Some((pool.limit, Reverse(distance(pool)?), checked_at(pool), at)));
        pools.max().map(|(.., at)| at)
    }

    /// Returns the number of raises from a limit, or from the start of a pool, up to `to`.
    fn raises_between(&self, from: Option<u64>, to: u64) -> Option<usize> {
        let start = |chain: &Chain| from.map_or(Some(0), |from| chain.place(from));
        self.chains.iter().find_map(|chain| chain.place(to)?.checked_sub(start(chain)?))
    }

    /// Returns the limit before the raise, if the next message is a raise.
    fn raise_after(&self) -> Option<u64> {
        match self.messages.get(self.added)?.numbers {
            Numbers::Raise { from, .. } => Some(from),
            Numbers::After(_) => None,
        }
    }
}

/// Returns the growth of the counters from `last`, or from 0 after a raise, to `next`. Returns `None` if a counter is smaller.
/// Also returns `None` if the returns grew and the evictions did not, because only every 1000th eviction causes a check. An
/// identical line is a copy, with a growth of 0.
fn increase(last: Option<&Counters>, next: &Counters) -> Option<u128> {
    let Some(last) = last else { return Some(u128::from(next.put) + u128::from(next.evicted)) };
    // A log may have lost the number of requests.
    let _ = last.get.zip(next.get).map_or(Some(0), |(last, next)| next.checked_sub(last))?;
    let (put, evicted) = (next.put.checked_sub(last.put)?, next.evicted.checked_sub(last.evicted)?);
    (evicted > 0 || put == 0).then_some(u128::from(put) + u128::from(evicted))
}

/// Returns whether a check with these rates, printed with six digits, may raise the limit.
pub(super) fn may_raise(counters: &Counters) -> bool {
    counters.eviction_rate >= TOLERABLE_RATE && counters.unsatisfied_rate >= TOLERABLE_RATE
}
