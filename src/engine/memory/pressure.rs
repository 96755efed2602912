//! Memory pressure, from the kernel's files or from one file.

use std::path::Path;

use pinpool_os::clock::monotonic_ns;
use pinpool_os::fork::PerProcess;
use pinpool_os::host::{Pressure, PressureGauge};
use pinpool_os::sync::unmodeled::Mutex;

/// Time between two readings of the kernel's pressure files, since each reading costs system calls.
const GAUGE_EVERY_US: u64 = 1_000_000;

/// The pressure on memory at the last tick.
#[derive(Debug)]
pub(super) struct PressureWatch {
    /// The gauge of this pool's file; `None` if the pool uses the kernel's files.
    gauge: Option<Gauge>,
    pub(super) pressure: Pressure,
}

/// The pressure on memory, read at most once in [`GAUGE_EVERY_US`].
#[derive(Debug)]
struct Gauge {
    source: Option<PressureGauge>,
    next_reading_us: u64,
    pressure: Pressure,
}

/// The kernel's files are read once for all pools of the process.
static OF_KERNEL: PerProcess<Mutex<Gauge>> =
    PerProcess::new(|| Mutex::new(Gauge::new(PressureGauge::from_kernel(Path::new("/")))));

impl PressureWatch {
    /// Creates a watch of `file` alone, or of the kernel's files if there is no `file`.
    pub(super) fn new(file: Option<&Path>) -> Self {
        let gauge = file.map(|file| Gauge::new(Some(PressureGauge::from_file(file))));
        Self { gauge, pressure: Pressure::Calm }
    }

    /// Returns the pressure on memory, if it has changed.
    pub(super) fn pressure_change(&mut self, now_us: u64) -> Option<Pressure> {
        let now = match &mut self.gauge {
            Some(own) => own.read(now_us),
            None => OF_KERNEL.get().lock().read(monotonic_ns() / 1000),
        };
        let before = std::mem::replace(&mut self.pressure, now);
        (self.pressure != before).then_some(self.pressure)
    }
}

impl Gauge {
    fn new(source: Option<PressureGauge>) -> Self {
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
