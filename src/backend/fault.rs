//! Scripted failures and gates around any source, for tests of whatever stands on one.
//!
//! ```
//! use std::sync::Arc;
//! use pinpool::{backend::HeapSource, testing::FaultSource, Backend};
//!
//! let faulty = Arc::new(FaultSource::around(Arc::new(HeapSource::new())));
//! let builder = pinpool::Pool::builder().without_env().preset(pinpool::Preset::Tensorflow);
//! let pool = builder.backend(Backend::Source(faulty.clone())).build()?;
//! faulty.fail_acquire(0);
//! assert!(pool.get(100).unwrap_err().is_backend());
//! assert!(pool.get(100).is_ok());
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! Of a source that spans the granules are scripted too: locking counts and fails as acquiring, unlocking as releasing,
//! and moving by itself.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory` by passing each call on.

use std::collections::BTreeSet;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{AddressRange, PAGE_BYTES, PageTiers, Region, RemapError, Source, SourceError, Subrange, VirtualMemory};
use crate::sync::plain::{Condvar, Mutex};

/// A source that fails and waits as told, and else passes every call on.
#[derive(Debug)]
pub struct FaultSource {
    inner: Arc<dyn Source>,
    script: Arc<Script>,
}

/// What a call does: an acquire or a lock, a release or an unlock, a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Acquire = 0,
    Release = 1,
    Remap = 2,
}

#[derive(Debug, Default)]
struct Script {
    calls: Mutex<[Plan; 3]>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Plan {
    calls: u64,
    failing: BTreeSet<u64>,
    /// Moves that fail after the old granules are gone.
    losing: BTreeSet<u64>,
    random: Option<Dice>,
    gates: usize,
    waiting: usize,
}

/// A seeded generator (xorshift64), so that a random failure can be repeated.
#[derive(Debug)]
struct Dice {
    state: u64,
    one_in: u64,
}

/// Holds every call of one kind until it is dropped.
#[derive(Debug)]
#[must_use = "the gate opens when it is dropped"]
pub struct CallGate {
    script: Arc<Script>,
    call: Call,
}

impl FaultSource {
    /// Wraps `inner`; does nothing of its own until told to.
    pub fn around(inner: Arc<dyn Source>) -> Self {
        Self { inner, script: Arc::default() }
    }

    /// Fails acquire number `index`, counted from 0 over the life of this source.
    pub fn fail_acquire(&self, index: u64) {
        self.script.calls.lock()[Call::Acquire as usize].failing.insert(index);
    }

    /// Fails release number `index`, counted from 0 over the life of this source. The memory stays mapped.
    pub fn fail_release(&self, index: u64) {
        self.script.calls.lock()[Call::Release as usize].failing.insert(index);
    }

    /// Fails move number `index`, counted from 0 over the life of this source; the granules stay where they are.
    pub fn fail_remap(&self, index: u64) {
        self.script.calls.lock()[Call::Remap as usize].failing.insert(index);
    }

    /// Fails move number `index` half way: the old granules are given back, the new ones not locked.
    pub fn lose_remap(&self, index: u64) {
        self.script.calls.lock()[Call::Remap as usize].losing.insert(index);
    }

    /// Fails one acquire in `one_in` (at least 1), drawn from `seed`.
    pub fn fail_acquires_at_random(&self, seed: u64, one_in: u64) {
        // An xorshift never leaves zero.
        self.script.calls.lock()[Call::Acquire as usize].random = Some(Dice { state: seed | 1, one_in: one_in.max(1) });
    }

    /// Holds every acquire from now on, until the gate is dropped.
    pub fn hold_acquires(&self) -> CallGate {
        self.hold(Call::Acquire)
    }

    /// Holds every release from now on, until the gate is dropped.
    pub fn hold_releases(&self) -> CallGate {
        self.hold(Call::Release)
    }

    /// Holds every move from now on, until the gate is dropped.
    pub fn hold_remaps(&self) -> CallGate {
        self.hold(Call::Remap)
    }

    /// Acquires so far, those that failed included.
    pub fn acquires(&self) -> u64 {
        self.script.calls.lock()[Call::Acquire as usize].calls
    }

    /// Releases so far, those that failed included.
    pub fn releases(&self) -> u64 {
        self.script.calls.lock()[Call::Release as usize].calls
    }

    /// Moves so far, those that failed included.
    pub fn remaps(&self) -> u64 {
        self.script.calls.lock()[Call::Remap as usize].calls
    }

    /// The span of the wrapped source; whoever calls has seen that there is one.
    fn inner_span(&self) -> Result<&dyn VirtualMemory, SourceError> {
        self.inner.virtual_memory().ok_or_else(|| SourceError::new("fault", format!("`{}` does not span", self.name())))
    }

