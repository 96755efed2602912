//! The sources of `vmm` and `register` over the mock driver: their contract, and that every failing step is undone.
#![allow(unsafe_code)] // Commits, remaps and releases granules by hand.

use std::time::Duration;

use cudarc::driver::CudaContext;
use mock_driver::{Code, MockDriver};
use pinpool::source::{PAGE_BYTES, Source};
use pinpool::unstable::backend::{
    AddressRange, BuiltInSource, CudaSource, RegisterSource, RemapError, Subrange, VirtualMemory, VmmSource,
};
use pinpool::{Backend, Preset};
use pinpool_testing::check_source;

use crate::child::alone;
use crate::fixture::{Held, MIB, builder, held, loaded, on_a_stream};
use crate::valid_stats::valid_stats;

const GRANULE: usize = 2 * MIB;
/// More granules than may stay mapped at their old places.
pub(crate) const RANGE_GRANULES: usize = 800;
const VIRTUAL_HOST_MEMORY: i32 = 141;
const REGISTERS: i32 = 99;

/// An address range of `vmm`. The first granules are committed and filled with one byte value each.
pub(crate) struct VmmRange {
    pub(crate) source: VmmSource,
    range: AddressRange,
}

impl VmmRange {
    pub(crate) fn committed(granules: usize) -> Self {
        let source = VmmSource::new(0, None).unwrap();
        let vmm = Self { range: source.reserve_addresses(RANGE_GRANULES * GRANULE).unwrap(), source };
        vmm.commit(0, granules).unwrap();
        (0..granules).for_each(|granule| vmm.bytes(granule).fill(u8::try_from(granule).unwrap() + 1));
        vmm
    }

    pub(crate) fn commit(&self, first: usize, count: usize) -> Result<(), pinpool::source::SourceError> {
        // SAFETY: each test commits only what is uncommitted.
        unsafe { self.source.commit(&self.range, first * GRANULE, count * GRANULE) }
    }

    pub(crate) fn decommit(&self, first: usize, count: usize) -> Result<(), pinpool::source::SourceError> {
        // SAFETY: each test decommits only what is committed and unused.
        unsafe { self.source.decommit(&self.range, first * GRANULE, count * GRANULE) }
    }

    pub(crate) fn remap(&self, from: usize, to: usize, count: usize) -> Result<(), RemapError> {
        self.gather(&[(from, count)], to)
    }

    fn gather(&self, from: &[(usize, usize)], to: usize) -> Result<(), RemapError> {
        let subrange = |&(first, count)| Subrange { offset: first * GRANULE, bytes: count * GRANULE };
        let from: Vec<_> = from.iter().map(subrange).collect();
        // SAFETY: each test remaps only what is committed and unused, to uncommitted addresses.
        unsafe { self.source.remap(&self.range, &from, to * GRANULE) }
    }

    #[allow(clippy::mut_from_ref)] // Each test uses one slice at a time.
    fn bytes(&self, granule: usize) -> &mut [u8] {
        let start = self.range.at(granule * GRANULE, GRANULE).unwrap();
        // SAFETY: committed, and accessed by one test alone.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), GRANULE) }
    }

    /// Whether these granules hold what `committed` wrote to the first ones.
    fn are_intact(&self, granules: impl IntoIterator<Item = usize>) -> bool {
        (1..).zip(granules).all(|(byte, granule)| self.bytes(granule).iter().all(|&found| found == byte))
    }

    pub(crate) fn end(self) {
        // SAFETY: each test decommits all it committed.
        unsafe { self.source.release_addresses(self.range) }.unwrap();
    }
}

#[test]
fn the_sources_keep_the_contract_and_leave_nothing_behind() {
    let (driver, before) = loaded();
    check_source(&VmmSource::new(0, None).unwrap());
    check_source(&RegisterSource::new(0, None).unwrap());
    check_source(&CudaSource::new(0).unwrap());
    assert_eq!(held(&driver), before);
}

#[test]
fn the_sources_report_the_bytes_that_they_hold() {
    let driver = MockDriver::load();
    let (vmm, register) = (VmmSource::new(0, None).unwrap(), RegisterSource::new(0, None).unwrap());
    let sources: [&dyn Source; 3] = [&vmm, &register, &CudaSource::new(0).unwrap()];
    for source in sources {
        for len in [1, PAGE_BYTES, 100_000, GRANULE - 1, GRANULE, GRANULE + 1] {
            for is_fast in [false, true] {
                let (name, before) = (source.name(), driver.counts().pinned_bytes);
                let region = if is_fast { source.acquire_bulk(len, 2, &|_| {}) } else { source.acquire(len) }.unwrap();
                let expected = if is_fast { source.held_bytes_in_bulk(len) } else { source.held_bytes(len) } as u64;
                assert_eq!(driver.counts().pinned_bytes - before, expected, "{name}, {len} B");
                // SAFETY: acquired above, unused.
                unsafe { source.release(&region) }.unwrap();
            }
        }
    }
}

