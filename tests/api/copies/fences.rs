//! Custom fences: a fence that blocks, panics or calls the pool stops neither the pool nor other threads.
#![allow(unsafe_code)] // Implements the unsafe traits of copies.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::captured_log::{count, lines, listen};
use crate::fixture::{MIB, heap};
use crate::until::in_time;
use crate::valid_stats::valid_stats;
use pinpool::copy::{CopyStream, Fence};
use pinpool::stats::ClassStats;
use pinpool::{Error, PoolBuilder, Result, Stats};

/// Pools that query fences only in calls that a test makes.
fn builder() -> PoolBuilder {
    heap().maintenance_thread(false)
}

type Answer = dyn Fn() -> Result<bool> + Send + Sync;

/// A fence that calls a closure for each query.
struct ActingFence {
    answer: Box<Answer>,
    on_drop: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for ActingFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ActingFence")
    }
}

// SAFETY: the fence guards no copy.
unsafe impl Fence for ActingFence {
    fn is_complete(&self) -> Result<bool> {
        (self.answer)()
    }

    fn wait(&self) -> Result<()> {
        while !self.is_complete()? {
            thread::yield_now();
        }
        Ok(())
    }
}

impl Drop for ActingFence {
    fn drop(&mut self) {
        (self.on_drop)();
    }
}

/// A stream that returns the fence or error that it was given, and panics without one.
struct Marking(Option<Result<Arc<dyn Fence>>>);

// SAFETY: the stream has no work.
unsafe impl CopyStream for Marking {
    fn record_fence(&self) -> Result<Arc<dyn Fence>> {
        self.0.clone().expect("a stream of the user")
    }
}

/// A stream with a fence that calls `answer` for each query.
fn answering(answer: impl Fn() -> Result<bool> + Send + Sync + 'static) -> Marking {
    Marking(Some(Ok(Arc::new(ActingFence { answer: Box::new(answer), on_drop: Box::new(|| ()) }))))
}

/// Returns a stream with a fence that blocks until the sender is dropped. The receiver learns when a thread enters the fence.
fn blocking() -> (Marking, Receiver<()>, Sender<()>) {
    let ((enter, entered), (open, opened)) = (mpsc::channel(), mpsc::channel());
    let opened = Mutex::new(opened);
    let fence = answering(move || {
        // No one receives the second entry.
        let _ = enter.send(());
        assert!(opened.lock().unwrap().recv().is_err(), "nothing is sent");
        Ok(true)
    });
    (fence, entered, open)
}

#[test]
fn a_blocking_fence_delays_only_its_own_stream() {
    let pool = builder().max_bytes(2 << 20).wait(Duration::from_millis(20)).build().unwrap();
    let (fence, entered, open) = blocking();
    pool.get(MIB).unwrap().release_after(&fence).unwrap();
    let maintained = pool.clone();
    let blocked = thread::spawn(move || maintained.maintain());
    entered.recv().unwrap();
    in_time(move || {
        let stats = pool.stats();
        assert_eq!((stats.copies.in_flight, stats.copies.in_flight_bytes), (1, 1 << 20));
        assert!(stats.copies.oldest_age.is_some());
        let held = pool.get(MIB).unwrap();
        assert!(pool.get(MIB).unwrap_err().is_limit());
        held.release_after(&answering(|| Ok(true))).unwrap();
        drop(pool.get(MIB).unwrap());
        pool.maintain();
        pool.trim(0);
        assert_eq!(pool.stats().copies.in_flight, 1, "the copy of the other stream is over");
    });
    drop(open);
    blocked.join().unwrap();
}

#[test]
fn the_end_of_a_pool_does_not_wait_for_a_thread_in_a_fence() {
    let builder = builder().unstable_settings(|only| only.copies_wait = Some(Duration::from_millis(50)));
    let pool = builder.maintenance_thread(true).build().unwrap();
    let (fence, entered, open) = blocking();
    pool.get(MIB).unwrap().release_after(&fence).unwrap();
    in_time(move || {
        // Waits until the maintenance thread is in the fence.
        entered.recv().unwrap();
        drop(pool);
    });
    drop(open);
}