    fn hold(&self, call: Call) -> CallGate {
        self.script.calls.lock()[call as usize].gates += 1;
        CallGate { script: self.script.clone(), call }
    }
}

impl Script {
    /// Waits for the gates of `call`, then says whether it is to fail, and how.
    fn enter(&self, call: Call) -> Result<(), RemapError> {
        let mut calls = self.calls.lock();
        let index = calls[call as usize].calls;
        calls[call as usize].calls += 1;
        calls[call as usize].waiting += 1;
        self.changed.notify_all();
        while calls[call as usize].gates > 0 {
            self.changed.wait(&mut calls);
        }
        let plan = &mut calls[call as usize];
        plan.waiting -= 1;
        let refusal = || SourceError::new("fault", format!("{call:?} {index} was told to fail"));
        if plan.failing.remove(&index) || plan.random.as_mut().is_some_and(Dice::falls) {
            return Err(RemapError::Kept(refusal()));
        }
        if plan.losing.remove(&index) { Err(RemapError::Lost(refusal())) } else { Ok(()) }
    }
}

impl Dice {
    fn falls(&mut self) -> bool {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state.is_multiple_of(self.one_in)
    }
}

impl CallGate {
    /// Waits until `threads` calls stand before the gate.
    pub fn wait_for(&self, threads: usize) {
        let mut calls = self.script.calls.lock();
        while calls[self.call as usize].waiting < threads {
            self.script.changed.wait(&mut calls);
        }
    }
}

impl Drop for CallGate {
    fn drop(&mut self) {
        self.script.calls.lock()[self.call as usize].gates -= 1;
        self.script.changed.notify_all();
    }
}

// SAFETY: every region comes from the wrapped source and goes back to it; a release told to fail leaves the memory as it
// is, which C1 asks for.
#[deny(clippy::missing_trait_methods)]
unsafe impl Source for FaultSource {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn is_pinned(&self) -> bool {
        self.inner.is_pinned()
    }

    fn held_bytes(&self, len_bytes: usize) -> usize {
        self.inner.held_bytes(len_bytes)
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        self.script.enter(Call::Acquire)?;
        self.inner.acquire(len_bytes)
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        self.script.enter(Call::Release)?;
        // SAFETY: the caller's promise, passed on: all regions of this source are the wrapped one's.
        unsafe { self.inner.release(region) }
    }

    fn acquire_fast(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        self.script.enter(Call::Acquire)?;
        self.inner.acquire_fast(len_bytes, threads, progress)
    }

    fn needs_gpu(&self) -> bool {
        self.inner.needs_gpu()
    }

    fn release_waits(&self) -> bool {
        self.inner.release_waits()
    }

    fn numa_node(&self) -> Option<u32> {
        self.inner.numa_node()
    }

    fn page_tiers(&self, start: NonNull<u8>, len_bytes: usize) -> PageTiers {
        self.inner.page_tiers(start, len_bytes)
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.inner.virtual_memory().map(|_| self as &dyn VirtualMemory)
    }
}

// SAFETY: every range comes from the wrapped source and goes back to it, and every call about its granules is passed on
// or fails before anything happened; a lost move has unlocked what it says.
#[deny(clippy::missing_trait_methods)]
unsafe impl VirtualMemory for FaultSource {
    fn granule_bytes(&self) -> usize {
        self.inner.virtual_memory().map_or(PAGE_BYTES, VirtualMemory::granule_bytes)
    }

    fn reserve(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        self.inner_span()?.reserve(len_bytes)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        self.script.enter(Call::Acquire)?;
        // SAFETY: the caller's promise, passed on: all ranges of this source are the wrapped one's.
        unsafe { self.inner_span()?.commit(range, offset, bytes) }
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        self.script.enter(Call::Release)?;
        // SAFETY: as above.
        unsafe { self.inner_span()?.decommit(range, offset, bytes) }
    }

    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        let inner = self.inner_span().map_err(RemapError::Kept)?;
        match self.script.enter(Call::Remap) {
            // SAFETY: as above.
            Ok(()) => unsafe { inner.remap(range, from, to) },
            Err(RemapError::Kept(told)) => Err(RemapError::Kept(told)),
            Err(RemapError::Lost(told)) => {
                for piece in from {
                    // SAFETY: as above.
                    unsafe { inner.decommit(range, piece.offset, piece.bytes) }.map_err(RemapError::Kept)?;
                }
                Err(RemapError::Lost(told))
            }
        }
    }

