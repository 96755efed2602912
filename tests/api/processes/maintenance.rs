//! What the maintenance thread does while the program makes no calls, and what does not happen without the thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pinpool::source::HeapSource;
use pinpool::source::Source;
use pinpool::{Backend, Limit, Pool, PoolBuilder, Preset};
use pinpool_replay::SimSource;
use pinpool_testing::{FaultSource, SinkMemory, SinkStream, SourceCall};

use crate::child::alone;
use crate::fixture::{MIB, faulty, faulty_sim, filled, heap, held_sink, over, with_manual_clock};
use crate::manual_copies::{ManualStream, Nowhere};
use crate::until::until;

/// A pool that soon releases idle memory: it keeps no idle buffers, and keeps free memory for only 50 ms.
fn hasty(source: Arc<dyn Source>) -> PoolBuilder {
    over(source, Limit::Auto).maintenance_thread(true).pool_size_limit(0).idle_timeout(Duration::from_millis(50))
}

fn sources() -> [Arc<FaultSource>; 3] {
    [faulty(HeapSource::new()), faulty_sim(), faulty(SimSource::separate_regions(1 << 40))]
}

fn releases(source: &FaultSource) -> u64 {
    source.calls(SourceCall::Release)
}

#[test]
fn completed_copies_leave_the_statistics_while_the_program_makes_no_calls() {
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let pool = heap().preset(preset).build().unwrap();
        let (stream, mut device, gate) = held_sink(4096);
        filled(&pool, 4096, 1).copy_to(&stream, &mut device).unwrap();
        assert_eq!(pool.stats().copies.in_flight, 1);
        drop(gate);
        until("the copy has left the statistics", || pool.stats().copies.in_flight == 0);
        // The thread puts the buffer back after it has counted the end of its copy.
        until("the buffer is idle", || pool.stats().memory.idle == 1);
    }
}

#[test]
fn without_the_thread_nothing_happens_by_itself() {
    for source in sources() {
        let pool = hasty(source.clone()).maintenance_thread(false).build().unwrap();
        let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(4096));
        // Returned last, because a later request would release the memory if this test runs slowly enough for it to be due.
        let large = pool.get(2 * MIB).unwrap();
        filled(&pool, 4096, 1).copy_to(&stream, &mut device).unwrap();
        drop(large);
        stream.synchronize().unwrap();
        thread::sleep(Duration::from_millis(400));
        assert_eq!(releases(&source), 0);
        pool.maintain();
        assert_eq!(pool.stats().copies.in_flight, 0);
    }
}

#[test]
fn a_hanging_release_does_not_stop_maintenance_of_other_pools() {
    let source = faulty_sim();
    let hanging = hasty(source.clone()).build().unwrap();
    let gate = source.hold(SourceCall::Release);
    drop(hanging.get(2 * MIB).unwrap());
    gate.wait_for(1);

    let other = heap().unstable_settings(|only| only.pressure = Some("/dev/null".into())).maintenance_thread(true);
    let (other, clock) = with_manual_clock(other);
    drop(other.get(4096).unwrap());
    clock.advance_us(20_000_000);
    drop(other.get(8192).unwrap());
    assert_eq!(other.stats().memory.evictions.expired, 1, "the miss looked for what is old");
    drop(gate);
    until("the first pool continues", || hanging.stats().memory.held_bytes == 0);
}

#[test]
fn a_pool_without_buffers_in_use_is_checked_once_a_second() {
    alone(|| {
        let source = faulty_sim();
        let looks = || source.calls(SourceCall::DeviceLost);
        let pool = Pool::builder().without_env().backend(Backend::Source(source.clone())).build().unwrap();
        drop(pool.get(4096).unwrap());
        // The thread notices that nothing is in use any more.
        until("a look", || looks() > 0);
        let (before, begun) = (looks(), Instant::now());
        thread::sleep(Duration::from_millis(2500));
        let (looks, seconds) = (looks() - before, begun.elapsed().as_secs());
        assert!(looks <= seconds + 3, "{looks} looks in {seconds} s");
        assert_eq!(pool.stats().memory.idle, 1);
    });
}

#[cfg(target_os = "linux")]
#[test]
fn idle_pools_of_a_process_read_the_kernels_files_together() {
    const POOLS: u64 = 100;
    alone(|| {
        let build = |_| heap().build().unwrap();
        let pools: Vec<_> = (0..POOLS).map(build).inspect(|pool| drop(pool.get(4096).unwrap())).collect();
        let reads = || {
            let counts = std::fs::read_to_string("/proc/self/io").unwrap();
            counts.lines().find_map(|line| line.strip_prefix("syscr: ")?.parse::<u64>().ok()).unwrap()
        };
        let (before, begun) = (reads(), Instant::now());
        thread::sleep(Duration::from_millis(1500));
        // One reading per second, which takes several `read` calls.
        let (calls, seconds) = (reads() - before, begun.elapsed().as_secs());
        assert!(calls < (seconds + 1) * POOLS, "{calls} calls of `read` in {seconds} s");
        drop(pools);
    });
}

#[test]
fn the_end_of_a_pool_waits_for_what_the_thread_releases() {
    let source = faulty_sim();
    let pool = hasty(source.clone()).preset(Preset::TensorFlow).build().unwrap();
    let stream = ManualStream::default();
    drop(pool.get(MIB).unwrap().copy_to(&stream, &mut Nowhere).unwrap());
    let gate = source.hold(SourceCall::Release);
    stream.0.is_over.store(true, Ordering::SeqCst);
    gate.wait_for(1);
    thread::scope(|scope| {
        let ending = scope.spawn(|| drop(pool));
        thread::sleep(Duration::from_millis(20));
        assert!(!ending.is_finished(), "its memory is not released yet");
        drop(gate);
        ending.join().unwrap();
        assert_eq!(Arc::strong_count(&source), 1, "the pool keeps nothing");
    });
}

#[test]
fn pools_come_and_go_while_the_thread_looks_at_others() {
    let kept = hasty(Arc::new(HeapSource::new())).build().unwrap();
    let made = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..100 {
                    let pool = hasty(Arc::new(HeapSource::new())).build().unwrap();
                    drop((pool.get(4096 * (1 + round)).unwrap(), kept.get(5000).unwrap()));
                    made.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(made.into_inner(), 400);
    until("the remaining pool releases its memory", || kept.stats().memory.held_bytes == 0);
}
