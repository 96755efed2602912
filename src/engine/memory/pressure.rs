//! Memory pressure, from the kernel's files or from one file, and how near the process is to the most mappings that the kernel allows.

use std::path::{Path, PathBuf};

use pinpool_os::clock::monotonic_us;
use pinpool_os::fork::OfProcess;
use pinpool_os::host::limits::{self, MappingUse};
use pinpool_os::host::{Pressure, PressureGauge};
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// Between two readings of the kernel's pressure files, which cost system calls.
const GAUGE_EVERY_US: u64 = 1_000_000;

/// The pressure on memory at the last tick. Held locked during a tick; only one tick runs at a time.
#[derive(Debug)]
pub(super) struct PressureWatch(pub(super) Mutex<Watch>);

#[derive(Debug)]
pub(super) struct Watch {
    /// `None`: the kernel's files.
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
    pub(super) fn pressure_change(&mut self, now_us: u64) -> Option<Pressure> {
        let now = match &mut self.gauge {
            Some(own) => own.read(now_us),
            None => OF_KERNEL.get().lock().read(monotonic_us()),
        };
        let before = std::mem::replace(&mut self.pressure, now);
        (self.pressure != before).then_some(self.pressure)
    }
}

/// A pool with fewer mappings does not check.
const FIRST_LOOK: u64 = 1024;
/// Least number of mappings between two checks.
const LEAST_BETWEEN_LOOKS: u64 = 64;
/// Few mappings are left below one part in this many of the limit.
const FEW_LEFT_SHARE: u64 = 4;

#[derive(Debug)]
pub(super) struct MappingWatch {
    root: PathBuf,
    /// Number of the pool's mappings at which the next check is due.
    next_look: AtomicU64,
}

impl MappingWatch {
    /// Reads the files below `root`.
    pub(super) fn below(root: PathBuf) -> Self {
        Self { root, next_look: AtomicU64::new(FIRST_LOOK) }
    }

    /// The use of the process, if few mappings are left and a look was due at this number of the pool's. A slow call then.
    pub(super) fn few_left(&self, own_mappings: u64) -> Option<MappingUse> {
        // Relaxed: the number guards nothing. Two threads may check at once.
        if own_mappings < self.next_look.load(Ordering::Relaxed) {
            return None;
        }
        let found = limits::mapping_use(&self.root);
        let left = found.map_or(u64::MAX, |MappingUse { used, limit }| limit.saturating_sub(used));
        // Relaxed: as above.
        self.next_look.store(own_mappings.saturating_add((left / 2).max(LEAST_BETWEEN_LOOKS)), Ordering::Relaxed);
        found.filter(|found| left < found.limit / FEW_LEFT_SHARE)
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use pinpool_os::host::tree;

    #[test]
    fn it_looks_when_the_pool_could_have_used_half_of_what_was_left() {
        let maps = |count: usize| "1000-2000 rw-p 00000000 00:00 0\n".repeat(count);
        let root = tree::of(&[("/proc/sys/vm/max_map_count", "8000".to_owned()), ("/proc/self/maps", maps(4000))]);
        let watch = MappingWatch::below(root.path().to_owned());
        assert_eq!((watch.few_left(1023), watch.few_left(1024)), (None, None));
        tree::write(&root, "/proc/self/maps", &maps(6001));
        assert_eq!(watch.few_left(3023), None, "not yet due");
        assert_eq!(watch.few_left(3024), Some(MappingUse { used: 6001, limit: 8000 }));
        assert_eq!(watch.few_left(3025), None, "looked just now");
        assert!(watch.few_left(3024 + 999).is_some());
        let unknown = MappingWatch::below("/nowhere".into());
        assert_eq!(unknown.few_left(u64::MAX), None);
    }
}
