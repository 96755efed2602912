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
//! Pure arithmetic: allocates nothing, knows no pool.

use crate::error::{Error, Kind};

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

/// How sizes are rounded up to classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Rounding {
    /// Not at all (TensorFlow's `NoopRounder`): a buffer is reused for exactly its size.
    Exact,
    /// To the next power of two (`Pow2Rounder`, what TensorFlow's pinned pool used).
    Pow2,
}

impl Rounding {
    /// Class of a request in bytes: what is asked of the back-end and the key for reuse.
    ///
    /// # Errors
    ///
    /// [`Error::is_request`] if `align` is no power of two or over 1 GiB, or if the class would pass `isize::MAX` bytes.
    pub fn class_bytes(self, len: usize, align: usize) -> Result<usize, Error> {
        if !align.is_power_of_two() || align > MAX_ALIGN {
            return Err(Kind::Alignment { len, align }.into());
        }
        let room_to_align = if align > FREE_ALIGN { align } else { 0 };
        len.checked_add(room_to_align + PREFIX_BYTES)
            .and_then(|sum| self.round_up(sum))
            .filter(|&class_bytes| class_bytes <= MAX_LEN)
            .ok_or_else(|| Kind::Length { len }.into())
    }

    fn round_up(self, bytes: usize) -> Option<usize> {
        match self {
            Self::Exact => Some(bytes),
            Self::Pow2 => bytes.checked_next_power_of_two(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALIGNMENTS: [usize; 8] = [1, 4, 8, 16, 32, 4096, 8192, 1 << 21];

    /// Addresses at which a back-end may hand out a region: any multiple of a page.
    const PAGE: usize = 4096;

    #[test]
    fn every_class_has_room_for_the_request_at_its_alignment_wherever_the_base_lies() {
        for rounding in [Rounding::Exact, Rounding::Pow2] {
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
        for rounding in [Rounding::Exact, Rounding::Pow2] {
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
    fn nonsense_is_an_error_never_a_panic() {
        for rounding in [Rounding::Exact, Rounding::Pow2] {
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
