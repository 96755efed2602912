//! Tests a source: acquires a little memory, copies a word from it to the device and back, and releases it.
#![allow(unsafe_code)] // Releases the memory that it takes.

use std::time::{Duration, Instant};

use super::source::Source;
use crate::error::{Retry, SourceError};
use crate::report::Finding;
use pinpool_os::host::{GRANULE_BYTES, PAGE_BYTES};

/// The result of a trial.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Trial {
    /// Acquired bytes: at most 2 MiB.
    pub bytes: usize,
    /// Time to acquire them.
    pub took: Duration,
    /// Why no test copy was made, if the device had no memory for it. In that case it is unknown whether copies work.
    pub untested: Option<SourceError>,
}

/// Tests `source` as [`Backend::Auto`](crate::Backend::Auto) does: takes at most 2 MiB and releases them. If a driver
/// pins the memory, creates a context on the device with this ordinal and copies from the memory. Returns `None` if a
/// stream capture forbids the calls; the result is then unknown.
///
/// ```
/// use pinpool::{source::HeapSource, unstable::backend::try_out};
///
/// let trial = try_out(&HeapSource::new(), 0)?.expect("no stream is capturing");
/// assert_eq!(trial.bytes, 2 << 20);
/// # Ok::<(), pinpool::source::SourceError>(())
/// ```
///
/// A driver may terminate the process, so a program that must survive should call this function in a separate process.
///
/// # Errors
///
/// The first call that the driver or the kernel refused.
pub fn try_out(source: &dyn Source, device: u32) -> Result<Option<Trial>, SourceError> {
    run(source, source.needs_gpu().then_some(device), None)
}

/// Tests `source` with at most `max_bytes`, and with a copy by `gpu` if one is passed. Returns `None` if the limit leaves no room
/// or a stream capture forbids the calls.
pub(super) fn run(source: &dyn Source, gpu: Option<u32>, max_bytes: Option<u64>) -> Result<Option<Trial>, SourceError> {
    let limit = max_bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(usize::MAX);
    let most = GRANULE_BYTES.min(limit / PAGE_BYTES * PAGE_BYTES);
    // A source may hold one page more than the region has.
    let fits = |&bytes: &usize| bytes > 0 && source.held_bytes(bytes) <= limit;
    let Some(bytes) = [most, most.saturating_sub(PAGE_BYTES)].into_iter().find(fits) else { return Ok(None) };
    match try_bytes(source, gpu, bytes) {
        // A stream is capturing a graph, which forbids the calls.
        Err(error) if error.retry == Retry::Soon && error.code().is_some() => Ok(None),
        taken => taken.map(Some),
    }
}

fn try_bytes(source: &dyn Source, device: Option<u32>, bytes: usize) -> Result<Trial, SourceError> {
    let begun = Instant::now();
    let region = source.acquire(bytes)?;
    let took = begun.elapsed();
    #[cfg(feature = "cuda")]
    // SAFETY: acquired above, and longer than two words.
    let copied = device.map_or(Ok(None), |device| unsafe { super::word_copy::check(device, region.start()) });
    #[cfg(not(feature = "cuda"))]
    let (_no_device, copied) = (device, Ok::<_, (SourceError, bool)>(None));
    if let Err((error, false)) = copied {
        // The device may still use the region, so its memory is leaked.
        return Err(error);
    }
    // SAFETY: acquired above from this source; no reference into it exists and the copy has completed.
    let released = unsafe { source.release(&region) };
    let untested = copied.map_err(|(error, _)| error)?;
    released.map(|()| Trial { bytes, took, untested })
}

/// Returns the finding that the trial of `backend` made no test copy.
pub(super) fn untested(backend: &str, error: &SourceError) -> Finding {
    Finding::warning("gpu", format!("backend {backend} is used without a test copy: {error}"))
        .remedy("run `pinpool doctor` when the GPU has free memory")
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::backend::tests::CountedHeap;

    #[test]
    fn a_trial_stays_under_the_limit() {
        for (limit, expected) in
            [(0, None), (4095, None), (4096, Some(4096)), (70_000, Some(69_632)), (1 << 40, Some(GRANULE_BYTES))]
        {
            let small = CountedHeap::up_to(usize::try_from(limit).unwrap());
            assert_eq!(run(&small, None, Some(limit)).unwrap().map(|trial| trial.bytes), expected, "{limit}");
        }
        assert!(run(&CountedHeap::up_to(4096), None, None).is_err());
    }
}
