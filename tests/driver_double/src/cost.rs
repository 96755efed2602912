//! The cost model: how long calls take where the environment asks for the costs of a real device.
//!
//! Measured on one H200 (driver 580, PCIe 5, a virtual machine); the rates are medians.
//!
//! | work | takes | while others |
//! | --- | --- | --- |
//! | `cuMemHostAlloc` | 2.6 GB/s, at least 480 us (each a fresh chunk) | cannot enqueue |
//! | `cuMemFreeHost` | 12 GB/s, at least 207 us, once the device is idle | cannot enqueue |
//! | `cuMemHostRegister` | 60 us and 60 GB/s (huge pages) | cannot enqueue |
//! | `cuMemHostUnregister` | 120 us and 60 GB/s, once the device is idle | cannot enqueue |
//! | `cuMemCreate` | 4.6 GB/s | cannot create |
//! | `cuMemMap` | 5 us | continue |
//! | `cuMemSetAccess` | 165 us, 33 GB/s past the first granule | continue |
//! | `cuMemUnmap` | 99 us, 27 GB/s past the first granule | continue |
//! | `cuMemRelease` | 65 us | continue |
//! | copy, fill, launch of a graph | 1.25 us | cannot enqueue |
//! | `cuStreamWriteValue32`, `cuLaunchHostFunc` | 0.75 us | cannot enqueue |
//! | `cuEventRecord`, `cuStreamWaitEvent` | 0.2 us | cannot enqueue |
//! | `cuEventQuery` | 0.18 us alone, 10.6 us for each of 16 threads at once | continue |
//! | `cuStreamQuery` | 1.35 us | continue |
//!
//! A [`Cost`] begins with the work, and dropping it waits for the rest of its time. The double's own work counts towards
//! it; where this machine's kernel needs longer, the call takes longer (releasing a granule: 0.11 ms). Long costs are
//! slept, since most of the double's work for them (faulting pages in) has used a core already. Left out: small blocks carved from a live chunk (2.4 us), more live ranges making enqueues slower, and the
//! first touch of a granule (0.17 ms), which is part of `cuMemSetAccess` here. Never knows the meaning of a call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::settings;

/// A sleep may end this much late (timer slack and wake-up), so the end of a cost is spun.
const SLACK: Duration = Duration::from_micros(80);
const GRANULE_BYTES: u64 = 2 << 20;
/// ns of one query by threads that query at once, as measured; straight lines between, and on from the last.
const QUERIES: [(u64, u64); 5] = [(1, 180), (2, 730), (4, 1_820), (8, 5_250), (16, 10_570)];

/// Work with a cost; the numbers are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    HostAlloc(u64),
    HostFree(u64),
    Register(u64),
    Unregister(u64),
    Create(u64),
    Map,
    SetAccess(u64),
    Unmap(u64),
    Release,
    Enqueue,
    Signal,
    Event,
    EventQuery,
    StreamQuery,
}

static QUERYING: AtomicU64 = AtomicU64::new(0);

impl Work {
    /// Its time in ns while `at_once` threads, this one included, query events.
    fn nanos(self, at_once: u64) -> u64 {
        let beyond_first = |bytes: u64, rate: u64| at(rate, bytes.saturating_sub(GRANULE_BYTES));
        match self {
            Work::HostAlloc(bytes) => at(2_600, bytes).max(480_000),
            Work::HostFree(bytes) => at(12_000, bytes).max(207_000),
            Work::Register(bytes) => 60_000 + at(60_000, bytes),
            Work::Unregister(bytes) => 120_000 + at(60_000, bytes),
            Work::Create(bytes) => at(4_600, bytes),
            Work::Map => 5_000,
            Work::SetAccess(bytes) => 165_000 + beyond_first(bytes, 33_000),
            Work::Unmap(bytes) => 99_000 + beyond_first(bytes, 27_000),
            Work::Release => 65_000,
            Work::Enqueue => 1_250,
            Work::Signal => 750,
            Work::Event => 200,
            Work::EventQuery => query_nanos(at_once),
            Work::StreamQuery => 1_350,
        }
    }
}

/// ns for so many bytes at so many MB/s.
fn at(megabytes_per_second: u64, bytes: u64) -> u64 {
    bytes.saturating_mul(1_000) / megabytes_per_second
}

fn query_nanos(at_once: u64) -> u64 {
    let at_once = at_once.max(1);
    let above = QUERIES.iter().position(|&(threads, _)| threads >= at_once).unwrap_or(QUERIES.len() - 1).max(1);
    let [(fewer, low), (more, high)] = [QUERIES[above - 1], QUERIES[above]];
    low + (high - low) * (at_once - fewer) / (more - fewer)
}

/// Waits for the rest of its time when dropped.
#[derive(Debug)]
#[must_use = "the wait happens when this is dropped"]
pub(crate) struct Cost {
    due: Option<Instant>,
    queries: bool,
}

/// Begins work that has a cost.
pub(crate) fn charge(work: Work) -> Cost {
    if !settings::get().measured_costs {
        return Cost { due: None, queries: false };
    }
    let queries = work == Work::EventQuery;
    // Relaxed: a count that publishes nothing.
    let before = if queries { QUERYING.fetch_add(1, Ordering::Relaxed) } else { 0 };
    Cost { due: Some(Instant::now() + Duration::from_nanos(work.nanos(before + 1))), queries }
}

impl Drop for Cost {
    fn drop(&mut self) {
        let Some(due) = self.due else { return };
        let left = due.saturating_duration_since(Instant::now());
        if left > SLACK {
            thread::sleep(left - SLACK);
        }
        while Instant::now() < due {
            std::hint::spin_loop();
        }
        if self.queries {
            QUERYING.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn costs_are_those_measured() {
        let micros = |work: Work| work.nanos(1) / 1_000;
        assert_eq!(micros(Work::HostAlloc(4096)), 480);
        assert_eq!(micros(Work::HostAlloc(1024 * MIB)), 412_977);
        assert_eq!(micros(Work::HostFree(64 * MIB)), 5_592);
        assert_eq!([2, 8, 1024].map(|mib| micros(Work::Register(mib * MIB))), [94, 199, 17_955]);
        assert_eq!([2, 64, 1024].map(|mib| micros(Work::Unregister(mib * MIB))), [154, 1_238, 18_015]);
        assert_eq!(micros(Work::Create(2 * MIB)), 455);
        assert_eq!([2, 4].map(|mib| micros(Work::SetAccess(mib * MIB))), [165, 228]);
        assert_eq!([2, 4].map(|mib| micros(Work::Unmap(mib * MIB))), [99, 176]);
    }

    #[test]
    fn queries_of_many_threads_slow_each_other_down() {
        assert_eq!([1, 2, 4, 8, 16].map(query_nanos), [180, 730, 1_820, 5_250, 10_570]);
        assert_eq!(query_nanos(3), 1_275);
        assert_eq!(query_nanos(24), 15_890);
        assert_eq!(query_nanos(0), 180);
    }
}
