//! A pool without idle blocks, threads that finish and await plans, and the end of an arena.

use std::path::Path;
use std::sync::Arc;

use super::PoolView;
use crate::arena::Retention;
use crate::backend::HugeTlb;
use crate::backend::tests::CountedHeap;
use crate::engine::memory::{ArenaSettings, ArenaSupply, MeteredSource};
use crate::quota::Budget;
use crate::report::PoolLog;
use crate::stats::EvictionReason;

/// A pool without idle blocks.
#[derive(Default)]
struct NoBlocks;

impl PoolView for NoBlocks {
    fn idle_buffer_bytes(&self) -> u64 {
        0
    }
    fn idle_buffers(&self) -> u64 {
        0
    }
    fn give_oldest(&self, _: EvictionReason) -> bool {
        false
    }
    fn sweep_in_flight(&self) {}
    fn has_copies(&self) -> bool {
        false
    }
    fn waiting_bytes(&self) -> Vec<u64> {
        Vec::new()
    }
    fn now_us(&self) -> u64 {
        0
    }
    fn on_room_made(&self) {}
}

/// An arena over this source, with or without a limit.
fn arena(source: Arc<CountedHeap>, name: &str, max_bytes: Option<u64>) -> ArenaSupply {
    let log = PoolLog { name: Some(name.to_owned()), ..PoolLog::default() };
    let (log, claim) = (Arc::new(log), Budget::new(max_bytes).empty_claim());
    let (hugetlb, retention) = (HugeTlb::Off, Retention::default());
    let config = ArenaSettings { may_grow: true, pin_threads: 1, hugetlb, retention };
    ArenaSupply::new(MeteredSource::new(source, None), claim, config, log, Some(Path::new("/dev/null"))).unwrap()
}

/// Every interleaving of threads that finish plans and threads that wait for a plan to finish. loom reports a thread
/// that is never woken as a deadlock.
#[cfg(pinpool_loom)]
mod models {
    use std::time::{Duration, Instant};

    use loom::thread;

    use super::super::*;
    use super::{CountedHeap, NoBlocks, arena};
    use crate::size_class::Rounding;

    const BUFFER_BYTES: u64 = 4096;

    /// An arena of separate regions with its source and one pool.
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

        fn get(&self) -> Option<BlockMemory> {
            let class = Rounding::Eighths.class(BUFFER_BYTES as usize, BUFFER_BYTES as usize).unwrap();
            let rules = Rules { counts_miss: true, ..Rules::retry(Instant::now() + Duration::from_secs(60)) };
            self.arena.find(class, 0, rules, &NoBlocks, &|| false).unwrap_or_else(|refused| {
                assert!(matches!(refused, AttemptError::Refused(Refusal::Limit(_))), "{refused:?}");
                None
            })
        }

        fn put(&self, memory: BlockMemory) {
            self.arena.give(memory, 0, true);
        }

        fn release_all(&self) {
            self.arena.release(0, |state| state.arena.release_down_to(0)).unwrap();
        }

        fn end(&self) {
            self.arena.end(0);
            assert_eq!(self.source.held(), 0, "all memory is released when `end` returns");
        }
    }

    /// Runs `other` on another thread while `here` runs, in all interleavings.
    fn model(max_buffers: u64, prepare: fn(&Model), other: fn(&Model), here: fn(&Model)) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let model = Model::new(max_buffers * BUFFER_BYTES);
            prepare(&model);
            let concurrent = model.clone();
            let concurrent = thread::spawn(move || other(&concurrent));
            here(&model);
            concurrent.join().unwrap();
            if model.arena.state().is_unused() {
                assert_eq!(model.source.held(), 0);
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
    fn loom_a_request_that_waits_for_the_growth_of_another_is_woken() {
        model(1, |_| (), try_get_and_put, try_get_and_put);
    }

    /// Fails if a finished release wakes no thread.
    #[test]
    fn loom_a_request_that_waits_for_a_release_is_woken_and_has_its_room() {
        model(1, get_and_put, Model::release_all, get_and_put);
    }

    /// Fails if a finished release wakes no thread, or if the end does not wait for a completion.
    #[test]
    fn loom_the_end_waits_for_a_release_of_another_thread() {
        model(1, get_and_put, Model::release_all, Model::end);
    }
}

/// The end of an arena.
#[cfg(not(pinpool_loom))]
mod end {
    use std::time::Instant;

    use super::super::*;
    use super::{CountedHeap, NoBlocks, arena};
    use crate::report::captured;
    use crate::size_class::Rounding;

    #[test]
    #[cfg_attr(miri, ignore = "leaves memory on purpose, which Miri calls a leak")]
    fn memory_is_said_to_stay_only_if_it_does() {
        for is_leaked in [false, true] {
            let source = Arc::new(CountedHeap::new(true));
            let arena = arena(source.clone(), "ending test", None);
            let class = Rounding::Eighths.class(4096, 4096).unwrap();
            let found = arena.find(class, 0, Rules::retry(Instant::now()), &NoBlocks, &|| false).unwrap().unwrap();
            if is_leaked {
                arena.quarantined.add(1);
            }
            // The pool ends before its last block returns.
            let mut lines = captured::lines_of(|| arena.end(0));
            lines.retain(|line| line.text.contains("end_"));
            if is_leaked {
                assert_eq!((lines.len(), source.held()), (1, 1));
            } else {
                arena.give(found, 0, true);
                assert_eq!((lines.len(), source.held()), (0, 0));
            }
        }
    }
}
