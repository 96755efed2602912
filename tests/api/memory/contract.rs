//! The contract of the backends without a driver, and the choice of one.
#![allow(unsafe_code)] // Releases memory.

use std::ptr::NonNull;
use std::sync::Mutex;

use pinpool::source::{HeapSource, Retry, Source, SourceError};
use pinpool::unstable::backend::{AddressRange, BuiltInSource, RANGE_ALIGN_BYTES, Subrange, VirtualMemory};
use pinpool::{Backend, Pool, Preset};
use pinpool_replay::SimSource;
use pinpool_testing::check_source;

#[test]
fn every_source_keeps_the_contract() {
    check_source(&HeapSource::new());
    check_source(&HeapSource::locked());
    check_source(&SimSource::new(SimSource::DEFAULT_TOTAL_BYTES));
    let separate = SimSource::separate_regions(SimSource::DEFAULT_TOTAL_BYTES);
    check_source(&separate);
    assert!(separate.virtual_memory().is_none() && HeapSource::new().pinned_by().is_none());
}

#[test]
fn addresses_outside_a_range_are_refused() {
    let start = NonNull::new(std::ptr::without_provenance_mut(RANGE_ALIGN_BYTES)).unwrap();
    let range = AddressRange::new(start, 8192);
    assert_eq!(range.at(0, 8192).unwrap(), start);
    for (offset, bytes) in [(0, 8193), (4096, 4097), (8193, 0), (usize::MAX, 2)] {
        let error = range.at(offset, bytes).unwrap_err().with_retry(Retry::Never);
        assert_eq!((error.call(), error.retry()), ("range", Retry::Never));
        let refusal = error.to_string();
        assert!(refusal.contains(&format!("{bytes} bytes at {offset} are not inside a range of 8192")), "{refusal}");
    }
}

/// Records the steps of a remap.
#[derive(Debug, Default)]
struct Steps(Mutex<Vec<&'static str>>);

// SAFETY: this implementation has no memory.
unsafe impl VirtualMemory for Steps {
    fn reserve_addresses(&self, _: usize) -> Result<AddressRange, SourceError> {
        unreachable!("no range is needed")
    }

    unsafe fn commit(&self, _: &AddressRange, _: usize, _: usize) -> Result<(), SourceError> {
        self.0.lock().unwrap().push("commit");
        Ok(())
    }

    unsafe fn decommit(&self, _: &AddressRange, _: usize, _: usize) -> Result<(), SourceError> {
        self.0.lock().unwrap().push("decommit");
        Ok(())
    }

    unsafe fn release_addresses(&self, _: AddressRange) -> Result<(), SourceError> {
        unreachable!("no range is reserved")
    }
}

#[test]
fn a_remap_holds_no_more_than_before_at_any_time() {
    let start = NonNull::new(std::ptr::without_provenance_mut(RANGE_ALIGN_BYTES)).unwrap();
    let (steps, range) = (Steps::default(), AddressRange::new(start, 8192));
    // SAFETY: there is no memory.
    unsafe { steps.remap(&range, &[Subrange { offset: 0, bytes: 4096 }], 4096) }.unwrap();
    assert_eq!(*steps.0.lock().unwrap(), ["decommit", "commit"]);
}

#[test]
fn a_requested_source_is_used() {
    for backend in
        [Backend::Mlock, Backend::Heap, Backend::Source(std::sync::Arc::new(pinpool_replay::SimSource::new(1 << 20)))]
    {
        let pool = Pool::builder().without_env().backend(backend.clone()).build().unwrap();
        assert_eq!(pool.stats().backend, backend.name());
    }
}

#[test]
fn a_source_for_arenas_is_refused_without_one() {
    for backend in [Backend::Vmm, Backend::Register] {
        let builder = Pool::builder().without_env().preset(Preset::TensorFlow);
        let error = builder.backend(backend.clone()).build().unwrap_err();
        assert!(error.is_setting(), "{error}");
        for word in [backend.name(), "PINPOOL_BACKEND", "PINPOOL_PRESET=adaptive"] {
            assert!(error.to_string().contains(word), "{error}");
        }
    }
}

#[cfg(not(feature = "cuda"))]
#[test]
fn cuda_without_its_feature_is_an_error_that_names_the_feature() {
    let error = Pool::builder().without_env().backend(Backend::Cuda).build().unwrap_err();
    assert!(error.is_backend() && error.to_string().contains("feature"), "{error}");
}
