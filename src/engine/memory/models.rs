//! Every interleaving of threads that finish plans, and of those that wait for a completion.
//!
//! loom reports a thread that is never woken as a deadlock.

use std::time::Instant;

use loom::thread;

use super::fixtures::{CountedHeap, NoBlocks, arena};
use super::*;
use crate::arena::ArenaPtr;
use crate::size_class::Rounding;

const BUFFER_BYTES: u64 = 4096;

/// An arena of discrete regions with its source and one pool.
struct Model {
    arena: ArenaSupply,
    source: Arc<CountedHeap>,
}

impl Model {
    fn new(max_bytes: u64) -> Arc<Self> {
        let source = Arc::new(CountedHeap::new(false));
        let arena = arena(source.clone(), "model", Some(max_bytes));
        Arc::new(Self { arena, source })
    }

    fn get(&self) -> Option<(ArenaPtr, u64)> {
        let class = Rounding::Eighths.class(BUFFER_BYTES as usize, BUFFER_BYTES as usize).unwrap();
        let calls = (0, SlowCalls::Until(Instant::now(), Instant::now()));
        match self.arena.find(class, calls, &NoBlocks, &mut || false) {
            Ok(BlockMemory::Carved { ptr, bytes, .. }) => Some((ptr, bytes)),
            refused => {
                assert!(matches!(refused, Err(Stop::Refused(Refusal::QuotaExceeded { .. }))), "{refused:?}");
                None
            }
        }
    }

    fn put(&self, (ptr, bytes): (ArenaPtr, u64)) {
        self.arena.give_carved(ptr, bytes, 0);
    }

    fn release_all(&self) {
        self.arena.release_down_to(0, 0).unwrap();
    }

    fn end(&self) {
        self.arena.close(0);
        assert_eq!(self.source.released(), self.source.acquired(), "all is released when the end returns");
    }
}

/// Runs `other` on another thread while `here` runs, in all interleavings.
fn model(max_buffers: u64, prepare: fn(&Model), other: fn(&Model), here: fn(&Model)) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let model = Model::new(max_buffers * BUFFER_BYTES);
        prepare(&model);
        let beside = model.clone();
        let beside = thread::spawn(move || other(&beside));
        here(&model);
        beside.join().unwrap();
        if model.arena.books().is_unused() {
            assert_eq!(model.source.released(), model.source.acquired());
        } else {
            model.end();
        }
    });
}

fn get_and_put(model: &Model) {
    model.put(model.get().expect("there is room, or there will be"));
}

/// A request without room because of the other thread's buffer is refused once the other's growth is finished.
fn try_get_and_put(model: &Model) {
    model.get().into_iter().for_each(|memory| model.put(memory));
}

/// Fails if a finished growth wakes no thread.
#[test]
fn loom_a_get_that_waits_for_the_growth_of_another_is_woken() {
    model(1, |_| (), try_get_and_put, try_get_and_put);
}

/// Fails if a finished release wakes no thread.
#[test]
fn loom_a_get_that_waits_for_a_release_is_woken_and_has_its_room() {
    model(1, get_and_put, Model::release_all, get_and_put);
}

/// Fails if a finished release wakes no thread, or if the end does not wait for a completion.
#[test]
fn loom_the_end_waits_for_a_release_of_another_thread() {
    model(1, get_and_put, Model::release_all, Model::end);
}
