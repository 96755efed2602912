//! Encoded images and arrays, decoded into memory that is there, such as a batch in pinned memory.
//!
//! ```text
//!   JPEG, PNG ──▶ RGB, 8 bits ──▶ resized ──▶ height x width x 3, or 3 x height x width, bytes
//!   .npy      ──▶ header compared with what is expected ──▶ its data
//! ```
//!
//! Each result has a length that is known before anything is read, so that a batch is one array. Never allocates what only a
//! header asks for beyond [`Image::pixels_max`]. Each thread keeps scratch memory of at most 64 MiB for the next image.

mod array;
mod image;
mod pixels;

pub use array::Array;
pub use image::{Fit, Image, Layout};
pub use pixels::PIXELS_MAX;

/// Why something could not be decoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Neither the first bytes of a JPEG nor those of a PNG.
    #[error("neither a JPEG nor a PNG image: it begins with {begin:02x?}")]
    Unknown {
        /// The first bytes.
        begin: Vec<u8>,
    },
    /// Damaged, cut off, or of a kind that the decoder does not know.
    #[error("damaged {format}, or of a kind that is not known: {why}")]
    Damaged {
        /// The format, by its name.
        format: &'static str,
        /// What the decoder says.
        why: String,
    },
    /// An image of more pixels than the limit.
    #[error(
        "an image of {width} x {height} pixels: the limit is {most} (pixels_max, up to {PIXELS_MAX}); raise it, or leave the file out"
    )]
    TooLarge {
        /// Pixels of a line.
        width: usize,
        /// Lines.
        height: usize,
        /// The limit.
        most: usize,
    },
    /// An array of another shape or type than the batch is made of.
    #[error("the array is {found}, and {expected} was asked for")]
    OtherArray {
        /// Shape and type in the file.
        found: String,
        /// Shape and type asked for.
        expected: String,
    },
}

impl DecodeError {
    fn damaged(format: &'static str, why: impl std::fmt::Display) -> Self {
        Self::Damaged { format, why: why.to_string() }
    }
}
