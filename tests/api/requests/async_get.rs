//! Requests that tasks await.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use pinpool::{Backend, GetFuture, OnFull, Pool, Preset, Request};
use pinpool_testing::{FaultSource, SourceCall};

use crate::fixture::{LONG, MIB, faulty_sim, over, over_sim, run, until_waits};
use crate::until::until;
use crate::valid_stats::valid_stats;

/// A timeout that expires during a test.
const SHORT: Duration = Duration::from_millis(30);

#[derive(Debug, Default)]
pub(super) struct Counting(pub(super) AtomicUsize);

impl Wake for Counting {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn poll(get: Pin<&mut GetFuture>, waker: &Waker) -> Poll<pinpool::Result<pinpool::PinnedBuf>> {
    get.poll(&mut Context::from_waker(waker))
}

#[test]
fn a_task_gets_an_aligned_buffer_with_or_without_a_wait() {
    let pool = over_sim(8 << 20).build().unwrap();
    let (align, waker) = (1 << 21, Waker::noop());
    let at_once = run(pool.get_async(Request::new(10).align(align))).unwrap();
    assert!(at_once.as_ptr().addr().is_multiple_of(align));
    drop(at_once);
    let held = pool.get(7 * MIB).unwrap();
    let mut get = pin!(pool.get_async(Request::new(5 * MIB).align(align)));
    assert!(poll(get.as_mut(), waker).is_pending());
    drop(held);
    let served = run(get).unwrap();
    assert!(served.as_ptr().addr().is_multiple_of(align) && served.len() == 5 * MIB);
    assert!(run(pool.get_async(Request::new(10).align(3))).unwrap_err().is_invalid_request());
    assert!(pool.try_get(Request::new(10).align(3)).unwrap_err().is_invalid_request());
}

#[test]
fn a_request_without_room_fails_or_falls_back_when_its_wait_has_passed() {
    let pool = over_sim(2 << 20).wait(SHORT).build().unwrap();
    let held = pool.get(2 * MIB).unwrap();
    assert!(run(pool.get_async(MIB)).unwrap_err().is_timeout());
    let error = run(pool.get_async(Request::new(MIB).timeout(Duration::ZERO))).unwrap_err();
    assert!(error.is_limit() && !error.is_timeout());
    assert!(run(pool.get_async(usize::MAX)).unwrap_err().is_invalid_request());
    assert!(run(pool.get_async(0)).unwrap().is_empty());
    drop(held);
    assert_eq!(valid_stats(&pool).requests.failed, 2);
    let pool = over_sim(2 << 20).wait(SHORT).on_full(OnFull::Pageable).build().unwrap();
    let _held = pool.get(2 * MIB).unwrap();
    assert!(run(pool.get_async(MIB)).unwrap().pinned_by().is_none());
    assert_eq!(valid_stats(&pool).requests.pageable, 1);
}

#[test]
fn tasks_and_threads_share_one_wait_queue() {
    let pool = over_sim(2 << 20).build().unwrap();
    let held = pool.get(2 * MIB).unwrap();
    let mut first = pin!(pool.get_async(2 * MIB));
    assert!(poll(first.as_mut(), Waker::noop()).is_pending());
    thread::scope(|scope| {
        let second = scope.spawn(|| pool.get(2 * MIB).unwrap());
        until_waits(&pool, 2);
        let mut third = pin!(pool.get_async(2 * MIB));
        assert!(poll(third.as_mut(), Waker::noop()).is_pending());
        drop(held);
        assert!(poll(third.as_mut(), Waker::noop()).is_pending());
        let Poll::Ready(Ok(buf)) = poll(first.as_mut(), Waker::noop()) else { panic!("the first is served first") };
        assert!(!second.is_finished());
        drop(buf);
        let buf = second.join().unwrap();
        assert!(poll(third.as_mut(), Waker::noop()).is_pending());
        drop(buf);
        assert!(poll(third.as_mut(), Waker::noop()).is_ready());
    });
    assert_eq!(valid_stats(&pool).requests.waits, 3);
}

#[test]
fn a_task_is_woken_through_the_waker_of_its_last_poll() {
    let pool = over_sim(2 << 20).build().unwrap();
    let held = pool.get(2 * MIB).unwrap();
    let (before, last) = (Arc::new(Counting::default()), Arc::new(Counting::default()));
    let mut ahead = Box::pin(pool.get_async(2 * MIB));
    let mut get = pin!(pool.get_async(2 * MIB));
    assert!(poll(ahead.as_mut(), Waker::noop()).is_pending());
    assert!(poll(get.as_mut(), &before.clone().into()).is_pending());
    assert!(poll(get.as_mut(), &last.clone().into()).is_pending());
    drop(held);
    drop(ahead);
    assert_eq!(before.0.load(Ordering::SeqCst), 0);
    assert!(last.0.load(Ordering::SeqCst) > 0);
    assert!(poll(get, &last.into()).is_ready());
}

#[test]
fn a_waker_that_panics_reaches_neither_the_return_nor_the_next_request() {
    struct Panicking;
    impl Wake for Panicking {
        fn wake(self: Arc<Self>) {
            panic!("the waker panics");
        }
    }
    let pool = over_sim(2 << 20).build().unwrap();
    let held = pool.get(2 * MIB).unwrap();
    let mut get = Box::pin(pool.get_async(2 * MIB));
    assert!(poll(get.as_mut(), &Arc::new(Panicking).into()).is_pending());
    drop(held);
    let Poll::Ready(Ok(buf)) = poll(get.as_mut(), Waker::noop()) else { panic!("it was handed over") };
    drop(buf);
    drop(get);
    assert_eq!(valid_stats(&pool).memory.in_use, 0);
}

/// Returns a source and a new pool over it: the first request of each size calls the source.
fn over_preset(preset: Preset) -> (Arc<FaultSource>, Pool) {
    let source = faulty_sim();
    let tensorflow = Pool::builder().without_env().preset(preset).backend(Backend::Source(source.clone()));
    let pool = if preset == Preset::Adaptive { over(source.clone(), 64 << 20) } else { tensorflow };
    (source, pool.build().unwrap())
}

#[test]
fn a_miss_pins_memory_on_another_thread_while_the_runtime_continues() {
    const BEATS: usize = 1000;
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let (source, pool) = over_preset(preset);
        let held = Arc::new(Mutex::new(Some(source.hold(SourceCall::Acquire))));
        // Opens the gate if the runtime is blocked, so that the test fails instead of hanging.
        let (is_over, over) = mpsc::channel::<()>();
        let opener = held.clone();
        let opener = thread::spawn(move || {
            if let Err(mpsc::RecvTimeoutError::Timeout) = over.recv_timeout(Duration::from_secs(60)) {
                drop(opener.lock().unwrap().take());
            }
        });
        let beats = run(async {
            let get = tokio::spawn(pool.get_async(4 * MIB));
            while source.calls(SourceCall::Acquire) == 0 {
                tokio::task::yield_now().await;
            }
            let mut beats = 0;
            while beats < BEATS && held.lock().unwrap().is_some() {
                assert!(!get.is_finished());
                tokio::task::yield_now().await;
                beats += 1;
            }
            held.lock().unwrap().take();
            assert_eq!(get.await.unwrap().unwrap().len(), 4 * MIB);
            beats
        });
        drop(is_over);
        opener.join().unwrap();
        assert_eq!(beats, BEATS, "the gate was held meanwhile");
        let stats = valid_stats(&pool);
        assert_eq!((stats.requests.served, stats.requests.misses, stats.requests.waits), (1, 1, 0));
        // A hit needs no thread.
        assert!(poll(pin!(pool.get_async(4 * MIB)), Waker::noop()).is_ready());
        assert_eq!(source.calls(SourceCall::Acquire), 1);
    }
}

