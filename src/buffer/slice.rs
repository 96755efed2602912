//! A slice of pinned memory that host code can use but cudarc does not accept, and the casts of its bytes to elements.
#![allow(unsafe_code)] // Converts a slice reference to a reference to a transparent wrapper.

use std::any::type_name;
use std::fmt;
use std::ops::{
    Bound, Deref, DerefMut, Index, IndexMut, Range, RangeBounds, RangeFrom, RangeFull, RangeInclusive, RangeTo,
    RangeToInclusive,
};

use bytemuck::Pod;

use crate::error::{ErrorKind, Result};

/// A slice of a [`PinnedBuf`](crate::PinnedBuf), for host code: derefs to `[T]`, so `fill`, `copy_from_slice`, `read_exact`
/// and indexing work as on any slice.
///
/// Neither this type nor a range of it is a `HostSlice` of cudarc, because a copy started from it would not be tracked: the next
/// user of the buffer could overwrite the bytes during the copy. Slice methods (`split_at`, `get`, `as_ref`) return
/// plain slices, which cudarc accepts, so do not pass these to cudarc. This does not compile:
///
#[cfg_attr(feature = "cuda", doc = "```compile_fail,E0277")]
#[cfg_attr(not(feature = "cuda"), doc = "```ignore")]
/// # use std::sync::Arc;
/// # use pinpool::cudarc::driver::{CudaSlice, CudaStream};
/// # fn send(buf: &mut pinpool::PinnedBuf, stream: &Arc<CudaStream>, device: &mut CudaSlice<u8>) {
/// stream.memcpy_htod(buf.wait_slice_mut().unwrap(), device).unwrap();
/// # }
/// ```
///
/// Nor does this:
///
#[cfg_attr(feature = "cuda", doc = "```compile_fail,E0277")]
#[cfg_attr(not(feature = "cuda"), doc = "```ignore")]
/// # use std::sync::Arc;
/// # use pinpool::cudarc::driver::{CudaSlice, CudaStream};
/// # fn receive(buf: &mut pinpool::PinnedBuf, stream: &Arc<CudaStream>, device: &CudaSlice<u8>) {
/// stream.memcpy_dtoh(device, &mut buf.wait_slice_mut().unwrap()[..4]).unwrap();
/// # }
/// ```
///
/// These tracked copies compile:
///
#[cfg_attr(feature = "cuda", doc = "```no_run")]
#[cfg_attr(not(feature = "cuda"), doc = "```ignore")]
/// # use std::sync::Arc;
/// # use pinpool::cudarc::driver::{CudaSlice, CudaStream};
/// # fn both(buf: &mut pinpool::PinnedBuf, stream: &Arc<CudaStream>, device: &mut CudaSlice<u8>) {
/// stream.memcpy_htod(buf, device).unwrap();
/// stream.memcpy_dtoh(device, &mut buf.view_mut(..4).unwrap()).unwrap();
/// # }
/// ```
#[repr(transparent)]
pub struct PinnedSlice<T>([T]);

impl<T> PinnedSlice<T> {
    pub(crate) fn from_mut(slice: &mut [T]) -> &mut Self {
        // SAFETY: `PinnedSlice` is a transparent wrapper of the slice, so layout and metadata are the same.
        unsafe { &mut *(std::ptr::from_mut(slice) as *mut Self) }
    }

    pub(crate) fn from_ref(slice: &[T]) -> &Self {
        // SAFETY: as in `from_mut`.
        unsafe { &*(std::ptr::from_ref(slice) as *const Self) }
    }
}

impl<T> AsRef<[T]> for PinnedSlice<T> {
    fn as_ref(&self) -> &[T] {
        &self.0
    }
}

impl<T> AsMut<[T]> for PinnedSlice<T> {
    fn as_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<'a, T> IntoIterator for &'a PinnedSlice<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<'a, T> IntoIterator for &'a mut PinnedSlice<T> {
    type Item = &'a mut T;
    type IntoIter = std::slice::IterMut<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter_mut()
    }
}

impl<T: fmt::Debug> fmt::Debug for PinnedSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Compares with any slice, array or vector.
impl<T: PartialEq, S: AsRef<[T]> + ?Sized> PartialEq<S> for PinnedSlice<T> {
    fn eq(&self, other: &S) -> bool {
        self.0 == *other.as_ref()
    }
}

impl<T> Deref for PinnedSlice<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for PinnedSlice<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<T> Index<usize> for PinnedSlice<T> {
    type Output = T;

    fn index(&self, index: usize) -> &T {
        &self.0[index]
    }
}

impl<T> IndexMut<usize> for PinnedSlice<T> {
    fn index_mut(&mut self, index: usize) -> &mut T {
        &mut self.0[index]
    }
}

/// Makes indexing by a range return a `PinnedSlice`. Without these implementations, indexing would go through `Deref` to a
/// plain slice.
macro_rules! index_by {
    ($($range:ty),*) => {$(
        impl<T> Index<$range> for PinnedSlice<T> {
            type Output = Self;

            fn index(&self, range: $range) -> &Self {
                Self::from_ref(&self.0[range])
            }
        }

        impl<T> IndexMut<$range> for PinnedSlice<T> {
            fn index_mut(&mut self, range: $range) -> &mut Self {
                Self::from_mut(&mut self.0[range])
            }
        }
    )*};
}

index_by!(Range<usize>, RangeFrom<usize>, RangeFull, RangeInclusive<usize>, RangeTo<usize>, RangeToInclusive<usize>);

/// Returns `bytes` as elements of `T`.
pub(super) fn cast<T: Pod>(bytes: &[u8]) -> Result<&PinnedSlice<T>> {
    check_cast::<T>(bytes.as_ptr(), bytes.len())?;
    // Does not panic: `check_cast` checks the same conditions, with the numbers in its error.
    Ok(PinnedSlice::from_ref(bytemuck::cast_slice(bytes)))
}

/// Returns `bytes` as elements of `T`, for writing.
pub(super) fn cast_mut<T: Pod>(bytes: &mut [u8]) -> Result<&mut PinnedSlice<T>> {
    check_cast::<T>(bytes.as_ptr(), bytes.len())?;
    // Does not panic, as in `cast`.
    Ok(PinnedSlice::from_mut(bytemuck::cast_slice_mut(bytes)))
}

/// Fails unless the `len` bytes at `start` are a whole number of aligned elements.
pub(super) fn check_cast<T: Pod>(start: *const u8, len: usize) -> Result<()> {
    let (bytes, align) = (size_of::<T>(), align_of::<T>());
    if bytes > 0 && len.is_multiple_of(bytes) && start.addr().is_multiple_of(align) {
        return Ok(());
    }
    let why = format!(
        "{len}B at {:#x} are not a slice of `{}`: elements have {bytes}B and alignment {align}",
        start.addr(),
        type_name::<T>(),
    );
    Err(ErrorKind::Argument { why }.into())
}

/// Returns the start and end of `range` within `len` elements. Fails if `range` is not inside them.
pub(super) fn elements_in(range: impl RangeBounds<usize>, len: usize) -> Result<Range<usize>> {
    // A saturated bound is outside the slice, since no slice is that long.
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => len,
    };
    if start <= end && end <= len {
        return Ok(start..end);
    }
    let why = format!("{start}..{end} is not inside {len} elements");
    Err(ErrorKind::Argument { why }.into())
}