    unsafe fn unreserve(&self, range: AddressRange) -> Result<(), SourceError> {
        // SAFETY: as above.
        unsafe { self.inner_span()?.unreserve(range) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::suite::check_source;
    use crate::backend::{HeapSource, SimSource};

    fn source() -> FaultSource {
        FaultSource::around(Arc::new(HeapSource::new()))
    }

    #[test]
    fn keeps_the_contract_when_told_nothing() {
        check_source(&source());
    }

    #[test]
    fn fails_the_call_it_was_told_to_and_no_other() {
        let source = source();
        source.fail_acquire(1);
        let region = source.acquire(1).unwrap();
        assert!(source.acquire(1).is_err());
        source.fail_release(0);
        let copy = Region::new(region.start(), region.len_bytes(), region.id());
        // SAFETY: acquired above and unused; the first release is told to fail and gives nothing back.
        assert!(unsafe { source.release(copy) }.is_err());
        // SAFETY: acquired above, unused, and not released by the call that failed.
        assert!(unsafe { source.release(region) }.is_ok());
        assert_eq!((source.acquires(), source.releases()), (2, 2));
    }

    #[test]
    fn a_gate_holds_a_call_until_it_is_dropped() {
        let source = source();
        let gate = source.hold_acquires();
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
    mod of_a_source_that_spans {
        use super::*;

        fn page(offset: usize) -> Subrange {
            Subrange { offset, bytes: PAGE_BYTES }
        }

        /// Locks count as acquires, unlocks as releases; each failure is shown to have changed nothing by what follows.
        #[test]
        fn granules_fail_as_told_and_stay_as_they_were() {
            let source = source();
            let spans = source.virtual_memory().unwrap();
            let range = spans.reserve(2 * PAGE_BYTES).unwrap();
            let start = range.start();
            // SAFETY: locked, moved and unlocked in turn by this test alone.
            let lock = |offset| unsafe { spans.commit(&range, offset, PAGE_BYTES) };
            // SAFETY: as above.
            let unlock = |offset| unsafe { spans.decommit(&range, offset, PAGE_BYTES) };
            // SAFETY: as above.
            let relocate = |from, to| unsafe { spans.remap(&range, &[page(from)], to) };
            source.fail_acquire(0);
            assert!(lock(0).unwrap_err().to_string().contains("Acquire 0"));
            lock(0).unwrap();
            // SAFETY: locked, and ours alone.
            unsafe { start.write(7) };
            source.fail_release(0);
            assert!(unlock(0).unwrap_err().to_string().contains("Release 0"));
            source.fail_remap(0);
            assert!(matches!(relocate(0, PAGE_BYTES), Err(RemapError::Kept(_))));
            // SAFETY: locked still.
            assert_eq!(unsafe { start.read() }, 7);
            relocate(0, PAGE_BYTES).unwrap();
            source.lose_remap(2);
            assert!(matches!(relocate(PAGE_BYTES, 0), Err(RemapError::Lost(_))));
            // Neither is locked now, so both can be.
            lock(0).unwrap();
            lock(PAGE_BYTES).unwrap();
            // SAFETY: locked, and ours alone.
            assert_eq!(unsafe { start.read() }, 0);
            unlock(0).unwrap();
            unlock(PAGE_BYTES).unwrap();
            assert_eq!((source.acquires(), source.releases(), source.remaps()), (4, 3, 3));
            // SAFETY: nothing of it is locked or in use.
            unsafe { spans.unreserve(range) }.unwrap();
        }

        #[test]
        fn a_lost_move_gives_the_granules_back() {
            // Counts what is held, as the heap does not.
            let sim = SimSource::new(PAGE_BYTES as u64);
            let source = FaultSource::around(Arc::new(sim));
            let spans = source.virtual_memory().unwrap();
            let range = spans.reserve(2 * PAGE_BYTES).unwrap();
            source.lose_remap(0);
            // SAFETY: of this range, and not locked.
            unsafe { spans.commit(&range, 0, PAGE_BYTES) }.unwrap();
            // SAFETY: locked above, unused; the other granule is not locked.
            assert!(unsafe { spans.remap(&range, &[page(0)], PAGE_BYTES) }.is_err());
            // SAFETY: lost above, hence not locked.
            unsafe { spans.commit(&range, 0, PAGE_BYTES) }.expect("the one page that there is was given back");
            // SAFETY: locked above, unused.
            unsafe { spans.decommit(&range, 0, PAGE_BYTES) }.unwrap();
            // SAFETY: nothing of it is locked or in use.
            unsafe { spans.unreserve(range) }.unwrap();
        }

        #[test]
        fn a_gate_holds_moves() {
            let source = source();
            let spans = source.virtual_memory().unwrap();
            let range = spans.reserve(2 * PAGE_BYTES).unwrap();
            // SAFETY: of this range, and not locked.
            unsafe { spans.commit(&range, 0, PAGE_BYTES) }.unwrap();
            let gate = source.hold_remaps();
            std::thread::scope(|scope| {
                // SAFETY: locked above, unused; the other granule is not locked.
                let moving = scope.spawn(|| unsafe { spans.remap(&range, &[page(0)], PAGE_BYTES) });
                gate.wait_for(1);
                assert!(!moving.is_finished());
                drop(gate);
                moving.join().unwrap().unwrap();
            });
            // SAFETY: moved there above, unused.
            unsafe { spans.decommit(&range, PAGE_BYTES, PAGE_BYTES) }.unwrap();
            // SAFETY: nothing of it is locked or in use.
            unsafe { spans.unreserve(range) }.unwrap();
        }
    }

    #[test]
    fn around_a_source_with_walls_there_is_no_span() {
        let source = FaultSource::around(Arc::new(SimSource::discrete(1 << 20)));
        assert!(source.virtual_memory().is_none());
        assert!(source.reserve(PAGE_BYTES).unwrap_err().to_string().contains("`sim` does not span"));
    }
}
