//! Every interleaving of threads that put, sweep and abandon items in flight.
//!
//! The device reads a cell before its fence is complete, and the thread that gets the item writes to it. So loom
//! reports an item that leaves too early or with too weak an ordering. It reports a thread that is never woken as
//! a deadlock.
#![allow(unsafe_code)] // Implements `Fence`.

use std::sync::Arc;

use loom::thread;
use loom::thread::JoinHandle;

use super::*;
use crate::error::Result;
use pinpool_os::sync::UnsafeCell;
use pinpool_os::sync::atomic::AtomicBool;

/// Memory that a device reads until its fence is complete.
#[derive(Debug)]
pub(crate) struct Copied {
    memory: UnsafeCell<u32>,
    is_complete: AtomicBool,
}

// SAFETY: loom checks the accesses to the cell.
unsafe impl Sync for Copied {}

impl Copied {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { memory: UnsafeCell::new(0), is_complete: AtomicBool::new(false) })
    }

    /// The device ends the copy.
    pub(crate) fn finish(&self) {
        self.memory.with(|_| ());
        // Release, with the Acquire in `is_complete`, as a driver's fence does.
        self.is_complete.store(true, Ordering::Release);
    }

    /// The next user writes.
    pub(crate) fn reuse(&self) {
        self.memory.with_mut(|_| ());
    }
}

// SAFETY: complete only after the read.
unsafe impl Fence for Copied {
    fn is_complete(&self) -> Result<bool> {
        Ok(self.is_complete.load(Ordering::Acquire))
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }

    fn stream_id(&self) -> Option<StreamId> {
        Some(StreamId::from_driver(0, 1))
    }
}

type Items = InFlight<Arc<Copied>>;

fn insert(in_flight: &Items, copied: &Arc<Copied>) {
    in_flight.insert(copied.clone(), 10, std::iter::once(copied.clone() as SharedFence).collect(), 0);
}

/// Reuses the items that a sweep returned, and returns their number.
fn reuse(swept: SweepResult<Arc<Copied>>) -> usize {
    assert!(swept.failed.is_empty());
    swept.completed.iter().for_each(|copied| copied.reuse());
    swept.completed.len()
}

fn spawn<R: 'static>(in_flight: &Arc<Items>, act: impl FnOnce(&Items) -> R + 'static) -> JoinHandle<R> {
    let in_flight = in_flight.clone();
    thread::spawn(move || act(&in_flight))
}

/// Runs all interleavings of `check`. Its answers must be all of `answers` and no other.
fn model(answers: &[usize], check: impl Fn() -> usize + Sync + Send + 'static) {
    let seen = Arc::new(std::sync::Mutex::new(std::collections::BTreeSet::new()));
    let noted = seen.clone();
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let answer = check();
        noted.lock().unwrap().insert(answer);
    });
    assert_eq!(seen.lock().unwrap().iter().copied().collect::<Vec<_>>(), answers);
}

/// Fails if an item leaves before its fence is complete.
#[test]
fn loom_an_item_completes_once_and_after_its_fence() {
    model(&[0, 1], || {
        let (in_flight, copied) = (Arc::new(Items::new()), Copied::new());
        insert(&in_flight, &copied);
        let device = copied.clone();
        let finishing = thread::spawn(move || device.finish());
        let sweeping = spawn(&in_flight, |in_flight| reuse(in_flight.sweep(QueryScope::Undecided)));
        let mine = reuse(in_flight.sweep(QueryScope::Undecided));
        finishing.join().unwrap();
        let early = mine + sweeping.join().unwrap();
        let late = reuse(in_flight.sweep(QueryScope::Undecided));
        assert_eq!((early + late, in_flight.count(), in_flight.bytes()), (1, 0, 0));
        early
    });
}