#[test]
fn a_new_pool_creates_no_context_and_holds_nothing() {
    // If another test had created a context, a trial would enter it.
    alone(|| {
        let (driver, before) = loaded();
        for backend in [Backend::Auto, Backend::Vmm, Backend::Register] {
            let pool = builder(backend).build().unwrap();
            let held = Held { reservations: before.reservations, ..held(&driver) };
            assert_eq!((driver.calls("cuDevicePrimaryCtxRetain"), held), (0, before));
            drop(pool);
        }
        let pool = builder(Backend::Vmm).build().unwrap();
        drop(pool.get(MIB).unwrap());
        assert_eq!(driver.calls("cuDevicePrimaryCtxRetain"), 1);
    });
}

#[test]
fn auto_uses_the_best_backend_and_names_what_is_missing() {
    let driver = MockDriver::load();
    let taken = |preset| builder(Backend::Auto).preset(preset).build().unwrap().stats().backend;
    assert_eq!((taken(Preset::Adaptive), taken(Preset::TensorFlow)), ("vmm", "cuda"));

    driver.set_attribute(VIRTUAL_HOST_MEMORY, 0);
    let error = builder(Backend::Vmm).build().unwrap_err();
    assert!(error.is_backend() && error.to_string().contains("does not support cuMemCreate on the host"), "{error}");
    assert_eq!(taken(Preset::Adaptive), "register");
    driver.set_attribute(REGISTERS, 0);
    let error = builder(Backend::Register).build().unwrap_err();
    assert!(error.is_backend() && error.to_string().contains("does not support cuMemHostRegister"), "{error}");
    assert_eq!(taken(Preset::Adaptive), "cuda");
}

