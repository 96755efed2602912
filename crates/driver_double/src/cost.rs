//! The cost model: how long calls take where the environment asks for the costs of a real device.
//!
//! Measured on one H200 (driver 580, PCIe 5, a virtual machine); the rates are medians.
//!
//! | work | takes | while others |
//! | --- | --- | --- |
//! | `cuMemHostAlloc` | 2.6 GB/s, at least 480 us; up to 64 KiB from a live chunk 2.4 us | cannot enqueue |
//! | `cuMemFreeHost` | 12 GB/s, at least 207 us; into a live chunk 2.5 us; once the device is idle | cannot enqueue |
//! | `cuMemHostRegister` | 60 us and 60 GB/s (huge pages) | cannot enqueue |
//! | `cuMemHostUnregister` | 120 us and 60 GB/s, once the device is idle | cannot enqueue |
//! | `cuMemCreate` | 4.6 GB/s | cannot create, cannot enqueue for 290 us |
//! | `cuMemMap` | 5 us | cannot enqueue |
//! | `cuMemSetAccess` | 165 us and 33 GB/s past the first 2 MiB, or 165 us a mapping | cannot enqueue for 165 us |
//! | first touch after `cuMemSetAccess` | 170 us for 2 MiB, again after each remap | continue |
//! | `cuMemUnmap` | 99 us, 27 GB/s past the first 2 MiB | cannot enqueue for 40 us |
//! | `cuMemRelease` | 65 us | cannot enqueue for 40 us |
//! | copy, fill, launch of a graph | 1.25 us, 1.5 us over 1,000 live pinned ranges, 2.0 us over 8,000 | cannot enqueue |
//! | `cuStreamWriteValue32`, `cuLaunchHostFunc` | 0.75 us | cannot enqueue |
//! | `cuEventRecord`, `cuStreamWaitEvent` | 0.2 us | cannot enqueue |
//! | `cuEventQuery` | 0.18 us alone, 10.6 us for each of 16 threads at once | continue |
//! | `cuStreamQuery` | 1.35 us | continue |
//!
//! A [`Cost`] begins with the work, and dropping it waits for the rest of its time. The double's own work counts towards
//! it; where this machine's kernel needs longer, the call takes longer (releasing a granule: 0.11 ms). Long costs are
//! slept, since most of the double's work for them (faulting pages in) has used a core already. The first touch is no call:
//! it takes its time because `memory::leave_first_touch` leaves that many pages to be faulted in, or waits where granules are
//! of huge pages (`sysctl vm.nr_hugepages`), which spare a slow kernel most of the work. Whether one `cuMemSetAccess` over several handles costs as one or as many was not measured: a setting chooses. Never knows the
//! meaning of a call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::{address_space, enqueue_lock, settings};

/// A sleep may end this much late (timer slack and wake-up), so the end of a cost is spun.
const SLACK: Duration = Duration::from_micros(80);
const GRANULE_BYTES: u64 = 2 << 20;
/// ns of one query by threads that query at once, as measured; straight lines between, and on from the last.
const QUERIES: [(u64, u64); 5] = [(1, 180), (2, 730), (4, 1_820), (8, 5_250), (16, 10_570)];

/// ns of an enqueue while so many pinned ranges are live, as measured; straight lines between, and on from the last.
const ENQUEUES: [(u64, u64); 3] = [(1, 1_250), (1_000, 1_500), (8_000, 2_000)];
/// Holding enqueues up, measured as the longest enqueue of another thread beside it.
const CREATE_HOLDS_UP: u64 = 290_000;
const DROP_HOLDS_UP: u64 = 40_000;
const SET_ACCESS: u64 = 165_000;

