//! A log's messages in order: the pool of each, the limit in force, and the raises that were not printed.
//!
//! One message in ten is printed, counted over all pools of a process; lines get lost, processes share a file, and programs restart.
//! Therefore the numbers of each message decide first (`limits.rs`), and its neighbors only if the numbers fit several limits. A
//! pool's limit never falls, and its counters never fall while its limit is unchanged: a message that contradicts this belongs to
//! another pool, or to a restarted program.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::limits::{Chain, Fit, allocated_by_rate};
use super::message::{Counters, Message, Numbers, START_LIMIT, TOLERABLE_RATE};

/// Most starting limits that are distinguished.
const CHAINS_MAX: usize = 16;
/// Most pools, and starts of programs, that are distinguished: each message is compared with all of them.
const POOLS_MAX: usize = 1_000;

/// The pools of a log, and the limit at each message.
#[derive(Debug)]
pub(super) struct History {
    /// One for each message, in the same order.
    pub(super) entries: Vec<Entry>,
    /// In the order of their first messages.
    pub(super) pools: Vec<PoolHistory>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    /// An index in [`History::pools`].
    pub(super) pool: usize,
    /// In force when the message was printed; for a raise, before it. `None` if unknown.
    pub(super) limit: Option<u64>,
    /// Requests since the last raise that went to the underlying allocator; `None` for a raise, or if unknown.
    pub(super) allocated: Option<u64>,
    /// Unprinted raises since the pool's previous message, or its start.
    pub(super) silent_raises: u64,
}

/// One pool of one process.
#[derive(Debug, Clone, Default)]
pub(super) struct PoolHistory {
    /// The launcher's prefix for the lines of its process.
    pub(super) origin: Option<String>,
    /// After its last message; `None` if unknown.
    pub(super) limit: Option<u64>,
    pub(super) printed_raises: u64,
    pub(super) silent_raises: u64,
    /// The printed counters with their limits, in order.
    pub(super) checks: Vec<(Option<u64>, Counters)>,
    /// The last counters, if the limit was not raised after them.
    window: Option<Counters>,
    /// The index of the check with these counters in [`History::entries`].
    checked_at: usize,
}

impl PoolHistory {
    /// Returns true if the limit was raised after the last check in the log.
    pub(super) fn is_raised(&self) -> bool {
        self.window.is_none() && self.printed_raises > 0
    }
}

impl History {
    /// # Errors
    ///
    /// For too many pools.
    pub(super) fn of(messages: &[Message]) -> Result<Self, String> {
        // Processes differ in the launcher's prefix, the pools of a process in their numbers.
        let mut origins: BTreeMap<&Option<String>, Vec<usize>> = BTreeMap::new();
        for (at, message) in messages.iter().enumerate() {
            origins.entry(&message.origin).or_default().push(at);
            if origins.len() > POOLS_MAX {
                return Err(too_many(message));
            }
        }
        let (mut entries, mut pools) = (vec![None; messages.len()], Vec::new());
        for (origin, of) in origins {
            let own: Vec<_> = of.iter().map(|&at| messages[at].clone()).collect();
            let built = Builder::of(&own)?;
            for (at, entry) in of.into_iter().zip(built.entries) {
                entries[at] = Some(Entry { pool: entry.pool + pools.len(), ..entry });
            }
            pools.extend(built.pools.into_iter().map(|pool| PoolHistory { origin: origin.clone(), ..pool }));
            if pools.len() > POOLS_MAX {
                return Err(own.last().map_or_else(String::new, too_many));
            }
        }
        Ok(Self::in_order(entries.into_iter().flatten().collect(), pools))
    }

    /// The pools in the order of their first messages.
    fn in_order(mut entries: Vec<Entry>, mut pools: Vec<PoolHistory>) -> Self {
        let mut places = vec![None; pools.len()];
        let (mut ordered, mut next) = (Vec::new(), 0);
        for entry in &mut entries {
            let old = entry.pool;
            entry.pool = *places[old].get_or_insert_with(|| {
                ordered.push(std::mem::take(&mut pools[old]));
                next += 1;
                next - 1
            });
        }
        Self { entries, pools: ordered }
    }

