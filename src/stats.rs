//! One adds up: what happened, current beside total.
//!
//! [`Ledger`] has one verb for each event and is kept under the pool's lock, beside the store it describes; [`Stats`] is
//! the snapshot that a user sees. Nothing here prints or decides.

use std::time::Duration;

use crate::policy::{Check, Window};

/// Counters of one pool; whoever holds the pool's lock writes them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ledger {
    /// Since the last raise or clear, as TensorFlow counts.
    pub(crate) window: Window,
    pub(crate) total: Window,
    pub(crate) reclaimed: u64,
    pub(crate) cleared: u64,
    pub(crate) checks: u64,
    pub(crate) raises: u64,
    pub(crate) failed_gets: u64,
    pub(crate) handed_out: u64,
    pub(crate) handed_out_bytes: u64,
    pub(crate) idle_bytes: u64,
}

/// How an idle buffer leaves the pool without serving a get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removal {
    /// By a put over the count limit.
    Evicted,
    /// To make room under the byte ceiling.
    Reclaimed,
    /// By `clear` or at the end.
    Cleared,
}

impl Ledger {
    /// A get found its buffer idle.
    pub(crate) fn hit(&mut self, held_bytes: u64) {
        self.window.get_from_pool += 1;
        self.total.get_from_pool += 1;
        self.idle_bytes -= held_bytes;
        self.hand_out(held_bytes);
    }

    /// A get was served by the underlying allocator; an unpooled one counts in no window.
    pub(crate) fn allocated(&mut self, held_bytes: u64, pooled: bool) {
        self.window.allocated += u64::from(pooled);
        self.total.allocated += 1;
        self.hand_out(held_bytes);
    }

    fn hand_out(&mut self, held_bytes: u64) {
        self.handed_out += 1;
        self.handed_out_bytes += held_bytes;
    }

    /// A buffer came back.
    pub(crate) fn put(&mut self, held_bytes: u64, pooled: bool) {
        self.window.put += u64::from(pooled);
        self.total.put += 1;
        self.lost(held_bytes);
    }

    /// A buffer handed out will never come back.
    pub(crate) fn lost(&mut self, held_bytes: u64) {
        self.handed_out -= 1;
        self.handed_out_bytes -= held_bytes;
    }

    /// A buffer that came back is idle now.
    pub(crate) fn kept(&mut self, held_bytes: u64) {
        self.idle_bytes += held_bytes;
    }

    /// An idle buffer left.
    pub(crate) fn removed(&mut self, held_bytes: u64, removal: Removal) {
        self.idle_bytes -= held_bytes;
        match removal {
            Removal::Evicted => {
                self.window.evicted += 1;
                self.total.evicted += 1;
            }
            Removal::Reclaimed => self.reclaimed += 1,
            Removal::Cleared => self.cleared += 1,
        }
    }

    /// The rates were looked at; a raise begins a new window.
    pub(crate) fn checked(&mut self, check: &Check) {
        self.checks += 1;
        if check.raised_to.is_some() {
            self.raises += 1;
            self.begin_window();
        }
    }

    /// The four counters go back to zero.
    pub(crate) fn begin_window(&mut self) {
        self.window = Window::default();
    }
}

/// Calls to the underlying allocator, in the bytes asked of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Underlying {
    /// Acquisitions that succeeded.
    pub allocs: u64,
    /// Releases that succeeded.
    pub frees: u64,
    /// Sum of the classes acquired.
    pub alloc_bytes: u64,
    /// Sum of the classes released.
    pub free_bytes: u64,
    /// Most bytes acquired and not released at any time.
    pub peak_bytes: u64,
    /// Time spent in calls to acquire and release, failed ones included.
    pub time: Duration,
    /// Calls that failed.
    pub failures: u64,
}