#[test]
fn a_fence_that_fails_takes_its_own_buffer_out_of_use_and_no_other() {
    listen();
    let pool = builder().build().unwrap();
    let has_failed = Arc::new(AtomicBool::new(true));
    let failing = || {
        let has_failed = has_failed.clone();
        answering(move || if has_failed.load(Ordering::SeqCst) { Err(Error::device_failed("busy")) } else { Ok(true) })
    };
    (0..2).for_each(|_| pool.get(MIB).unwrap().release_after(&failing()).unwrap());
    pool.maintain();
    assert!(pool.get(MIB).unwrap().release_after(&Marking(None)).unwrap_err().error().is_device_failed());
    let lines = lines();
    assert_eq!(["until the device responds", "never reused"].map(|text| count(&lines, text)), [2, 1], "{lines:#?}");
    pool.get(MIB).unwrap().release_after(&answering(|| panic!("a fence of the user"))).unwrap();
    pool.get(MIB).unwrap().release_after(&answering(|| Ok(true))).unwrap();
    let other = pool.clone();
    in_time(move || other.maintain());
    let Stats { memory, copies, .. } = valid_stats(&pool);
    assert_eq!((memory.quarantined, copies.in_flight, memory.in_use, memory.idle), (4, 0, 0, 1));
    let columns = |row: ClassStats| [row.buffers, row.in_use, row.in_flight, row.idle, row.quarantined];
    assert_eq!(columns(pool.class_stats()[0]), [1, 0, 0, 1, 4]);
    has_failed.store(false, Ordering::SeqCst);
    pool.maintain();
    assert_eq!(columns(pool.class_stats()[0]), [3, 0, 0, 3, 2]);
}

#[test]
fn a_custom_stream_can_return_each_documented_error() {
    type Predicate = fn(&Error) -> bool;
    let pool = builder().build().unwrap();
    let errors: [(Error, Predicate, &str); 4] = [
        (Error::capturing_stream(), Error::is_capturing_stream, "the stream is capturing a graph"),
        (Error::invalid_handle("no stream 7"), Error::is_invalid_handle, "invalid stream or event: no stream 7"),
        (Error::unavailable("the driver", "no card"), Error::is_unavailable, "the driver is unavailable: no card"),
        (Error::device_failed("reset"), Error::is_device_failed, "device failure: reset"),
    ];
    for (leaked, (error, is_documented, text)) in (1..).zip(errors) {
        let stream = Marking(Some(Err(error)));
        let refused = pool.get(MIB).unwrap().release_after(&stream).unwrap_err();
        assert!(is_documented(refused.error()) && refused.to_string().starts_with(text), "{refused:?}");
        drop(refused.into_buf().expect("for another attempt"));
        assert_eq!(pool.stats().memory.idle, 1, "{text}");
        drop(pool.get(MIB).unwrap().release_after(&stream).unwrap_err());
        let mut recorded = pool.get(MIB).unwrap();
        assert!(is_documented(&recorded.record_stream(&stream).unwrap_err()));
        recorded.record_stream(&answering(|| Ok(true))).unwrap();
        assert!(recorded.wait().unwrap_err().is_device_failed(), "{text}: a later fence does not cover the work");
        drop(recorded);
        pool.maintain();
        assert_eq!((pool.stats().memory.idle, pool.stats().memory.quarantined), (0, 2 * leaked), "{text}");
    }
    assert_eq!((pool.class_stats()[0].buffers, pool.class_stats()[0].quarantined), (0, 8), "leaked ones, too");
}

#[test]
fn a_fence_may_use_its_pool() {
    let pool = builder().max_bytes(8 << 20).wait(Duration::from_millis(5)).build().unwrap();
    let is_inside = Arc::new(AtomicBool::new(false));
    let (inner, entered) = (pool.clone(), is_inside.clone());
    let act = move || {
        // The calls below may query this fence again.
        if !entered.swap(true, Ordering::SeqCst) {
            assert!(inner.stats().copies.in_flight >= 1);
            drop(inner.get(MIB).unwrap());
            inner.get(MIB).unwrap().release_after(&answering(|| Ok(true))).unwrap();
            assert!(inner.get(16 * MIB).is_err());
            inner.maintain();
            inner.trim(0);
        }
        Ok(true)
    };
    let (drops, dropping) = (pool.clone(), Arc::new(AtomicBool::new(false)));
    let was_dropped = dropping.clone();
    let on_drop = move || {
        let _stats = drops.stats();
        drop(drops.get(MIB).unwrap());
        drops.maintain();
        dropping.store(true, Ordering::SeqCst);
    };
    let fence = Arc::new(ActingFence { answer: Box::new(act), on_drop: Box::new(on_drop) });
    pool.get(MIB).unwrap().release_after(&Marking(Some(Ok(fence)))).unwrap();
    let other = pool.clone();
    in_time(move || other.maintain());
    pool.maintain();
    assert!(is_inside.load(Ordering::SeqCst) && was_dropped.load(Ordering::SeqCst));
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.quarantined), (0, 0));
}
