//! The decoded fields of a sample, and the decoders ([`Decode`]).
//!
//! ```text
//!   JPEG, PNG ──▶ RGB, 8 bits ──▶ resized ──▶ height x width x 3, or 3 x height x width, bytes
//! ```
//!
//! The length of each result is known in advance, so that a batch is one array. A header cannot make the decoders allocate more
//! than [`ImageDecoder::max_pixels`] permits. Each thread keeps at most 64 MiB of scratch memory for the next image.

#[cfg(feature = "decode")]
mod image;
#[cfg(feature = "decode")]
mod pixels;

use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::catalog::{Catalog, DataOrigin, Sample};
use crate::failure::{Failure, FailureCause};

#[cfg(feature = "decode")]
pub use self::image::{Fit, ImageDecoder, Layout};
#[cfg(feature = "decode")]
pub use self::pixels::PIXELS_MAX;

/// The reason for a failed decoding, as text.
#[cfg(feature = "decode")]
type DecodeError = Box<dyn Error + Send + Sync>;

/// Returns the error for a damaged, truncated or unsupported file.
#[cfg(feature = "decode")]
fn damaged(format: &str, why: impl fmt::Display) -> DecodeError {
    format!("damaged or unsupported {format}: {why}").into()
}

/// Decodes the bytes of a field into an array of known length.
pub trait Decode: fmt::Debug + Send + Sync {
    /// Returns the number of bytes of each array.
    fn len_bytes(&self) -> usize;

    /// Decodes into `into`, which has [`len_bytes`](Self::len_bytes) bytes.
    ///
    /// # Errors
    ///
    /// The reason why this sample cannot be decoded. The contents of `into` are then unspecified.
    fn decode(&self, encoded: &[u8], into: &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync>>;
}

/// A field that is decoded.
#[derive(Debug, Clone)]
pub struct DecodedField {
    pub(super) names: Vec<String>,
    pub(super) decoder: Arc<dyn Decode>,
}

impl DecodedField {
    /// Decodes the first field of a sample with one of these names (lower case, without a dot). A sample without fields has
    /// one name, the extension of its file or member.
    pub fn new(names: Vec<String>, decoder: Arc<dyn Decode>) -> Self {
        Self { names, decoder }
    }

    /// Returns the number of bytes of each row of the array.
    pub fn len_bytes(&self) -> usize {
        self.decoder.len_bytes()
    }

    fn has_name(&self, name: &str) -> bool {
        self.names.iter().any(|own| own == name)
    }

    /// Returns the range of the field in the bytes of the sample.
    pub(super) fn of(&self, catalog: &Catalog, sample: &Sample) -> Result<Range<u64>, FailureCause> {
        if !sample.field_names.is_empty() {
            let found = sample.fields().find(|(name, _)| self.has_name(name));
            return found.map(|(_, bytes)| bytes).ok_or_else(|| self.missing(sample.fields().map(|(name, _)| name)));
        }
        let path = match (&sample.member, &catalog.files()[sample.file].origin) {
            (Some(member), _) => Some(Path::new(&**member)),
            (None, DataOrigin::File(path)) => Some(&**path),
            (None, DataOrigin::Synthetic { .. }) => None,
        };
        let extension = path.and_then(Path::extension).map(|extension| extension.to_string_lossy().to_lowercase());
        match extension.as_deref() {
            Some(extension) if self.has_name(extension) => Ok(0..sample.len_bytes),
            extension => Err(self.missing(extension.into_iter())),
        }
    }

    fn missing<'a>(&self, found: impl Iterator<Item = &'a str>) -> FailureCause {
        let (expected, found) = (self.names.join(";"), found.collect::<Vec<_>>().join(", "));
        FailureCause::Decode(format!("no field {expected} to decode: it has {found:?}"))
    }
}

impl Catalog {
    /// Returns the failure of the first file that lacks a field of `decode`. Members of archives are not checked.
    pub fn first_undecodable(&self, decode: &[DecodedField]) -> Option<Failure> {
        let files = self.samples().iter().enumerate().filter(|(_, sample)| sample.member.is_none());
        let cause = |sample| decode.iter().find_map(|field| field.of(self, sample).err());
        files.into_iter().find_map(|(number, sample)| Some(self.failure(number, cause(sample)?)))
    }
}

impl Sample {
    /// Returns the undecoded fields: their names, and their bytes within the sample's part of a batch. Returns all fields if
    /// nothing is decoded.
    pub fn kept_fields<'a>(&'a self, decode: &'a [DecodedField]) -> impl Iterator<Item = (&'a str, Range<u64>)> {
        let mut end = 0;
        undecoded_fields(decode, self).map(move |(name, bytes)| {
            let start = end;
            end += bytes.end - bytes.start;
            (name, start..end)
        })
    }
}

/// Returns the undecoded fields of a sample: their names, and their bytes in the sample.
pub(super) fn undecoded_fields<'a>(
    decode: &'a [DecodedField],
    sample: &'a Sample,
) -> impl Iterator<Item = (&'a str, Range<u64>)> {
    let mut taken = vec![false; decode.len()];
    sample.fields().filter(move |(name, _)| {
        let decoder = decode.iter().zip(&mut taken).find(|(field, is_taken)| !**is_taken && field.has_name(name));
        decoder.map(|(_, is_taken)| *is_taken = true).is_none()
    })
}