/// A snapshot of a pool. At rest the figures balance:
///
/// - `gets = hits + misses`,
/// - `puts + in_use + in_flight + lost = gets`,
/// - `puts = kept + unpooled`, and what was kept either served a hit, is idle, or was evicted, reclaimed or cleared,
/// - `pinned_bytes = in_use_bytes + in_flight_bytes + idle_bytes + lost_bytes`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// Name of the source of the memory.
    pub backend: &'static str,
    /// Is that memory page-locked?
    pub is_pinned: bool,
    /// Most idle buffers that the pool keeps now.
    pub pool_size_limit: u64,
    /// TensorFlow's four counters, since the last raise or clear.
    pub window: Window,
    /// Gets of more than zero bytes that were served, over the life of the pool.
    pub gets: u64,
    /// Of those, served by an idle buffer.
    pub hits: u64,
    /// Of those, served by the underlying allocator.
    pub misses: u64,
    /// Gets that ended in an error of the ceiling or of the back-end.
    pub failed_gets: u64,
    /// Buffers that came back.
    pub puts: u64,
    /// Idle buffers evicted by puts over the limit.
    pub evicted: u64,
    /// Idle buffers given back to make room under the ceiling.
    pub reclaimed: u64,
    /// Times that the rates were looked at.
    pub checks: u64,
    /// Of those, how often the limit rose.
    pub raises: u64,
    /// Idle buffers.
    pub buffers_in_pool: u64,
    /// Bytes of the idle buffers.
    pub idle_bytes: u64,
    /// Buffers in the hands of users.
    pub in_use: u64,
    /// Bytes of those.
    pub in_use_bytes: u64,
    /// Buffers that a device may still be reading.
    pub in_flight: u64,
    /// Bytes of those.
    pub in_flight_bytes: u64,
    /// Age of the oldest copy in flight.
    pub oldest_in_flight: Option<Duration>,
    /// Buffers that can never be used again: a device error hid whether their copy is over.
    pub lost: u64,
    /// Bytes of those, and of regions that the back-end failed to take back.
    pub lost_bytes: u64,
    /// Bytes held from the back-end, in whatever state, in its own granularity.
    pub pinned_bytes: u64,
    /// Most of them at any time.
    pub peak_pinned_bytes: u64,
    /// The ceiling on them.
    pub max_bytes: Option<u64>,
    /// Calls to the underlying allocator.
    pub underlying: Underlying,
}

impl Stats {
    /// Share of the gets that an idle buffer served; 0 before the first.
    #[allow(clippy::cast_precision_loss)] // A rate.
    pub fn hit_rate(&self) -> f64 {
        if self.gets == 0 { 0.0 } else { self.hits as f64 / self.gets as f64 }
    }

    /// Recounts what must balance while no other thread uses the pool; names the first sum that does not.
    ///
    /// # Errors
    ///
    /// The two sides of that sum, in words and numbers.
    pub fn validate(&self) -> Result<(), String> {
        let sums = [
            ("gets = hits + misses", self.gets, self.hits + self.misses),
            (
                "gets = puts + in use + in flight + lost",
                self.gets,
                self.puts + self.in_use + self.in_flight + self.lost,
            ),
            (
                "pinned = in use + in flight + idle + lost bytes",
                self.pinned_bytes,
                self.in_use_bytes + self.in_flight_bytes + self.idle_bytes + self.lost_bytes,
            ),
        ];
        let broken = sums.iter().find(|(_, left, right)| left != right);
        match broken {
            Some((sum, left, right)) => Err(format!("{sum}: {left} against {right} in {self:?}")),
            None if self.buffers_in_pool > self.pool_size_limit => {
                Err(format!("{} idle buffers, limit {}", self.buffers_in_pool, self.pool_size_limit))
            }
            None if self.max_bytes.is_some_and(|max_bytes| self.peak_pinned_bytes > max_bytes) => {
                Err(format!("{} B held at the peak, ceiling {:?}", self.peak_pinned_bytes, self.max_bytes))
            }
            None => Ok(()),
        }
    }
}
