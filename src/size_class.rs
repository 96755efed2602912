//! A request becomes a class: how many bytes are asked of the back-end, and the key under which the buffer is kept.
//!
//! ```text
//! class = round(len + (align if align > 16 else 0) + 16)
//! ```
//!
//! The 16 bytes in front are those in which TensorFlow's pool kept a pointer; nothing is written there by this one, but
//! leaving them out would move a request to another class and so change every figure. A buffer serves any request of its
//! class, whatever length and alignment led there: `align` bytes of room are in the class wherever the page-aligned base
//! alone would not do.
//!
//! That is the rule of the `tensorflow` preset. The `adaptive` preset needs no prefix and knows that every base is
//! page-aligned:
//!
//! ```text
//! class = eighths(len + (align - page if align > page else 0))
//! eighths(n): up to 32 KiB the next multiple of 4 KiB, above it the next of 8 steps a doubling (waste under 12.5 %)
//! ```
//!
//! Pure arithmetic: allocates nothing, knows no pool.

use crate::error::{Error, ErrorKind};
use crate::host::PAGE_BYTES;

/// Longest buffer: what a Rust slice may span.
pub(crate) const MAX_LEN: usize = isize::MAX as usize;
/// Largest alignment accepted: 1 GiB, the largest page of x86-64 and of AArch64 with 4 KiB granules is no larger.
pub(crate) const MAX_ALIGN: usize = 1 << 30;
/// Alignment of a plain `get`; it adds nothing to the class.
pub(crate) const DEFAULT_ALIGN: usize = 4;

/// TensorFlow's `sizeof(ChunkPrefix)`.
const PREFIX_BYTES: usize = 16;
/// Alignments up to this come for free (`kPoolAlignment`'s old value in TensorFlow).
const FREE_ALIGN: usize = 16;

/// Up to here the classes of [`Rounding::Eighths`] are the multiples of a page.
const EVEN_STEPS_BYTES: usize = 8 * PAGE_BYTES;
/// And above it there are this many in each doubling.
const STEPS_A_DOUBLING: u32 = 8;
/// Classes of [`Rounding::Eighths`] there are, for tables indexed by [`Class::index`].
pub(crate) const EIGHTHS_CLASSES: u32 = 8 + 8 * (usize::BITS - EVEN_STEPS_BYTES.ilog2());

/// A class: its size and, for [`Rounding::Eighths`], its place in the row of all classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Class {
    pub(crate) bytes: usize,
    /// Dense from 0; means nothing for the other roundings.
    pub(crate) index: u32,
}

/// How sizes are rounded up to classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Rounding {
    /// Not at all (TensorFlow's `NoopRounder`): a buffer is reused for exactly its size.
    Exact,
    /// To the next power of two (`Pow2Rounder`, what TensorFlow's pinned pool used).
    Pow2,
    /// To eight steps a doubling, whole pages: the classes of the `adaptive` preset.
    Eighths,
}

impl Rounding {
    /// Class of a request in bytes: what is asked of the back-end and the key for reuse.
    ///
    /// # Errors
    ///
    /// [`Error::is_request`] if `align` is no power of two or over 1 GiB, or if the class would pass `isize::MAX` bytes.
    pub fn class_bytes(self, len: usize, align: usize) -> Result<usize, Error> {
        self.class(len, align).map(|class| class.bytes)
    }

    /// The class with its index.
    #[inline]
    pub(crate) fn class(self, len: usize, align: usize) -> Result<Class, Error> {
        // A plain get: nothing can go wrong, and no room is needed beside the length.
        if self == Self::Eighths && align == DEFAULT_ALIGN && len <= MAX_LEN / 2 {
            return Ok(eighths(len));
        }
        self.class_of_any(len, align)
    }

    fn class_of_any(self, len: usize, align: usize) -> Result<Class, Error> {
        if !align.is_power_of_two() || align > MAX_ALIGN {
            return Err(ErrorKind::Alignment { len, align, max_align: MAX_ALIGN }.into());
        }
        let beside = match self {
            Self::Eighths => align.saturating_sub(PAGE_BYTES),
            Self::Exact | Self::Pow2 if align > FREE_ALIGN => align + PREFIX_BYTES,
            Self::Exact | Self::Pow2 => PREFIX_BYTES,
        };
        len.checked_add(beside)
            .and_then(|sum| match self {
                Self::Exact => Some(Class { bytes: sum, index: 0 }),
                Self::Pow2 => sum.checked_next_power_of_two().map(|bytes| Class { bytes, index: 0 }),
                Self::Eighths => (sum <= MAX_LEN).then(|| eighths(sum)),
            })
            .filter(|class| class.bytes <= MAX_LEN)
            .ok_or_else(|| ErrorKind::Length { len, max_len: MAX_LEN }.into())
    }
}

