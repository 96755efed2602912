//! Decoders for fields of samples, behind the classes of `pinpool_loader/_decode.py`.

use std::sync::Arc;

use pinpool_loader::{Decode, DecodedField, Fit, ImageDecoder, Layout};
use pyo3::prelude::*;

/// A decoder.
#[pyclass(frozen, module = "pinpool._pinpool")]
#[derive(Debug, Clone)]
pub struct Decoder(Arc<dyn Decode>);

#[pymethods]
impl Decoder {
    /// Images of this size, from files of at most `max_pixels` pixels; `None` if no image can have that size.
    #[staticmethod]
    fn image(height: u32, width: u32, is_chw: bool, is_cropped: bool, max_pixels: Option<usize>) -> Option<Self> {
        let layout = if is_chw { Layout::Chw } else { Layout::Hwc };
        let fit = if is_cropped { Fit::Crop } else { Fit::Stretch };
        let image = ImageDecoder::new(height, width, layout, fit)?;
        Some(Self(Arc::new(image.max_pixels(max_pixels.unwrap_or(usize::MAX)))))
    }
}

/// Returns the decoded fields, each with its names.
pub(crate) fn fields(decode: Vec<(Vec<String>, PyRef<'_, Decoder>)>) -> Vec<DecodedField> {
    decode.into_iter().map(|(names, decoder)| DecodedField::new(names, decoder.0.clone())).collect()
}
