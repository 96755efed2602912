//! What a tick does for an arena.

use std::path::Path;
use std::sync::Arc;

use super::{Domain, PoolView};
use crate::stats::EvictionReason;
use pinpool_os::clock::monotonic_us;
use pinpool_os::fork::OfProcess;
use pinpool_os::host::{Pressure, PressureGauge};
use pinpool_os::sync::plain::Mutex;

/// Between two readings of the kernel's pressure files, which cost system calls.
const GAUGE_EVERY_US: u64 = 1_000_000;
/// While memory is short, free memory is kept for a fourth of the time.
const RETENTION_DIVISOR: u64 = 4;

/// The pressure on memory at the last tick. Held locked during a tick, of which there is one at a time.
#[derive(Debug)]
pub(super) struct PressureWatch(Mutex<Watch>);

#[derive(Debug)]
struct Watch {
    /// `None`: that of the kernel's files.
    gauge: Option<Gauge>,
    pressure: Pressure,
}

/// The pressure on memory, read at most once in [`GAUGE_EVERY_US`].
#[derive(Debug)]
struct Gauge {
    source: Option<PressureGauge>,
    next_reading_us: u64,
    pressure: Pressure,
}

/// The kernel's files are read once for all pools of the process.
static OF_KERNEL: OfProcess<Mutex<Gauge>> =
    OfProcess::new(|| Mutex::new(Gauge::of(PressureGauge::of_kernel(Path::new("/")))));

impl PressureWatch {
    /// Follows the kernel's signs, or only `file`.
    pub(super) fn new(file: Option<&Path>) -> Self {
        let gauge = file.map(|file| Gauge::of(Some(PressureGauge::of_file(file))));
        Self(Mutex::new(Watch { gauge, pressure: Pressure::Calm }))
    }
}

impl Gauge {
    fn of(source: Option<PressureGauge>) -> Self {
        Self { source, next_reading_us: 0, pressure: Pressure::Calm }
    }

    fn read(&mut self, now_us: u64) -> Pressure {
        if let Some(source) = self.source.as_mut().filter(|_| now_us >= self.next_reading_us) {
            self.next_reading_us = now_us.saturating_add(GAUGE_EVERY_US);
            self.pressure = source.read();
        }
        self.pressure
    }
}

impl Watch {
    /// The pressure on memory, if it changed.
    fn pressure_change(&mut self, now_us: u64) -> Option<Pressure> {
        let now = match &mut self.gauge {
            Some(own) => own.read(now_us),
            None => OF_KERNEL.get().lock().read(monotonic_us()),
        };
        let before = std::mem::replace(&mut self.pressure, now);
        (self.pressure != before).then_some(self.pressure)
    }
}

impl Domain {
    /// A tick of `pool`: follows the pressure on memory, and releases what is due. Severe pressure releases everything idle, for as
    /// long as it lasts; `trim_all` is to release what is free then. May make slow calls.
    pub(in crate::engine) fn tick(self: &Arc<Self>, pool: &dyn PoolView, now_us: u64, trim_all: impl FnOnce()) {
        let Some(mut watch) = self.pressure.0.try_lock() else { return };
        if let Some(pressure) = watch.pressure_change(now_us) {
            self.arena.shorten_retention((pressure != Pressure::Calm).then_some(RETENTION_DIVISOR));
            self.log.pressure_changed(pressure == Pressure::Calm);
        }
        if watch.pressure == Pressure::Severe {
            release_idle(pool, EvictionReason::Pressure);
            trim_all();
        }
        self.arena.refresh_demand(now_us);
        self.log.release_error(self.release_due(now_us));
        self.resume_reserve(now_us);
    }
}

/// Releases as many blocks of `pool` as are idle now, oldest first. What other threads put back meanwhile is left to the
/// next call, so that this one ends.
fn release_idle(pool: &dyn PoolView, why: EvictionReason) {
    for _ in 0..pool.idle_buffers() {
        if !pool.release_oldest(why) {
            break;
        }
    }
}