/// Work with a cost; the numbers are bytes, but for those with names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    HostAlloc(u64),
    /// A block out of a live chunk.
    Carve,
    HostFree(u64),
    /// A block of a chunk that stays.
    Uncarve,
    Register(u64),
    Unregister(u64),
    Create(u64),
    Map,
    SetAccess {
        bytes: u64,
        mappings: u64,
        each: bool,
    },
    Unmap(u64),
    Release,
    Enqueue {
        live_ranges: u64,
    },
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
            Work::Carve => 2_400,
            Work::HostFree(bytes) => at(12_000, bytes).max(207_000),
            Work::Uncarve => 2_500,
            Work::Register(bytes) => 60_000 + at(60_000, bytes),
            Work::Unregister(bytes) => 120_000 + at(60_000, bytes),
            Work::Create(bytes) => at(4_600, bytes),
            Work::Map => 5_000,
            Work::SetAccess { mappings, each: true, .. } => SET_ACCESS * mappings.max(1),
            Work::SetAccess { bytes, .. } => SET_ACCESS + beyond_first(bytes, 33_000),
            Work::Unmap(bytes) => 99_000 + beyond_first(bytes, 27_000),
            Work::Release => 65_000,
            Work::Enqueue { live_ranges } => between(&ENQUEUES, live_ranges),
            Work::Signal => 750,
            Work::Event => 200,
            Work::EventQuery => between(&QUERIES, at_once),
            Work::StreamQuery => 1_350,
        }
    }

    /// How long this work of virtual memory holds up enqueues.
    fn nanos_without_enqueues(self) -> u64 {
        match self {
            Work::Create(_) => self.nanos(1).min(CREATE_HOLDS_UP),
            Work::Map => self.nanos(1),
            Work::SetAccess { .. } => SET_ACCESS,
            Work::Unmap(_) | Work::Release => DROP_HOLDS_UP,
            _ => 0,
        }
    }
}

/// ns for so many bytes at so many MB/s.
fn at(megabytes_per_second: u64, bytes: u64) -> u64 {
    bytes.saturating_mul(1_000) / megabytes_per_second
}

/// The straight lines through these points.
fn between(points: &[(u64, u64)], at: u64) -> u64 {
    let at = at.max(points[0].0);
    let above = points.iter().position(|&(known, _)| known >= at).unwrap_or(points.len() - 1).max(1);
    let [(fewer, low), (more, high)] = [points[above - 1], points[above]];
    low + (high - low) * (at - fewer) / (more - fewer)
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

/// Begins work of virtual memory: for the first part of its time no other thread enqueues.
pub(crate) fn charge_beside_enqueues(work: Work) -> Cost {
    let cost = charge(work);
    let _turn = enqueue_lock::take();
    if cost.due.is_some() {
        wait_until(Instant::now() + Duration::from_nanos(work.nanos_without_enqueues()));
    }
    cost
}

/// Begins an enqueue.
pub(crate) fn charge_enqueue() -> Cost {
    charge(Work::Enqueue { live_ranges: address_space::live_pinned() })
}

pub(crate) fn wait_until(due: Instant) {
    let left = due.saturating_duration_since(Instant::now());
    if left > SLACK {
        thread::sleep(left - SLACK);
    }
    while Instant::now() < due {
        std::hint::spin_loop();
    }
}

impl Drop for Cost {
    fn drop(&mut self) {
        let Some(due) = self.due else { return };
        wait_until(due);
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
        assert_eq!([micros(Work::Carve), micros(Work::Uncarve)], [2, 2]);
        let access = |mib: u64, each| micros(Work::SetAccess { bytes: mib * MIB, mappings: mib / 2, each });
        assert_eq!([2, 4, 64].map(|mib| access(mib, false)), [165, 228, 2_135]);
        assert_eq!([2, 4, 64].map(|mib| access(mib, true)), [165, 330, 5_280]);
        assert_eq!([2, 4].map(|mib| micros(Work::Unmap(mib * MIB))), [99, 176]);
    }

    #[test]
    fn queries_of_many_threads_slow_each_other_down() {
        let query = |at_once| Work::EventQuery.nanos(at_once);
        assert_eq!([1, 2, 4, 8, 16].map(query), [180, 730, 1_820, 5_250, 10_570]);
        assert_eq!([3, 24, 0].map(query), [1_275, 15_890, 180]);
    }

    #[test]
    fn an_enqueue_costs_more_the_more_ranges_are_pinned() {
        let enqueue = |live_ranges| Work::Enqueue { live_ranges }.nanos(1);
        assert_eq!([0, 1, 1_000, 8_000].map(enqueue), [1_250, 1_250, 1_500, 2_000]);
        assert!(enqueue(4_000) > 1_600 && enqueue(32_000) > 3_000);
    }

    #[test]
    fn virtual_memory_holds_enqueues_up_for_less_than_a_third_of_a_millisecond() {
        let access = Work::SetAccess { bytes: 64 * MIB, mappings: 32, each: true };
        let works = [Work::Create(2 * MIB), Work::Create(64 * MIB), Work::Map, access];
        let drops = [Work::Unmap(64 * MIB), Work::Release];
        assert_eq!(works.map(Work::nanos_without_enqueues), [290_000, 290_000, 5_000, 165_000]);
        assert_eq!(drops.map(Work::nanos_without_enqueues), [40_000, 40_000]);
    }
}
