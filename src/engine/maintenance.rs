//! When periodic work is due: polls by hits, ticks of the pool's clock, readings of memory pressure, reports of growth.
//!
//! One thread at a time runs a tick; a thread that finds another one at it goes on without waiting. So the lock held
//! during a tick, slow calls included, makes no thread wait.
//!
//! Also the thread that polls a pool whose program may make no calls (`PINPOOL_POLL`). Owns times and thresholds; the work
//! itself is the core's.

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use crate::host::{Pressure, PressureGauge, PressureSource};
use crate::sync::plain::{Mutex, MutexGuard};
use crate::sync::process::{AtomicU64, Ordering};

/// Between two ticks: much shorter than any time in the rules, long against the cost of a tick.
const TICK_EVERY_US: u64 = 10_000;
/// Between two readings of the kernel's pressure files, which cost system calls.
const GAUGE_EVERY_US: u64 = 1_000_000;
/// Growth is reported each time that pinned memory has doubled since the last report, from here on.
const FIRST_REPORT_BYTES: u64 = 64 << 20;
/// Between two calls of the polling thread.
const POLL_EVERY: Duration = Duration::from_millis(500);

/// Poll every 63rd hit of a thread; an odd period lets alternating pools both be polled.
const HITS_BETWEEN_POLLS: u32 = 62;

thread_local! {
    static HITS_TO_POLL: Cell<u32> = const { Cell::new(HITS_BETWEEN_POLLS) };
}

/// Counts a hit of the calling thread; true if it is to poll. A thread that is ending has no count and does not poll.
#[inline]
pub(super) fn is_poll_due() -> bool {
    let count = |hits: &Cell<u32>| {
        let left = hits.get().checked_sub(1);
        hits.set(left.unwrap_or(HITS_BETWEEN_POLLS));
        left.is_none()
    };
    HITS_TO_POLL.try_with(count).unwrap_or(false)
}

/// When the next tick is due.
#[derive(Debug)]
pub(super) struct Maintenance {
    next_tick_us: AtomicU64,
    watch: Mutex<Watch>,
}

#[derive(Debug)]
struct Watch {
    gauge: Option<PressureGauge>,
    next_gauge_us: u64,
    pressure: Pressure,
    reported_bytes: u64,
}

/// A tick in progress.
#[derive(Debug)]
pub(super) struct Tick<'a>(MutexGuard<'a, Watch>);

impl Maintenance {
    pub(super) fn new(from: &PressureSource) -> Self {
        let gauge = PressureGauge::open(from);
        let watch = Watch { gauge, next_gauge_us: 0, pressure: Pressure::Calm, reported_bytes: FIRST_REPORT_BYTES / 2 };
        Self { next_tick_us: AtomicU64::new(0), watch: Mutex::new(watch) }
    }

    /// Begins a tick if one is due and no other thread runs one.
    pub(super) fn begin_tick(&self, now_us: u64) -> Option<Tick<'_>> {
        // Relaxed: a thread that sees an old value finds the lock taken, or repeats a tick that has nothing to do.
        if now_us < self.next_tick_us.load(Ordering::Relaxed) {
            return None;
        }
        let watch = self.watch.try_lock()?;
        self.next_tick_us.store(now_us + TICK_EVERY_US, Ordering::Relaxed);
        Some(Tick(watch))
    }
}

impl Tick<'_> {
    /// Reads the pressure on memory if that is due; returns it if it changed.
    pub(super) fn pressure_change(&mut self, now_us: u64) -> Option<Pressure> {
        let Watch { gauge, next_gauge_us, pressure, .. } = &mut *self.0;
        let gauge = gauge.as_mut().filter(|_| now_us >= *next_gauge_us)?;
        *next_gauge_us = now_us + GAUGE_EVERY_US;
        let before = std::mem::replace(pressure, gauge.read());
        (*pressure != before).then_some(*pressure)
    }

    /// Whether the last reading was severe.
    pub(super) fn pressure_is_severe(&self) -> bool {
        self.0.pressure == Pressure::Severe
    }

    /// Whether `held_bytes` are twice what was reported last; then they count as reported.
    pub(super) fn growth_is_due(&mut self, held_bytes: u64) -> bool {
        let is_due = held_bytes >= self.0.reported_bytes.saturating_mul(2);
        if is_due {
            self.0.reported_bytes = held_bytes;
        }
        is_due
    }
}

/// A thread that polls a pool twice a second. It keeps neither the pool nor its memory, and ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Poller {
    /// The thread sleeps on the other end of this channel, which reports its drop.
    _until_dropped: Sender<Infallible>,
}

impl Poller {
    /// Starts a thread that calls `poll` until that returns false.
    pub(super) fn start(poll: impl Fn() -> bool + Send + 'static) -> io::Result<Self> {
        let (until_dropped, sleep) = channel::<Infallible>();
        let run = move || while matches!(sleep.recv_timeout(POLL_EVERY), Err(RecvTimeoutError::Timeout)) && poll() {};
        thread::Builder::new().name("pinpool-poll".to_owned()).spawn(run)?;
        Ok(Self { _until_dropped: until_dropped })
    }
}
