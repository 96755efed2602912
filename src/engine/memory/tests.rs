//! The end of a arena.

use std::sync::atomic::AtomicU64;
use std::time::Instant;

use super::fixtures::{CountedHeap, NoBlocks, arena};
use super::*;
use crate::size_class::Rounding;
use pinpool_os::sync::process::Ordering;

static LEFT_PINNED: AtomicU64 = AtomicU64::new(0);

/// Counts the lines about memory that stays. No other test of this binary has a logger.
struct CountingLog;

impl log::Log for CountingLog {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }
    fn log(&self, record: &log::Record<'_>) {
        let is_ours = record.args().to_string().starts_with("[closing test] closing: ");
        LEFT_PINNED.fetch_add(u64::from(is_ours), Ordering::Relaxed);
    }
    fn flush(&self) {}
}

#[test]
#[cfg_attr(miri, ignore = "leaves memory on purpose, which Miri calls a leak")]
fn memory_is_said_to_stay_only_if_it_does() {
    let _ = log::set_logger(&CountingLog).map(|()| log::set_max_level(log::LevelFilter::Error));
    for is_leaked in [false, true] {
        let source = Arc::new(CountedHeap::new(true));
        let arena = arena(source.clone(), "closing test", None);
        let class = Rounding::Eighths.class(4096, 4096).unwrap();
        let calls = (0, SlowCalls::Until(Instant::now(), Instant::now()));
        let found = arena.find(class, calls, &NoBlocks, &mut || false).unwrap();
        let BlockMemory::Carved { ptr, bytes, .. } = found else { panic!("carved") };
        if is_leaked {
            arena.count_quarantined();
        }
        // The pool closes before its last block comes back.
        arena.close(0);
        if is_leaked {
            assert_eq!((LEFT_PINNED.load(Ordering::Relaxed), source.released()), (1, 0));
        } else {
            arena.give_carved(ptr, bytes, 0);
            assert_eq!((LEFT_PINNED.load(Ordering::Relaxed), source.released()), (0, 1));
        }
    }
}
