//! The end of a arena.

use std::time::Instant;

use super::fixtures::{CountedHeap, NoBlocks, arena};
use super::*;
use crate::diag::captured;
use crate::size_class::Rounding;

#[test]
#[cfg_attr(miri, ignore = "leaves memory on purpose, which Miri calls a leak")]
fn memory_is_said_to_stay_only_if_it_does() {
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
        // The pool closes before its last block returns.
        let mut lines = captured::lines_of(|| arena.close(0));
        lines.retain(|line| line.text.contains("close_failed: memory stays pinned"));
        if is_leaked {
            assert_eq!((lines.len(), source.released()), (1, 0));
        } else {
            arena.give_carved(ptr, bytes, 0);
            assert_eq!((lines.len(), source.released()), (0, 1));
        }
    }
}
