//! Size classes: how many bytes a request takes from the backend, and the key under which its buffer is reused.
//!
//! In the `tensorflow` preset:
//!
//! ```text
//! class = round(len + (align if align > 16 else 0) + 16)
//! ```
//!
//! TensorFlow's pool keeps a pointer in the 16 bytes. This pool writes nothing there, but adds them so that each request falls into
//! the same class as in TensorFlow and all counters agree. A buffer serves any request of its class at any alignment, because the
//! class includes `align` bytes if the alignment is over 16.
//!
//! The `adaptive` preset (policy-R1) needs no prefix and relies on page-aligned bases:
//!
//! ```text
//! class = eighths(len + (align - page if align > page else 0))
//! eighths(n): up to 32 KiB the next multiple of 4 KiB, above it the next of 8 steps per doubling (waste below 12.5 %);
//!             above 16 MiB the next multiple of 2 MiB, above 256 MiB the next of 64 steps per doubling (below 1.6 %),
//!             above 1 TiB the next power of two
//! ```
//!
//! This module is pure arithmetic and allocates nothing.

use crate::error::{Error, ErrorKind};
use pinpool_os::host::PAGE_BYTES;

/// The longest buffer, in bytes: the longest Rust slice.
pub(crate) const LEN_MAX: usize = isize::MAX as usize;
/// The largest alignment, in bytes: 1 GiB, the largest page of x86-64 and of AArch64 with 4 KiB pages.
pub(crate) const ALIGN_MAX: usize = 1 << 30;
/// The alignment of a plain [`Pool::get`](crate::Pool::get) for the choice of its class, to which it adds nothing. All memory is
/// page-aligned.
pub(crate) const UNSPECIFIED_ALIGN: usize = 4;

/// TensorFlow's `sizeof(ChunkPrefix)`.
const PREFIX_BYTES: usize = 16;
/// Alignments up to this add nothing to the class (an old `kPoolAlignment` of TensorFlow).
const FREE_ALIGN: usize = 16;

/// Up to this size the classes of [`Rounding::Eighths`] are the multiples of a page.
const EVEN_STEPS_BYTES: usize = 8 * PAGE_BYTES;
/// Classes per doubling above `EVEN_STEPS_BYTES` and up to `LARGE_BYTES`.
const STEPS_PER_DOUBLING: u32 = 8;
/// Above this size a step is a granule of 2 MiB, and above 256 MiB there are `LARGE_STEPS` classes per doubling. The steps are finer
/// than for small buffers, because rounding wastes most memory in large buffers, and because large buffers are few.
const LARGE_BYTES: usize = 16 << 20;
const LARGE_STEPS: u32 = 64;
const LARGE_STEP_SHIFT: u32 = 21;
/// Above this size, for which few hosts have the memory, every class is a power of two.
const HUGE_BYTES: usize = 1 << 40;
/// The number that `large_step` adds to the steps and doublings of a large class to get its index.
const LARGE_INDEX: u32 =
    8 + 8 * (LARGE_BYTES / EVEN_STEPS_BYTES).ilog2() - (1 << (LARGE_BYTES.ilog2() - LARGE_STEP_SHIFT));
/// The index of the first class above `HUGE_BYTES`.
const HUGE_INDEX: u32 = LARGE_INDEX + LARGE_STEPS * (HUGE_BYTES.ilog2() - LARGE_STEP_SHIFT - LARGE_STEPS.ilog2() + 1);
/// The number of classes of [`Rounding::Eighths`], for tables indexed by [`Class::index`].
pub(crate) const EIGHTHS_CLASSES: u32 = HUGE_INDEX + usize::BITS - HUGE_BYTES.ilog2();

/// A size class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class {
    pub(crate) bytes: usize,
    /// Dense from 0 for [`Rounding::Eighths`]; meaningless for the other roundings.
    pub(crate) index: u32,
}

/// How requested sizes are rounded up to size classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Rounding {
    /// No rounding (TensorFlow's `NoopRounder`): a buffer is reused only for exactly its size.
    Exact,
    /// The next power of two (TensorFlow's `Pow2Rounder`).
    Pow2,
    /// Eight steps per doubling, in whole pages, from 16 MiB on in multiples of 2 MiB; the classes of the `adaptive` preset.
    Eighths,
}

impl Rounding {
    /// Returns the size of the class of a request for `len` bytes aligned to `align`.
    #[doc(hidden)]
    pub fn class_bytes(self, len: usize, align: usize) -> Result<usize, Error> {
        self.class(len, align).map(|class| class.bytes)
    }

    /// Returns the class of a request for `len` bytes aligned to `align`.
    #[inline]
    pub(crate) fn class(self, len: usize, align: usize) -> Result<Class, Error> {
        // A plain request of this length cannot fail, and needs no bytes for its alignment.
        if self == Self::Eighths && align == UNSPECIFIED_ALIGN && len <= LEN_MAX / 2 {
            return Ok(eighths(len));
        }
        self.class_of_any(len, align)
    }

