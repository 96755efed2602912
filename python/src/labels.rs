//! Labels of samples: converts the text of a field with a function that the user passes.

use std::ops::Range;

use pinpool_loader::{Catalog, DecodedField, LoadedPart};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

/// The field that contains the text of the label, and the function that converts the text.
pub(crate) struct Labels {
    pub(crate) field: String,
    pub(crate) parse: Py<PyAny>,
}

impl Labels {
    /// Returns the labels of `parts`. A part without a label becomes a failure, and its rows are removed from the arrays.
    #[allow(clippy::too_many_arguments)] // All parts of a batch.
    pub(crate) fn take_labels(
        &self,
        py: Python<'_>,
        catalog: &Catalog,
        decode: &[DecodedField],
        bytes: &mut [u8],
        arrays: &[Range<usize>],
        parts: &mut Vec<LoadedPart>,
        failures: &mut Vec<(String, Option<Py<PyAny>>)>,
    ) -> PyResult<Vec<Py<PyAny>>> {
        let mut labels = Vec::new();
        for (row, part) in std::mem::take(parts).into_iter().enumerate() {
            let label = match self.text(catalog, decode, &part, bytes) {
                Ok(text) => self.label(py, text)?,
                Err(reason) => Err(reason),
            };
            match label {
                Ok(label) => {
                    // After a failure, the rows move up.
                    for (field, array) in decode.iter().zip(arrays).filter(|_| row != labels.len()) {
                        let (len, to) = (field.len_bytes(), array.start + labels.len() * field.len_bytes());
                        bytes.copy_within(array.start + row * len..array.start + (row + 1) * len, to);
                    }
                    labels.push(label);
                    parts.push(part);
                }
                Err(reason) => failures.push((format!("{}: {reason}", catalog.name(part.sample)), None)),
            }
        }
        Ok(labels)
    }

    /// Returns the label for `text`, or describes why the function failed.
    fn label(&self, py: Python<'_>, text: &str) -> PyResult<Result<Py<PyAny>, String>> {
        match self.parse.call1(py, (text,)) {
            Ok(label) => Ok(Ok(label)),
            Err(error) if error.is_instance_of::<PyException>(py) => {
                let shown: String = text.chars().take(20).collect();
                Ok(Err(format!("its field {:?}, {shown:?}, is not a label: {}", self.field, error.value(py))))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the text of a sample's field.
    fn text<'a>(
        &self,
        catalog: &Catalog,
        decode: &[DecodedField],
        part: &LoadedPart,
        bytes: &'a [u8],
    ) -> Result<&'a str, String> {
        let field = self.field.as_str();
        let Some(sample) = catalog.samples().get(part.sample) else { return Err("no such sample".to_owned()) };
        let is_whole = part.sample_offset == 0 && part.range.len() as u64 == sample.len_bytes;
        if !is_whole && decode.is_empty() {
            return Err(format!(
                "its label, the field {field:?}, needs the whole sample, and its {} bytes are more than a batch may have: raise \
                 batch_bytes, or pass only batch_size",
                sample.len_bytes
            ));
        }
        let Some((_, range)) = sample.kept_fields(decode).find(|(name, _)| *name == field) else {
            let fields: Vec<_> = sample.kept_fields(decode).map(|(name, _)| name).collect();
            let available = if fields.is_empty() { "no fields".to_owned() } else { fields.join(", ") };
            return Err(format!("no field {field:?} to take the label from: it has {available}"));
        };
        let at = |offset| part.range.start + usize::try_from(offset).unwrap_or_default();
        let bytes = bytes.get(at(range.start)..at(range.end)).unwrap_or_default();
        str::from_utf8(bytes).map_err(|error| format!("its field {field:?} is not text: {error}"))
    }
}