/// Fails if an item is counted after it can be swept: then the count wraps.
#[test]
fn loom_an_item_that_arrives_during_a_sweep_is_counted_and_completes() {
    model(&[0, 1], || {
        let (in_flight, copied) = (Arc::new(Items::new()), Copied::new());
        copied.finish();
        let arriving = spawn(&in_flight, move |in_flight| insert(in_flight, &copied));
        let early = reuse(in_flight.sweep(QueryScope::Undecided));
        assert!(in_flight.count() <= 1);
        arriving.join().unwrap();
        assert_eq!(early + reuse(in_flight.sweep(QueryScope::Undecided)), 1);
        assert_eq!((in_flight.count(), in_flight.bytes()), (0, 0));
        early
    });
}

/// Ends the flight of all items; returns their number.
fn ended(in_flight: &Items) -> usize {
    let FinalSweep { swept, abandoned, .. } = in_flight.end();
    reuse(swept) + abandoned.len()
}

/// Fails if an item is counted before it can be found: then a pool that ends on the count leaves it behind.
#[test]
fn loom_an_item_that_is_counted_is_found_by_the_end() {
    model(&[0, 1], || {
        let (in_flight, copied) = (Arc::new(Items::new()), Copied::new());
        let arriving = spawn(&in_flight, move |in_flight| insert(in_flight, &copied));
        let counted = if in_flight.count() > 0 { 1 } else { 0 };
        let found = if counted > 0 { ended(&in_flight) } else { 0 };
        assert_eq!(found, counted);
        arriving.join().unwrap();
        assert_eq!(found as u64 + in_flight.count(), 1);
        found
    });
}

/// Fails if a sweep finds an item that was abandoned, or if the item is not counted.
#[test]
fn loom_an_item_is_swept_or_abandoned() {
    model(&[0, 1, 2], || {
        let (in_flight, items) = (Arc::new(Items::new()), [Copied::new(), Copied::new()]);
        items.iter().for_each(|copied| insert(&in_flight, copied));
        items.iter().for_each(|copied| copied.finish());
        let sweeping = spawn(&in_flight, |in_flight| reuse(in_flight.sweep(QueryScope::Undecided)));
        let abandoned = ended(&in_flight);
        let swept = sweeping.join().unwrap();
        assert_eq!((swept + abandoned, in_flight.count(), in_flight.bytes()), (2, 0, 0));
        swept
    });
}

/// Fails if sweeps share a queue and items leave by their position: then one thread learns of the first item and takes
/// the second. Either the exclusive query of a queue or the number of the item prevents that.
#[test]
fn loom_the_end_of_one_item_completes_no_other() {
    model(&[1], || {
        let (in_flight, items) = (Arc::new(Items::new()), [Copied::new(), Copied::new()]);
        items.iter().for_each(|copied| insert(&in_flight, copied));
        items[0].finish();
        let sweeping = spawn(&in_flight, |in_flight| reuse(in_flight.sweep(QueryScope::Undecided)));
        let early = reuse(in_flight.sweep(QueryScope::Undecided)) + sweeping.join().unwrap();
        items[1].finish();
        assert_eq!((reuse(in_flight.sweep(QueryScope::Undecided)), in_flight.count()), (1, 0));
        early
    });
}

/// Fails if items leave by their position: then a sweep that learned of an item takes the item that came after the end.
#[test]
fn loom_a_sweep_takes_nothing_in_place_of_an_abandoned_item() {
    model(&[0, 1], || {
        let (in_flight, items) = (Arc::new(Items::new()), [Copied::new(), Copied::new()]);
        insert(&in_flight, &items[0]);
        items[0].finish();
        let sweeping = spawn(&in_flight, |in_flight| reuse(in_flight.sweep(QueryScope::Undecided)));
        let abandoned = ended(&in_flight);
        insert(&in_flight, &items[1]);
        let swept = sweeping.join().unwrap();
        assert_eq!((swept + abandoned, in_flight.count()), (1, 1));
        swept
    });
}