/// The class of `bytes`, at most [`MAX_LEN`]. One formula for the even steps and the doublings: below 64 KiB a step is a
/// page, above it an eighth of the power of two below.
#[inline]
fn eighths(bytes: usize) -> Class {
    let last = bytes.saturating_sub(1);
    let doublings = last.max(EVEN_STEPS_BYTES).ilog2() - EVEN_STEPS_BYTES.ilog2();
    let step_shift = PAGE_BYTES.ilog2() + doublings;
    let steps = (last >> step_shift) + 1;
    // At most 16 steps, so nothing is cut off.
    #[allow(clippy::cast_possible_truncation)]
    let index = STEPS_A_DOUBLING * doublings + steps as u32 - 1;
    Class { bytes: steps << step_shift, index }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUNDINGS: [Rounding; 3] = [Rounding::Exact, Rounding::Pow2, Rounding::Eighths];
    const ALIGNMENTS: [usize; 8] = [1, 4, 8, 16, 32, 4096, 8192, 1 << 21];

    /// Addresses at which a back-end may hand out a region: any multiple of a page.
    const PAGE: usize = 4096;

    #[test]
    fn every_class_has_room_for_the_request_at_its_alignment_wherever_the_base_lies() {
        for rounding in ROUNDINGS {
            for len in (1..70_000).chain([1 << 20, (1 << 20) + 1, 123_456_789]) {
                for align in ALIGNMENTS {
                    let class_bytes = rounding.class_bytes(len, align).unwrap();
                    // The worst base is one page past a multiple of the alignment.
                    let base = align.max(PAGE) + PAGE;
                    let end = base.next_multiple_of(align) + len;
                    assert!(end <= base + class_bytes, "{rounding:?} {len} at {align}: {class_bytes}");
                }
            }
        }
    }

    #[test]
    fn classes_never_fall_as_the_length_grows() {
        for rounding in ROUNDINGS {
            let mut before = 0;
            for len in 1..100_000 {
                let class_bytes = rounding.class_bytes(len, DEFAULT_ALIGN).unwrap();
                assert!(class_bytes >= before);
                before = class_bytes;
            }
        }
    }

    #[test]
    fn pow2_rounds_the_sum_not_the_request() {
        assert_eq!(Rounding::Pow2.class_bytes(48, 4).unwrap(), 64);
        assert_eq!(Rounding::Pow2.class_bytes(49, 4).unwrap(), 128);
        assert_eq!(Rounding::Pow2.class_bytes(4080, 4).unwrap(), 4096);
        assert_eq!(Rounding::Pow2.class_bytes(4081, 4).unwrap(), 8192);
        assert_eq!(Rounding::Pow2.class_bytes(1, 4096).unwrap(), 8192);
        assert_eq!(Rounding::Exact.class_bytes(7, 16).unwrap(), 23);
        assert_eq!(Rounding::Exact.class_bytes(7, 32).unwrap(), 55);
    }

    #[test]
    fn eighths_are_whole_pages_with_little_waste_and_a_dense_index() {
        let class = |len| Rounding::Eighths.class(len, DEFAULT_ALIGN).unwrap();
        for (len, bytes) in
            [(1, 4096), (4096, 4096), (4097, 8192), (32768, 32768), (32769, 36864), (65536, 65536), (65537, 73728)]
        {
            assert_eq!(class(len).bytes, bytes, "{len}");
        }
        let mut len = 1;
        let mut index = 0;
        // Class after class, to the end of the address space.
        while let Ok(class) = Rounding::Eighths.class(len, DEFAULT_ALIGN) {
            assert_eq!((class.index, class.bytes % PAGE), (index, 0), "{len}");
            assert!(len <= 32768 || (class.bytes - len) * 8 < len, "{len}");
            assert_eq!(Rounding::Eighths.class(class.bytes, DEFAULT_ALIGN).unwrap(), class);
            (len, index) = (class.bytes + 1, index + 1);
        }
        assert!(index <= EIGHTHS_CLASSES && index + 10 > EIGHTHS_CLASSES, "{index}");
    }

    #[test]
    fn nonsense_is_an_error_never_a_panic() {
        for rounding in ROUNDINGS {
            for len in [usize::MAX, usize::MAX - 15, MAX_LEN, MAX_LEN - 15, MAX_LEN + 1] {
                assert!(rounding.class_bytes(len, 4).unwrap_err().is_request(), "{rounding:?} {len}");
            }
            for align in [0, 3, 24, MAX_ALIGN * 2, usize::MAX] {
                assert!(rounding.class_bytes(1, align).unwrap_err().is_request(), "{rounding:?} align {align}");
            }
        }
        assert!(Rounding::Pow2.class_bytes(MAX_LEN / 2 + 2, 4).unwrap_err().is_request());
    }
}
