//! A reserve in slices, pinned by two threads: while one registers its slice, the threads of the other touch the next.
//!
//! Arithmetic; calls nothing.

use std::ptr::NonNull;

use super::block_memory::Refusal;
use super::shape::GRANULE_BYTES;
use pinpool_os::sync::plain::Mutex;

/// A refused slice is halved down to this.
const SLICE_BYTES_MIN: u64 = 16 << 20;

/// Where a slice lies.
#[derive(Debug, Clone, Copy)]
pub(in crate::engine) struct Place(pub(in crate::engine) NonNull<u8>, pub(in crate::engine) usize);

// SAFETY: an address and a length, through which nothing is read.
#[allow(unsafe_code)]
unsafe impl Send for Place {}

/// What is pinned of a reserve, and what is to come.
#[derive(Debug)]
pub(super) struct Slices(Mutex<Progress>);

#[derive(Debug)]
pub(super) struct Progress {
    pub(super) places: Vec<Place>,
    pub(super) left_bytes: u64,
    /// Why nothing more comes.
    pub(super) refusal: Option<Refusal>,
    done_bytes: u64,
    slice_bytes: u64,
    min_bytes: u64,
}

impl Slices {
    /// `bytes` in slices of this length, or in one piece.
    pub(super) fn of(bytes: u64, slice_bytes: Option<u64>) -> Self {
        let (slice_bytes, min_bytes) = slice_bytes.map_or((bytes, bytes), |slice_bytes| (slice_bytes, SLICE_BYTES_MIN));
        let (places, refusal) = Default::default();
        Self(Mutex::new(Progress { places, left_bytes: bytes, refusal, done_bytes: 0, slice_bytes, min_bytes }))
    }

    pub(super) fn are_several(&self) -> bool {
        let progress = self.0.lock();
        progress.left_bytes > progress.slice_bytes
    }

    pub(super) fn done_bytes(&self) -> u64 {
        self.0.lock().done_bytes
    }

    /// The length of the next slice, for the caller to pin.
    pub(super) fn next(&self) -> Option<u64> {
        let mut progress = self.0.lock();
        let bytes = progress.left_bytes.min(progress.slice_bytes);
        if bytes == 0 || progress.refusal.is_some() {
            return None;
        }
        progress.left_bytes -= bytes;
        Some(bytes)
    }

    /// What became of a slice of [`next`](Self::next).
    pub(super) fn note(&self, bytes: u64, pinned: Result<Place, Refusal>) {
        let mut progress = self.0.lock();
        match pinned {
            Ok(place) => {
                progress.places.push(place);
                progress.done_bytes += bytes;
            }
            Err(refusal) => {
                progress.left_bytes += bytes;
                if bytes > progress.min_bytes {
                    progress.slice_bytes = (bytes / 2).next_multiple_of(GRANULE_BYTES).max(progress.min_bytes);
                } else {
                    progress.refusal = Some(refusal);
                }
            }
        }
    }

    pub(super) fn end(self) -> Progress {
        self.0.into_inner()
    }
}

#[cfg(all(test, not(pinpool_loom)))]
mod tests {
    use super::*;
    use crate::backend::SourceError;

    #[test]
    fn a_refused_slice_is_halved_down_to_a_least_one_and_the_rest_is_left() {
        const MIB: u64 = 1 << 20;
        let slices = Slices::of(600 * MIB, Some(256 * MIB));
        assert!(slices.are_several());
        let place = Place(NonNull::dangling(), 0);
        assert_eq!((slices.next(), slices.next()), (Some(256 * MIB), Some(256 * MIB)));
        slices.note(256 * MIB, Ok(place));
        let refused = || Err(Refusal::Source(SourceError::new("test", "refused")));
        slices.note(256 * MIB, refused());
        for mib in [128, 64, 32, 16] {
            assert_eq!(slices.next(), Some(mib * MIB));
            slices.note(mib * MIB, refused());
        }
        assert_eq!((slices.next(), slices.done_bytes()), (None, 256 * MIB));
        let Progress { places, left_bytes, refusal, .. } = slices.end();
        assert_eq!((places.len(), left_bytes), (1, 344 * MIB));
        assert!(refusal.is_some());
        let whole = Slices::of(600 * MIB, None);
        assert_eq!((whole.are_several(), whole.next()), (false, Some(600 * MIB)));
        whole.note(600 * MIB, refused());
        assert_eq!(whole.next(), None, "one piece is not halved");
    }
}
