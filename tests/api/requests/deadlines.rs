//! A request returns by its deadline, whatever other threads do, and no call runs for as long as other threads keep the pool
//! busy.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pinpool::{Pool, Request};
use pinpool_replay::SimSource;
use pinpool_testing::SourceCall;

use crate::fixture::{MIB, faulty, faulty_sim, over, with_manual_clock};
use crate::pressure_file::PressureFile;
use crate::until::ends;
use crate::valid_stats::valid_stats;

#[test]
fn a_request_does_not_wait_past_its_deadline_for_the_calls_of_another_thread() {
    type Act = (SourceCall, fn(&Pool));
    let acts: [Act; 2] =
        [(SourceCall::Acquire, |pool| drop(pool.get(8 * MIB).unwrap())), (SourceCall::Release, |pool| pool.trim(0))];
    for ((call, act), source) in acts.into_iter().flat_map(|act| {
        [SimSource::new(1 << 40), SimSource::separate_regions(1 << 40)].map(|source| (act, faulty(source)))
    }) {
        let pool = over(source.clone(), 8 << 20).build().unwrap();
        if matches!(call, SourceCall::Release) {
            drop(pool.get(8 * MIB).unwrap());
        }
        let held = source.hold(call);
        thread::scope(|scope| {
            let acting = scope.spawn(|| act(&pool));
            held.wait_for(1);
            let get = |wait| pool.get_with(Request::new(4 * MIB).timeout(wait)).map(drop);
            let waiting = scope.spawn(move || get(Duration::from_millis(10)));
            let at_once = scope.spawn(move || get(Duration::ZERO));
            let trimming = scope.spawn(|| pool.trim(0));
            let all_end = ends(&waiting) && ends(&at_once) && ends(&trimming);
            assert!(!acting.is_finished());
            drop(held);
            assert!(all_end, "a call waited for the call of another thread");
            assert!(waiting.join().unwrap().unwrap_err().is_timeout());
            assert!(matches!(at_once.join().unwrap(), Err(error) if error.is_limit() && !error.is_timeout()));
        });
        valid_stats(&pool);
    }
}

/// Buffers are returned while the pool releases idle ones, so an unbounded loop would never end.
#[test]
fn severe_pressure_releases_only_memory_idle_at_its_start() {
    let pressure = PressureFile::new();
    let under_pressure = over(faulty_sim(), 64 << 20).unstable_settings(|only| only.pressure = Some(pressure.path()));
    let (pool, clock) = with_manual_clock(under_pressure);
    drop((0..50).map(|_| pool.get(4096).unwrap()).collect::<Vec<_>>());
    pressure.write(90.0, 90.0);
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    drop((0..20).map(|_| pool.get(4096).unwrap()).collect::<Vec<_>>());
                }
            });
        }
        let maintaining = scope.spawn(|| {
            for _ in 0..5 {
                clock.advance_us(2_000_000);
                pool.maintain();
            }
        });
        let ended = ends(&maintaining);
        stop.store(true, Ordering::Relaxed);
        assert!(ended, "`maintain` runs as long as other threads return buffers");
    });
    valid_stats(&pool);
}

#[test]
fn all_attempts_of_a_request_share_one_deadline() {
    let source = faulty(SimSource::separate_regions(1 << 40));
    (0..100).for_each(|index| source.fail(SourceCall::Acquire, index));
    let pool = over(source.clone(), 64 << 20).build().unwrap();
    let begun = Instant::now();
    assert!(pool.get_with(Request::new(3 * MIB).timeout(Duration::ZERO)).unwrap_err().is_backend());
    let untils = source.deadlines();
    assert!(untils.len() > 1 && untils.iter().all(|until| *until == untils[0]), "{untils:?}");
    assert!(untils[0] >= begun + Duration::from_millis(100), "the calls of other threads take milliseconds");
}