/// Name and call number of each step.
fn each_call<const N: usize>(steps: [(&'static str, u64); N]) -> impl Iterator<Item = (&'static str, u64)> {
    steps.into_iter().flat_map(|(name, count)| (1..=count).map(move |nth| (name, nth)))
}

#[test]
fn a_commit_that_fails_at_any_step_changes_nothing() {
    let driver = MockDriver::load();
    let vmm = VmmRange::committed(2);
    let before = held(&driver);
    for (name, nth) in each_call([("cuMemCreate", 4), ("cuMemMap", 4), ("cuMemSetAccess", 1)]) {
        driver.fail(name, nth, Code::OUT_OF_MEMORY);
        let refusal = vmm.commit(2, 4).unwrap_err().to_string();
        assert!(refusal.contains(name) && refusal.contains("OUT_OF_MEMORY"), "{refusal}");
        assert!(refusal.contains("PINPOOL_MAX_BYTES"), "{refusal}");
        assert_eq!(held(&driver), before, "{name}, call {nth}");
    }
    vmm.commit(2, 4).unwrap();
    assert!(vmm.are_intact(0..2));
    vmm.decommit(0, 6).unwrap();
    vmm.end();
}

#[test]
fn a_decommit_that_fails_leaves_the_granules_committed_and_intact() {
    let driver = MockDriver::load();
    let vmm = VmmRange::committed(4);
    let before = held(&driver);
    driver.fail("cuMemUnmap", 1, Code::UNKNOWN);
    assert!(vmm.decommit(0, 4).is_err());
    assert_eq!(held(&driver), before);
    assert!(vmm.are_intact(0..4));
    let calls = driver.calls("cuMemUnmap");
    vmm.decommit(0, 4).unwrap();
    assert_eq!(driver.calls("cuMemUnmap") - calls, 1, "one call for the run");
    vmm.end();
}

#[test]
fn a_remap_that_cannot_be_undone_leaves_the_granules_in_place() {
    let driver = MockDriver::load();
    let vmm = VmmRange::committed(3);
    let before = held(&driver);
    // Granules already mapped at the new place cannot be unmapped there. They are unmapped before the place is used again.
    driver.fail("cuMemSetAccess", 1, Code::UNKNOWN);
    driver.fail_from("cuMemUnmap", 1, Code::UNKNOWN);
    assert!(matches!(vmm.remap(0, 8, 3).unwrap_err(), RemapError::Kept(_)));
    assert_eq!(driver.counts().mappings, before.mappings + 3);
    assert!(vmm.are_intact(0..3) && vmm.remap(0, 8, 3).is_err() && vmm.commit(10, 1).is_err());
    driver.reset();
    vmm.commit(10, 1).unwrap();
    vmm.decommit(10, 1).unwrap();
    assert_eq!(held(&driver), before);
    assert!(vmm.are_intact(0..3));
    vmm.decommit(0, 3).unwrap();
    vmm.end();
}

#[test]
fn granules_of_several_subranges_are_remapped_together_or_not_at_all() {
    let driver = MockDriver::load();
    let vmm = VmmRange::committed(6);
    let (before, pieces) = (held(&driver), [(4, 2), (0, 1), (2, 1)]);
    for (name, nth) in each_call([("cuMemMap", 4), ("cuMemSetAccess", 1)]) {
        driver.fail(name, nth, Code::UNKNOWN);
        let error = vmm.gather(&pieces, 9).unwrap_err();
        assert!(matches!(error, RemapError::Kept(_)), "{name}, call {nth}: {error}");
        assert_eq!(held(&driver), before, "{name}, call {nth}");
        assert!(vmm.are_intact(0..6), "{name}, call {nth}");
    }
    let set = driver.calls("cuMemSetAccess");
    let unmapped = driver.calls("cuMemUnmap");
    vmm.gather(&pieces, 9).unwrap();
    assert_eq!((driver.calls("cuMemSetAccess") - set, driver.calls("cuMemUnmap") - unmapped), (1, 0));
    assert!(vmm.are_intact([11, 1, 12, 3, 9, 10]));
    vmm.source.unmap_old_places().unwrap();
    assert_eq!((held(&driver), driver.calls("cuMemUnmap") - unmapped), (before, 3), "a call for each piece");
    [(1, 1), (3, 1), (9, 4)].into_iter().for_each(|(first, count)| vmm.decommit(first, count).unwrap());
    vmm.end();
}

#[test]
fn every_call_fails_on_a_lost_device() {
    let driver = MockDriver::load();
    let vmm = VmmRange::committed(2);
    driver.lose_device(Code::LAUNCH_FAILED);
    for refusal in [vmm.commit(2, 1), vmm.decommit(0, 1), vmm.remap(0, 4, 1).map_err(Into::into)] {
        assert!(refusal.unwrap_err().to_string().contains("LAUNCH_FAILED"));
    }
    assert!(vmm.are_intact(0..2), "still mapped");
    let pool = builder(Backend::Register).wait(Duration::ZERO).build().unwrap();
    assert!(pool.get(MIB).unwrap_err().is_backend());
    driver.reset();
    vmm.decommit(0, 2).unwrap();
    vmm.end();
}

#[test]
fn with_zero_fresh_and_reused_memory_is_zero() {
    let adaptive = [Backend::Vmm, Backend::Register, Backend::Cuda].map(|backend| (Preset::Adaptive, backend));
    for (preset, backend) in adaptive.into_iter().chain([(Preset::TensorFlow, Backend::Cuda)]) {
        let (_driver, stream, mut memory) = on_a_stream(10_000);
        let pool = builder(backend.clone()).preset(preset).zero(true).pool_size_limit(2).build().unwrap();
        for round in 0..6 {
            for len in [10_000, 100_000 + round * 9_000, 3 * MIB] {
                let mut buf = pool.get(len).unwrap();
                let bytes = buf.wait_slice_mut().unwrap();
                assert!(bytes.iter().all(|&byte| byte == 0), "{} {len}", backend.name());
                bytes.fill(0xAB);
                if len == 10_000 {
                    buf.copy_to(&stream, &mut memory).unwrap();
                }
            }
        }
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![0xAB; 10_000], "not zeroed before the copy");
        pool.maintain();
        valid_stats(&pool);
    }
}

#[test]
fn memory_of_an_unfinished_trial_is_never_released() {
    let driver = MockDriver::load();
    // With a context, the trial of `vmm` copies.
    let context = CudaContext::new(0).unwrap();
    let before = held(&driver);
    driver.fail_from("cuStreamSynchronize", 1, Code::UNKNOWN);
    let error = builder(Backend::Vmm).build().unwrap_err().to_string();
    assert!(error.contains("cuStreamSynchronize"), "{error}");
    let kept = held(&driver);
    assert_eq!((kept.granules, kept.mappings), (before.granules + 1, before.mappings + 1));
    driver.reset();
    drop(builder(Backend::Vmm).build().unwrap());
    assert_eq!(held(&driver), kept);
    drop(context);
}