    fn class_of_any(self, len: usize, align: usize) -> Result<Class, Error> {
        if !align.is_power_of_two() || align > ALIGN_MAX {
            return Err(ErrorKind::Alignment { len, align, max_align: ALIGN_MAX }.into());
        }
        let extra_bytes = match self {
            Self::Eighths => align.saturating_sub(PAGE_BYTES),
            Self::Exact | Self::Pow2 if align > FREE_ALIGN => align + PREFIX_BYTES,
            Self::Exact | Self::Pow2 => PREFIX_BYTES,
        };
        len.checked_add(extra_bytes)
            .and_then(|sum| match self {
                Self::Exact => Some(Class { bytes: sum, index: 0 }),
                Self::Pow2 => sum.checked_next_power_of_two().map(|bytes| Class { bytes, index: 0 }),
                Self::Eighths => (sum <= LEN_MAX).then(|| eighths(sum)),
            })
            .filter(|class| class.bytes <= LEN_MAX)
            .ok_or_else(|| ErrorKind::Length { len, max_len: LEN_MAX }.into())
    }
}

/// Returns the index of the class of a plain request for `len` bytes under [`Rounding::Eighths`]. The index is below
/// [`EIGHTHS_CLASSES`] for every `len`. For 0 and for lengths over [`LEN_MAX`] it is the index of a class without buffers.
#[inline(always)]
pub(crate) fn plain_eighths_index(len: usize) -> u32 {
    step(len.wrapping_sub(1)).1
}

/// Returns the class of `bytes`, which must be at most [`LEN_MAX`].
#[inline]
fn eighths(bytes: usize) -> Class {
    let last = bytes.saturating_sub(1);
    let (step_shift, index) = step(last);
    Class { bytes: ((last >> step_shift) + 1) << step_shift, index }
}

/// Returns the class of `last + 1` bytes, as the shift of its step (a step has `1 << shift` bytes) and its index.
// The casts truncate nothing: `last` has at most 127 steps.
#[allow(clippy::cast_possible_truncation)]
#[inline(always)]
fn step(last: usize) -> (u32, u32) {
    // The most frequent sizes take the shortest path: up to 64 KiB a step is a page.
    if last < 2 * EVEN_STEPS_BYTES {
        return (PAGE_BYTES.ilog2(), (last >> PAGE_BYTES.ilog2()) as u32);
    }
    if last >= LARGE_BYTES {
        return large_step(last);
    }
    let doublings = last.ilog2() - EVEN_STEPS_BYTES.ilog2();
    let step_shift = PAGE_BYTES.ilog2() + doublings;
    (step_shift, STEPS_PER_DOUBLING * doublings + (last >> step_shift) as u32)
}

/// Returns what [`step`] returns, for a class above [`LARGE_BYTES`].
#[allow(clippy::cast_possible_truncation)] // The quotient is below 128.
fn large_step(last: usize) -> (u32, u32) {
    if last >= HUGE_BYTES {
        let step_shift = last.ilog2();
        return (step_shift, HUGE_INDEX + step_shift - HUGE_BYTES.ilog2());
    }
    let doublings = (last >> (LARGE_STEP_SHIFT + LARGE_STEPS.ilog2()) | 1).ilog2();
    let step_shift = LARGE_STEP_SHIFT + doublings;
    (step_shift, LARGE_INDEX + LARGE_STEPS * doublings + (last >> step_shift) as u32)
}

#[cfg(test)]
mod all_lengths;

#[cfg(test)]
mod tests {
    use super::*;

    const ROUNDINGS: [Rounding; 3] = [Rounding::Exact, Rounding::Pow2, Rounding::Eighths];
    #[test]
    fn pow2_rounds_the_sum_not_the_request() {
        for (len, align, class) in [(48, 4, 64), (49, 4, 128), (4080, 4, 4096), (4081, 4, 8192), (1, 4096, 8192)] {
            assert_eq!(Rounding::Pow2.class_bytes(len, align).unwrap(), class, "{len} at {align}");
        }
        assert_eq!(Rounding::Exact.class_bytes(7, 16).unwrap(), 23);
        assert_eq!(Rounding::Exact.class_bytes(7, 32).unwrap(), 55);
    }

    #[test]
    fn eighths_are_pages_then_eighths_of_a_doubling_then_granules_and_doublings() {
        // All lengths are checked against the definition in `all_lengths`.
        let lengths = [1, 4096, 4097, 32768, 32769, 65537, 16 << 20, (16 << 20) + 1, (256 << 20) + 1, (1 << 40) + 1];
        let bytes = [4096, 4096, 8192, 32768, 36864, 73728, 16 << 20, 18 << 20, 260 << 20, 2 << 40];
        assert_eq!(lengths.map(|len| Rounding::Eighths.class_bytes(len, UNSPECIFIED_ALIGN).unwrap()), bytes);
    }

    #[test]
    fn impossible_requests_are_errors() {
        for rounding in ROUNDINGS {
            for len in [usize::MAX, usize::MAX - 15, LEN_MAX, LEN_MAX - 15, LEN_MAX + 1] {
                assert!(rounding.class_bytes(len, 4).unwrap_err().is_invalid_request(), "{rounding:?} {len}");
            }
            for align in [0, 3, 24, ALIGN_MAX * 2, usize::MAX] {
                assert!(rounding.class_bytes(1, align).unwrap_err().is_invalid_request(), "{rounding:?} align {align}");
            }
        }
        assert!(Rounding::Pow2.class_bytes(LEN_MAX / 2 + 2, 4).unwrap_err().is_invalid_request());
    }
}
