//! Scripted failures and gates around a source, which the other tests rely on.
#![allow(unsafe_code)] // Commits and releases memory.

use std::sync::Arc;

use pinpool::source::{PAGE_BYTES, Region, Source};
use pinpool::unstable::backend::{HeapSource, RemapError, Subrange, VirtualMemory};
use pinpool_replay::SimSource;
#[cfg(not(miri))]
use pinpool_testing::{FaultSource, SourceCall, check_source};

fn source() -> FaultSource {
    FaultSource::around(Arc::new(HeapSource::new()))
}

#[test]
fn keeps_the_contract_without_a_script() {
    check_source(&source());
}

#[test]
fn fails_the_scripted_call_and_no_other() {
    let source = source();
    source.fail(SourceCall::Acquire, 1);
    let region = source.acquire(1).unwrap();
    assert!(source.acquire(1).is_err());
    source.fail(SourceCall::Release, 0);
    let copy = Region::new(region.start(), region.len_bytes(), region.id());
    // SAFETY: acquired above and unused; the first release fails by script and returns nothing.
    assert!(unsafe { source.release(copy) }.is_err());
    // SAFETY: acquired above, unused, and not released by the call that failed.
    assert!(unsafe { source.release(region) }.is_ok());
    assert_eq!((source.calls(SourceCall::Acquire), source.calls(SourceCall::Release)), (2, 2));
}

#[test]
fn a_gate_holds_a_call_until_it_is_dropped() {
    let source = source();
    let gate = source.hold(SourceCall::Acquire);
    std::thread::scope(|scope| {
        let acquiring = scope.spawn(|| source.acquire(1).unwrap());
        gate.wait_for(1);
        assert!(!acquiring.is_finished());
        drop(gate);
        let region = acquiring.join().unwrap();
        // SAFETY: acquired by the thread just joined, unused.
        unsafe { source.release(region) }.unwrap();
    });
}

#[cfg(not(miri))]
mod with_virtual_memory {
    use super::*;

    fn page(offset: usize) -> Subrange {
        Subrange { offset, bytes: PAGE_BYTES }
    }

    /// Each call after a failure shows that the failure changed nothing.
    #[test]
    fn commits_decommits_and_remaps_fail_as_scripted() {
        let source = source();
        let memory = source.virtual_memory().unwrap();
        let range = memory.reserve(2 * PAGE_BYTES).unwrap();
        let start = range.start();
        // SAFETY: committed, remapped and decommitted in turn by this test alone.
        let commit = |offset| unsafe { memory.commit(&range, offset, PAGE_BYTES) };
        // SAFETY: as above.
        let decommit = |offset| unsafe { memory.decommit(&range, offset, PAGE_BYTES) };
        // SAFETY: as above.
        let remap = |from, to| unsafe { memory.remap(&range, &[page(from)], to) };
        source.fail(SourceCall::Acquire, 0);
        assert!(commit(0).unwrap_err().to_string().contains("Acquire 0"));
        commit(0).unwrap();
        // SAFETY: committed, and used by this test alone.
        unsafe { start.write(7) };
        source.fail(SourceCall::Release, 0);
        assert!(decommit(0).unwrap_err().to_string().contains("Release 0"));
        source.fail(SourceCall::Remap, 0);
        assert!(matches!(remap(0, PAGE_BYTES), Err(RemapError::Kept(_))));
        // SAFETY: still committed.
        assert_eq!(unsafe { start.read() }, 7);
        remap(0, PAGE_BYTES).unwrap();
        source.lose_remap(2);
        assert!(matches!(remap(PAGE_BYTES, 0), Err(RemapError::Lost(_))));
        // Neither is committed now, so both can be.
        commit(0).unwrap();
        commit(PAGE_BYTES).unwrap();
        // SAFETY: committed, and used by this test alone.
        assert_eq!(unsafe { start.read() }, 0);
        decommit(0).unwrap();
        decommit(PAGE_BYTES).unwrap();
        assert_eq!(
            (source.calls(SourceCall::Acquire), source.calls(SourceCall::Release), source.calls(SourceCall::Remap)),
            (4, 3, 3)
        );
        // SAFETY: nothing of it is committed or in use.
        unsafe { memory.unreserve(range) }.unwrap();
    }

    #[test]
    fn a_lost_remap_decommits_the_granules() {
        // Counts the bytes that it holds, unlike the heap.
        let sim = SimSource::new(PAGE_BYTES as u64);
        let source = FaultSource::around(Arc::new(sim));
        let memory = source.virtual_memory().unwrap();
        let range = memory.reserve(2 * PAGE_BYTES).unwrap();
        source.lose_remap(0);
        // SAFETY: of this range, and not committed.
        unsafe { memory.commit(&range, 0, PAGE_BYTES) }.unwrap();
        // SAFETY: committed above, unused; the other granule is not committed.
        assert!(unsafe { memory.remap(&range, &[page(0)], PAGE_BYTES) }.is_err());
        // SAFETY: lost above, hence not committed.
        unsafe { memory.commit(&range, 0, PAGE_BYTES) }.expect("the only page was returned");
        // SAFETY: committed above, unused.
        unsafe { memory.decommit(&range, 0, PAGE_BYTES) }.unwrap();
        // SAFETY: nothing of it is committed or in use.
        unsafe { memory.unreserve(range) }.unwrap();
    }

    #[test]
    fn a_gate_holds_remaps() {
        let source = source();
        let memory = source.virtual_memory().unwrap();
        let range = memory.reserve(2 * PAGE_BYTES).unwrap();
        // SAFETY: of this range, and not committed.
        unsafe { memory.commit(&range, 0, PAGE_BYTES) }.unwrap();
        let gate = source.hold(SourceCall::Remap);
        std::thread::scope(|scope| {
            // SAFETY: committed above, unused; the other granule is not committed.
            let remapping = scope.spawn(|| unsafe { memory.remap(&range, &[page(0)], PAGE_BYTES) });
            gate.wait_for(1);
            assert!(!remapping.is_finished());
            drop(gate);
            remapping.join().unwrap().unwrap();
        });
        // SAFETY: remapped there above, unused.
        unsafe { memory.decommit(&range, PAGE_BYTES, PAGE_BYTES) }.unwrap();
        // SAFETY: nothing of it is committed or in use.
        unsafe { memory.unreserve(range) }.unwrap();
    }
}

#[test]
fn a_discrete_source_stays_without_virtual_memory() {
    let source = FaultSource::around(Arc::new(SimSource::discrete(1 << 20)));
    assert!(source.virtual_memory().is_none());
    assert!(source.reserve(PAGE_BYTES).unwrap_err().to_string().contains("`sim` has no virtual memory"));
}