#[test]
fn pinned_memory_for_a_future_that_is_dropped_serves_the_next_request() {
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let (source, pool) = over_preset(preset);
        let held = source.hold(SourceCall::Acquire);
        let mut get = Box::pin(pool.get_async(4 * MIB));
        let mut behind = Box::pin(pool.get_async(8 * MIB));
        assert!(poll(get.as_mut(), Waker::noop()).is_pending());
        held.wait_for(1);
        assert!(poll(behind.as_mut(), Waker::noop()).is_pending());
        drop((get, behind));
        drop(held);
        until("the memory is idle", || pool.stats().memory.idle > 0);
        assert_eq!(valid_stats(&pool).memory.in_use, 0);
        drop(pool.try_get(4 * MIB).unwrap().expect("it is idle"));
        assert_eq!(source.calls(SourceCall::Acquire), 1, "nothing was done for the request behind it");
    }
}

#[test]
fn a_queued_task_never_pins_on_its_own_thread() {
    let source = faulty_sim();
    let pool = over(source.clone(), 2 << 20).wait(LONG).build().unwrap();
    let _held = pool.get(2 * MIB).unwrap();
    let mut get = pin!(pool.get_async(2 * MIB));
    assert!(poll(get.as_mut(), Waker::noop()).is_pending());
    let gate = source.hold(SourceCall::Acquire);
    pool.set_max_bytes(8 << 20).unwrap();
    assert!(poll(get.as_mut(), Waker::noop()).is_pending());
    gate.wait_for(1);
    assert!(poll(get.as_mut(), Waker::noop()).is_pending());
    drop(gate);
    run(get).unwrap();
    let stats = valid_stats(&pool);
    assert_eq!((stats.requests.waits, stats.requests.failed), (1, 0));
}