    /// Raises of all pools: printed, and not printed.
    pub(super) fn raises(&self) -> (u64, u64) {
        self.pools
            .iter()
            .fold((0, 0), |(printed, silent), pool| (printed + pool.printed_raises, silent + pool.silent_raises))
    }
}

fn too_many(message: &Message) -> String {
    format!(
        "line {}: more than {POOLS_MAX} pools or starts of programs, the most that are distinguished; split the log",
        message.line
    )
}

/// TensorFlow's chain, and the chains of other raises.
fn chains(messages: &[Message]) -> Vec<Chain> {
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

struct Builder {
    chains: Vec<Chain>,
    entries: Vec<Entry>,
    pools: Vec<PoolHistory>,
}

impl Builder {
    /// The messages of one process.
    fn of(messages: &[Message]) -> Result<Self, String> {
        let mut built = Self { chains: chains(messages), entries: Vec::new(), pools: Vec::new() };
        for (at, message) in messages.iter().enumerate() {
            match message.numbers {
                Numbers::After(counters) => built.add_check(&counters, &messages[at + 1..]),
                Numbers::Raise { from, to } => built.add_raise(from, to),
            }
            if built.pools.len() > POOLS_MAX {
                return Err(too_many(message));
            }
        }
        Ok(built)
    }

    fn add_check(&mut self, counters: &Counters, later: &[Message]) {
        let fit = self.fit(counters, later);
        let limit = fit.map(|fit| fit.limit).or_else(|| raise_after(later).filter(|_| self.fits(counters).is_empty()));
        let allocated = fit.map(|fit| fit.allocated).or_else(|| allocated_by_rate(counters));
        let at = limit.and_then(|limit| self.pool_at(limit, Some(counters)));
        let at = at.or_else(|| limit.is_none().then(|| self.entries.last().map(|entry| entry.pool)).flatten());
        let (pool, silent_raises) = self.advance(at, limit);
        self.pools[pool].window = Some(*counters);
        self.pools[pool].checked_at = self.entries.len();
        self.pools[pool].checks.push((limit, *counters));
        self.entries.push(Entry { pool, limit, allocated, silent_raises });
    }

    fn add_raise(&mut self, from: u64, to: u64) {
        let at = self.just_checked(from).or_else(|| self.pool_at(from, None));
        let (pool, silent_raises) = self.advance(at, Some(from));
        let history = &mut self.pools[pool];
        history.limit = Some(to);
        history.window = None;
        history.printed_raises += 1;
        self.entries.push(Entry { pool, limit: Some(from), allocated: None, silent_raises });
    }

    /// The limits in all chains that the numbers fit.
    fn fits(&self, counters: &Counters) -> Vec<Fit> {
        let mut fits: Vec<Fit> = self.chains.iter().flat_map(|chain| chain.fits(counters)).collect();
        fits.sort_unstable_by_key(|fit| fit.limit);
        fits.dedup();
        fits
    }

    /// The one limit that the numbers fit; if they fit several, the neighboring messages decide.
    fn fit(&self, counters: &Counters, later: &[Message]) -> Option<Fit> {
        let fits = self.fits(counters);
        let only = |is_likely: &dyn Fn(u64) -> bool| {
            let mut likely = fits.iter().filter(|fit| is_likely(fit.limit));
            likely.next().copied().filter(|_| likely.next().is_none())
        };
        let raised_from = raise_after(later);
        let continues = |limit| {
            let is_window = |pool: &PoolHistory| {
                pool.limit == Some(limit) && pool.window.is_none_or(|last| is_later(&last, counters))
            };
            self.pools.iter().any(is_window)
        };
        let next = later.iter().find_map(|message| match &message.numbers {
            Numbers::After(next) => Some(next),
            Numbers::Raise { .. } => None,
        });
        let next = next.filter(|next| is_later(counters, next));
        let next_limit = next.and_then(|next| match self.fits(next).as_slice() {
            [fit] => Some(fit.limit),
            _ => None,
        });
        only(&|_| true)
            .or_else(|| only(&|limit| Some(limit) == raised_from))
            .or_else(|| only(&continues))
            .or_else(|| only(&|limit| Some(limit) == next_limit))
    }

    /// The pool that may print its next message at `limit`. If there are several: one with this limit and the closest lower
    /// counters; else one with the highest limit, preferably after a check that had to raise it; then the latest.
    fn pool_at(&self, limit: u64, counters: Option<&Counters>) -> Option<usize> {
        let distance = |pool: &PoolHistory| match pool.limit {
            None => Some(0),
            Some(last) if last == limit => {
                let Some(counters) = counters else { return Some(0) };
                increase(pool.window.as_ref(), counters)
            }
            Some(last) => {
                let is_due = pool.window.as_ref().is_some_and(may_raise);
                (last < limit && self.raises_between(last, limit).is_some()).then_some(u128::from(!is_due))
            }
        };
        let pools =
            self.pools.iter().enumerate().filter_map(|(at, pool)| Some((pool.limit, Reverse(distance(pool)?), at)));
        pools.max().map(|(.., at)| at)
    }

    /// The pool at `limit` with the latest check: a check and its raise are printed together.
    fn just_checked(&self, limit: u64) -> Option<usize> {
        let pools = self.pools.iter().enumerate().filter_map(|(at, pool)| {
            let window = pool.window.as_ref().filter(|_| pool.limit == Some(limit))?;
            // Other pools may print in between.
            Some((may_raise(window), pool.checked_at, at))
        });
        pools.max().map(|(.., at)| at)
    }

    /// Moves the pool, or a new one, to `limit`; returns the number of raises in between.
    fn advance(&mut self, at: Option<usize>, limit: Option<u64>) -> (usize, u64) {
        let at = at.unwrap_or_else(|| {
            self.pools.push(PoolHistory::default());
            self.pools.len() - 1
        });
        let before = self.pools[at].limit;
        let raises = limit.and_then(|limit| match before {
            Some(before) => self.raises_between(before, limit),
            None => self.chains.iter().find_map(|chain| chain.place(limit)),
        });
        let raises = raises.unwrap_or(0) as u64;
        let pool = &mut self.pools[at];
        pool.silent_raises += raises;
        pool.limit = limit.or(before);
        (at, raises)
    }

    fn raises_between(&self, from: u64, to: u64) -> Option<usize> {
        self.chains.iter().find_map(|chain| chain.place(to)?.checked_sub(chain.place(from)?))
    }
}

/// The limit before a raise in the next message.
fn raise_after(later: &[Message]) -> Option<u64> {
    match later.first()?.numbers {
        Numbers::Raise { from, .. } => Some(from),
        Numbers::After(_) => None,
    }
}

/// Returns true if `next` may follow `last` at the same limit.
fn is_later(last: &Counters, next: &Counters) -> bool {
    increase(Some(last), next).is_some()
}

/// The growth of the counters from `last`, or from 0 after a raise, to `next`; `None` if one of them is smaller, or if only the
/// evictions are unchanged: every 1000th eviction causes a check. An identical line is a copy.
fn increase(last: Option<&Counters>, next: &Counters) -> Option<u128> {
    let Some(last) = last else { return Some(u128::from(next.put) + u128::from(next.evicted)) };
    // A log may have lost the requests.
    let _ = last.get.zip(next.get).map_or(Some(0), |(last, next)| next.checked_sub(last))?;
    let (put, evicted) = (next.put.checked_sub(last.put)?, next.evicted.checked_sub(last.evicted)?);
    (evicted > 0 || put == 0).then_some(u128::from(put) + u128::from(evicted))
}

/// Returns true if a check with these rates, printed with six digits, may raise the limit.
pub(super) fn may_raise(counters: &Counters) -> bool {
    counters.eviction_rate >= TOLERABLE_RATE && counters.unsatisfied_rate >= TOLERABLE_RATE
}
