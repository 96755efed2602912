//! What a field of a sample is decoded to: the formats of `pinpool-decode`, for the loader. `pinpool/_decode.py` has the classes of it.

use std::error::Error;
use std::sync::Arc;

use pinpool_decode::{Array, Fit, Image, Layout};
use pinpool_loader::{Decode, DecodedField};
use pyo3::prelude::*;

/// A format.
#[pyclass(frozen, module = "pinpool._pinpool")]
#[derive(Debug, Clone)]
pub struct Decoder(Format);

#[derive(Debug, Clone)]
enum Format {
    Image(Image),
    Array(Array),
}

impl Decode for Format {
    fn len_bytes(&self) -> usize {
        match self {
            Self::Image(image) => image.len_bytes(),
            Self::Array(array) => array.len_bytes(),
        }
    }

    fn decode(&self, encoded: &[u8], into: &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync>> {
        let decoded = match self {
            Self::Image(image) => image.decode(encoded, into),
            Self::Array(array) => array.decode(encoded, into),
        };
        decoded.map_err(Into::into)
    }
}

#[pymethods]
impl Decoder {
    /// Images of this size, from files of at most `pixels_max` pixels; `None` if nothing can have it.
    #[staticmethod]
    fn image(height: u32, width: u32, is_chw: bool, is_cropped: bool, pixels_max: Option<usize>) -> Option<Self> {
        let layout = if is_chw { Layout::Chw } else { Layout::Hwc };
        let fit = if is_cropped { Fit::Crop } else { Fit::Stretch };
        let image = Image::new(height, width, layout, fit)?;
        Some(Self(Format::Image(image.pixels_max(pixels_max.unwrap_or(usize::MAX)))))
    }

    /// Arrays of this shape and type; `None` if no memory holds one.
    #[staticmethod]
    fn array(shape: Vec<u64>, descr: &str, item_bytes: usize) -> Option<Self> {
        Array::new(&shape, descr, item_bytes).map(|array| Self(Format::Array(array)))
    }
}

/// The fields that are decoded, each by its names.
pub(crate) fn fields(decode: Vec<(Vec<String>, PyRef<'_, Decoder>)>) -> Vec<DecodedField> {
    decode.into_iter().map(|(names, decoder)| DecodedField::new(names, Arc::new(decoder.0.clone()))).collect()
}