#[test]
fn a_pool_that_ends_while_its_thread_pins_memory_releases_that_memory() {
    let source = faulty_sim();
    let pool = over(source.clone(), 64 << 20).build().unwrap();
    let gate = source.hold(SourceCall::Acquire);
    let mut get = Box::pin(pool.get_async(4 * MIB));
    assert!(poll(get.as_mut(), Waker::noop()).is_pending());
    gate.wait_for(1);
    drop((get, pool));
    drop(gate);
    until("it is released", || source.calls(SourceCall::Release) > 0);
}

/// Two tasks fail after `wait`, one in a hanging driver call and one queued behind it. Returns false if they were late
/// before that call.
fn fail_at_their_deadline(preset: Preset, wait: Duration) -> bool {
    let (source, pool) = over_preset(preset);
    let gate = source.hold(SourceCall::Acquire);
    let mut own = pin!(pool.get_async(Request::new(4 * MIB).timeout(wait)));
    let mut behind = pin!(pool.get_async(Request::new(8 * MIB).timeout(wait)));
    let begun = Instant::now();
    let mut is_early = poll(own.as_mut(), Waker::noop()).is_pending();
    while source.calls(SourceCall::Acquire) == 0 && is_early {
        is_early = begun.elapsed() < wait;
        thread::yield_now();
    }
    if !is_early || !poll(behind.as_mut(), Waker::noop()).is_pending() {
        return false;
    }
    // Nothing else wakes the runtime.
    for get in [behind, own] {
        let error = run(get).unwrap_err();
        assert!(error.is_timeout() && error.is_backend() && error.to_string().contains(" did not return "), "{error}");
    }
    assert_eq!(pool.stats().requests.failed, 2);
    drop(gate);
    until("the memory is idle", || pool.stats().memory.idle > 0);
    drop(pool.try_get(4 * MIB).unwrap().expect("the late result serves the next request"));
    assert_eq!((source.calls(SourceCall::Acquire), valid_stats(&pool).memory.in_use), (1, 0));
    true
}

#[test]
fn a_task_fails_at_its_deadline_while_a_driver_call_hangs() {
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let mut waits = [30, 300, 3_000, 30_000].map(Duration::from_millis).into_iter();
        assert!(waits.any(|wait| fail_at_their_deadline(preset, wait)), "late before the first call");
    }
}

#[test]
fn a_task_with_a_hanging_call_falls_back_at_its_deadline() {
    let source = faulty_sim();
    let pool = over(source.clone(), 64 << 20).on_full(OnFull::Pageable).build().unwrap();
    let gate = source.hold(SourceCall::Acquire);
    assert!(run(pool.get_async(Request::new(4 * MIB).timeout(SHORT))).unwrap().pinned_by().is_none());
    drop(gate);
    assert_eq!(pool.stats().requests.failed, 0);
}
