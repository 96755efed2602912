//! Samples that are decoded while they are read: a batch is arrays then, and not the bytes of files.
//!
//! Owns where the arrays of a batch lie.
//!
//! ```text
//!   sample    jpg, npy, cls                        of an archive; a file has one field, its ending
//!   batch     [jpg 0][jpg 1][jpg 2]..[npy 0][npy 1][npy 2]..[cls 0][cls 1][cls 2]
//!             one array for each decoder           the other fields of all samples, as they are
//! ```
//!
//! - **decode-I1**: row `i` of each array is of the same sample, part `i` of the batch. A sample that fails leaves no row.

use std::ops::Range;

use super::batches::{PlannedBatch, SamplePart, Skipped};
use super::catalog::{Catalog, Sample};
use super::decode::{DecodedField, kept_fields, others};
use super::decoders::Turns;
use super::failure::{Failure, FailureCause};
use super::read::{BatchContents, BatchSegment, ReadEnd, SampleReader};

/// Arrays begin at a multiple of this: the alignment of every type of NumPy.
const ALIGN_BYTES: usize = 64;

/// Where the arrays of a batch begin, and what lies behind them.
struct ArrayPlaces {
    arrays: Vec<usize>,
    kept: usize,
}

impl ArrayPlaces {
    /// `None` if a batch of so many `samples` is longer than memory can be.
    fn of(decode: &[DecodedField], samples: usize) -> Option<Self> {
        let mut end: usize = 0;
        let arrays = decode.iter().map(|field| {
            let start = end;
            end = field.len_bytes().checked_mul(samples)?.checked_add(start)?;
            end = end.checked_next_multiple_of(ALIGN_BYTES)?;
            Some(start)
        });
        let arrays = arrays.collect::<Option<_>>()?;
        Some(Self { arrays, kept: end })
    }
}

/// Bytes of a batch; more than memory has if that is not a number.
pub(super) fn batch_bytes(decode: &[DecodedField], batch: &PlannedBatch, catalog: &Catalog) -> usize {
    let kept = |part: &SamplePart| {
        let last = kept_fields(decode, &catalog.samples()[part.sample]).last();
        last.map_or(0, |(_, bytes)| usize::try_from(bytes.end).unwrap_or(usize::MAX))
    };
    let kept = batch.parts.iter().map(kept).fold(0, usize::saturating_add);
    ArrayPlaces::of(decode, batch.parts.len()).map_or(usize::MAX, |places| places.kept.saturating_add(kept))
}

/// Reads the samples of `batch`, decodes their fields into `buffer`, and copies the others behind. `None` if the run was stopped.
pub(super) fn fill(
    decode: &[DecodedField],
    reader: &mut SampleReader<'_>,
    batch: &PlannedBatch,
    turns: &mut Turns<'_>,
    buffer: &mut [u8],
) -> Option<BatchContents> {
    let catalog = reader.catalog();
    let mut contents = BatchContents::default();
    let places = ArrayPlaces::of(decode, batch.parts.len())?;
    let (arrays, kept) = buffer.split_at_mut(places.kept);
    let (mut encoded, mut kept_bytes) = (Vec::new(), 0);
    for part in &batch.parts {
        let (sample, row) = (&catalog.samples()[part.sample], contents.segments.len());
        let filled = reader.read_whole(part, turns, &mut encoded).and_then(|()| {
            for (field, start) in decode.iter().zip(&places.arrays) {
                let bytes = field.of(catalog, sample).and_then(|bytes| slice_of(&encoded, &bytes))?;
                let (start, len) = (start + row * field.len_bytes(), field.len_bytes());
                let decoded = field.decoder.decode(bytes, &mut arrays[start..start + len]);
                decoded.map_err(|why| FailureCause::Decode { field: field.names.join(";"), why })?;
            }
            copy_kept(decode, sample, &encoded, &mut kept[kept_bytes..]).map_err(ReadEnd::Failed)
        });
        match filled {
            Ok(len_bytes) => {
                let (offset, sample) = (places.kept + kept_bytes, part.sample);
                contents.segments.push(BatchSegment { sample, start: 0, offset, len_bytes, checksum: None });
                kept_bytes += len_bytes;
            }
            Err(ReadEnd::Stopped) => return None,
            Err(ReadEnd::Failed(cause)) => {
                let failure = Failure::new(catalog.name(part.sample), cause);
                contents.skipped.push(Skipped { files: vec![sample.file], failure });
            }
        }
    }
    let rows = contents.segments.len();
    if rows > 0 {
        let array = |(field, &start): (&DecodedField, &usize)| start..start + rows * field.len_bytes();
        contents.arrays = decode.iter().zip(&places.arrays).map(array).collect();
        contents.len_bytes = places.kept + kept_bytes;
    }
    Some(contents)
}

/// Copies what no decoder takes to the start of `into`. Returns its length.
fn copy_kept(decode: &[DecodedField], sample: &Sample, encoded: &[u8], into: &mut [u8]) -> Result<usize, FailureCause> {
    others(decode, sample).try_fold(0, |end, (_, bytes)| {
        let bytes = slice_of(encoded, &bytes)?;
        into[end..end + bytes.len()].copy_from_slice(bytes);
        Ok(end + bytes.len())
    })
}

/// Bytes of a sample that was read whole.
fn slice_of<'a>(encoded: &'a [u8], bytes: &Range<u64>) -> Result<&'a [u8], FailureCause> {
    let at = |at| usize::try_from(at).unwrap_or(usize::MAX);
    let truncated = FailureCause::Truncated { planned_bytes: bytes.end, read_bytes: encoded.len() as u64 };
    encoded.get(at(bytes.start)..at(bytes.end)).ok_or(truncated)
}
