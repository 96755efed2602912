//! From a planned batch to bytes in a buffer.
//!
//! Reads into a slice of the pinned memory, so the host copies nothing. Fields that are decoded go through memory of the worker.
//!
//! ```text
//!   planned   [ a ][ b, truncated ][ c ]
//!   read      [ a ][ c ]                                a failed part leaves no gap
//!   decoded   [jpg a][jpg c]..[npy a][npy c]..[cls a][cls c]
//!             an array for each decoder       the other fields of all samples
//! ```
//!
//! - **read-I1**: the parts read are contiguous from the start of the buffer, in the planned order.
//! - **read-I2**: a file that differs from its listed length is a failure and is never truncated silently. Other changes
//!   to a file after it was listed are not detected.
//! - **decode-I1**: row `i` of each array belongs to part `i` of the batch. A failed sample leaves no row.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3Default;

use super::batches::{LoadedPart, PlannedBatch, SamplePart, Skipped};
use super::catalog::{Catalog, DataOrigin, FileRange, Sample};
use super::compressed::{Compression, Decoder};
use super::decode::{DecodedField, kept_fields, others};
use super::failure::{Failure, FailureCause};
use super::open_files::{OpenFile, OpenFiles, Turns};
use super::stop::StopFlag;
use super::synthetic::SyntheticBytes;

/// Bytes read at a time: few enough to stay in the core's cache for the checksum and to notice a stop soon.
const CHUNK_BYTES: usize = 256 * 1024;
/// Arrays begin at a multiple of this, the alignment of every NumPy type.
const ALIGN_BYTES: usize = 64;

/// What was read of a planned batch.
#[derive(Debug, Default)]
pub(super) struct BatchContents {
    pub(super) parts: Vec<LoadedPart>,
    pub(super) skipped: Vec<Skipped>,
    pub(super) len_bytes: usize,
    /// The array of each decoded field.
    pub(super) arrays: Vec<Range<usize>>,
}

/// Where the arrays of a batch begin, and where the other fields do. `None` if the batch is longer than memory can be.
fn array_starts(decode: &[DecodedField], samples: usize) -> Option<(Vec<usize>, usize)> {
    let mut end: usize = 0;
    let starts = decode.iter().map(|field| {
        let start = end;
        end = field.len_bytes().checked_mul(samples)?.checked_add(start)?.checked_next_multiple_of(ALIGN_BYTES)?;
        Some(start)
    });
    let starts = starts.collect::<Option<_>>()?;
    Some((starts, end))
}

/// Bytes of a batch; `usize::MAX` if that is not a number. The pool refuses a length beyond the address space.
pub(super) fn batch_bytes(decode: &[DecodedField], batch: &PlannedBatch, catalog: &Catalog) -> usize {
    let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    if decode.is_empty() {
        return bytes(batch.len_bytes);
    }
    let kept = |part: &SamplePart| {
        let last = kept_fields(decode, &catalog.samples()[part.sample]).last();
        last.map_or(0, |(_, range)| bytes(range.end))
    };
    let kept = batch.parts.iter().map(kept).fold(0, usize::saturating_add);
    array_starts(decode, batch.parts.len()).map_or(usize::MAX, |(_, end)| end.saturating_add(kept))
}

/// Reads samples for one worker. Within a batch the last file stays open, since the next sample is often in the same file.
#[derive(Debug)]
pub(super) struct SampleReader<'a> {
    pub(super) catalog: &'a Catalog,
    pub(super) stop: &'a StopFlag,
    pub(super) files: &'a OpenFiles,
    pub(super) verify: bool,
    // Declared before the file: a decoder releases its file before the file counts as closed.
    pub(super) decoder: Option<Decoder>,
    pub(super) open: Option<(usize, OpenFile<'a>)>,
}

/// Why a sample was not read to its end.
enum ReadEnd {
    Stopped,
    Failed(FailureCause),
}

impl<C: Into<FailureCause>> From<C> for ReadEnd {
    fn from(cause: C) -> ReadEnd {
        ReadEnd::Failed(cause.into())
    }
}

impl SampleReader<'_> {
    /// Reads the parts of `batch` into `buffer`, which holds [`batch_bytes`]. `None` if the run was stopped.
    pub(super) fn fill(
        &mut self,
        decode: &[DecodedField],
        batch: &PlannedBatch,
        turns: &mut Turns<'_>,
        buffer: &mut [u8],
    ) -> Option<BatchContents> {
        let mut contents = BatchContents::default();
        let (starts, arrays_end) = array_starts(decode, batch.parts.len())?;
        let (arrays, rest) = buffer.split_at_mut(arrays_end);
        let (mut encoded, mut end) = (Vec::new(), 0);
        for part in &batch.parts {
            let row = contents.parts.len();
            let filled = if decode.is_empty() {
                // The buffer has the sum of these lengths, so each fits the rest of the buffer.
                let len_bytes = usize::try_from(part.len_bytes).unwrap_or(usize::MAX).min(rest.len() - end);
                let read = self.read(part, turns, &mut rest[end..end + len_bytes]);
                read.map(|checksum| (len_bytes, checksum))
            } else {
                self.read_whole(part, turns, &mut encoded).and_then(|()| {
                    let rows =
                        decode.iter().zip(&starts).map(|(field, start)| (field, start + row * field.len_bytes()));
                    self.decode(part, &encoded, rows, arrays)?;
                    Ok((copy_kept(decode, &self.catalog.samples()[part.sample], &encoded, &mut rest[end..])?, None))
                })
            };
            match filled {
                Ok((len_bytes, checksum)) => {
                    let (start, SamplePart { sample, start: first, .. }) = (arrays_end + end, *part);
                    contents.parts.push(LoadedPart { sample, bytes: start..start + len_bytes, start: first, checksum });
                    end += len_bytes;
                }
                Err(ReadEnd::Stopped) => return None,
                Err(ReadEnd::Failed(cause)) => {
                    let failure = Failure::new(self.catalog.name(part.sample), cause);
                    let files = vec![self.catalog.samples()[part.sample].file];
                    contents.skipped.push(Skipped { files, failure });
                }
            }
        }
        let rows = contents.parts.len();
        if rows > 0 {
            let array = |(field, &start): (&DecodedField, &usize)| start..start + rows * field.len_bytes();
            contents.arrays = decode.iter().zip(&starts).map(array).collect();
            contents.len_bytes = arrays_end + end;
        }
        Some(contents)
    }

    /// Reads a sample from its first byte to its last into memory of the worker.
    fn read_whole(&mut self, part: &SamplePart, turns: &mut Turns<'_>, into: &mut Vec<u8>) -> Result<(), ReadEnd> {
        let too_long = || io::Error::from(io::ErrorKind::OutOfMemory);
        let len_bytes = usize::try_from(part.len_bytes).map_err(|_| too_long())?;
        into.try_reserve(len_bytes.saturating_sub(into.len())).map_err(|_| too_long())?;
        // The old bytes stay: the read overwrites all of them, or fails.
        into.resize(len_bytes, 0);
        self.read(part, turns, into).map(drop)
    }

    /// Decodes each field into its row, which begins at the given byte of `arrays`.
    fn decode<'f>(
        &self,
        part: &SamplePart,
        encoded: &[u8],
        rows: impl Iterator<Item = (&'f DecodedField, usize)>,
        arrays: &mut [u8],
    ) -> Result<(), FailureCause> {
        for (field, start) in rows {
            let bytes = slice_of(encoded, &field.of(self.catalog, &self.catalog.samples()[part.sample])?)?;
            let decoded = field.decoder.decode(bytes, &mut arrays[start..start + field.len_bytes()]);
            let named = |why| FailureCause::Decode(format!("its {} cannot be decoded: {why}", field.names.join(";")));
            decoded.map_err(named)?;
        }
        Ok(())
    }

    /// Reads a part of a sample and returns its checksum, if the run verifies.
    fn read(&mut self, part: &SamplePart, turns: &mut Turns<'_>, into: &mut [u8]) -> Result<Option<u64>, ReadEnd> {
        let mut progress = ReadProgress { stop: self.stop, hasher: self.verify.then(Xxh3Default::new) };
        let sample = &self.catalog.samples()[part.sample];
        let file = &self.catalog.files()[sample.file];
        match &file.origin {
            DataOrigin::File(path) => {
                self.open(sample.file, path, file.compression, turns)?;
                self.read_ranges(sample, part, &mut progress, into)?;
            }
            DataOrigin::Synthetic { seed, stream } => {
                let mut bytes = SyntheticBytes::new(*seed, *stream, part.start);
                for chunk in into.chunks_mut(CHUNK_BYTES) {
                    bytes.fill(chunk);
                    progress.advance(chunk)?;
                }
            }
        }
        Ok(progress.hasher.as_ref().map(Xxh3Default::digest))
    }

    /// Opens a file after closing another one (open-I1). A compressed file is opened on its turn and continues where the
    /// previous batch ended.
    fn open(
        &mut self,
        file: usize,
        path: &Path,
        compression: Option<Compression>,
        turns: &mut Turns<'_>,
    ) -> io::Result<()> {
        if self.open.as_ref().is_some_and(|(number, _)| *number == file) {
            return Ok(());
        }
        self.leave_file(turns);
        let mut decoder = compression.and_then(|_| turns.take(file));
        let open = self.files.open(path)?;
        match (&mut decoder, compression) {
            (Some(decoder), _) => decoder.reopen(open.share())?,
            (None, Some(compression)) => decoder = Some(Decoder::new(open.share(), compression)?),
            (None, None) => {}
        }
        (self.decoder, self.open) = (decoder, Some((file, open)));
        Ok(())
    }

    /// Closes the file and passes its decoder to the next batch that reads the file. A worker that waits for its next batch
    /// holds no descriptor that another worker may need.
    pub(super) fn leave_file(&mut self, turns: &mut Turns<'_>) {
        if let Some((file, open)) = self.open.take() {
            if let Some(decoder) = self.decoder.take() {
                turns.end(file, Some(decoder));
            }
            drop(open);
        }
    }

    /// Reads a part of `sample` from the open file, or from its data if the file is compressed.
    fn read_ranges(
        &mut self,
        sample: &Sample,
        part: &SamplePart,
        progress: &mut ReadProgress<'_>,
        into: &mut [u8],
    ) -> Result<(), ReadEnd> {
        let Some((_, file)) = &self.open else { return Ok(()) };
        let mut rest = into;
        for range in ranges_of(sample, part) {
            let len_bytes = usize::try_from(range.len_bytes).unwrap_or(usize::MAX).min(rest.len());
            let (into, after) = rest.split_at_mut(len_bytes);
            match &mut self.decoder {
                None => progress.read(into, |into, at| Ok(file.read_at(into, range.offset + at)?))?,
                Some(decoder) => {
                    if decoder.at() > range.offset {
                        // An earlier epoch has read further.
                        *decoder = Decoder::new(file.share(), decoder.compression())?;
                    }
                    while decoder.at() < range.offset {
                        if !decoder.skip_towards(range.offset)? && decoder.at() < range.offset {
                            return Err(
                                FailureCause::Truncated { planned_bytes: range.len_bytes, read_bytes: 0 }.into()
                            );
                        }
                        progress.advance(&[])?;
                    }
                    progress.read(into, |into, _| decoder.read(into))?;
                }
            }
            rest = after;
        }
        // The file must still end at its listed length.
        if sample.member.is_none() && part.start + part.len_bytes == sample.len_bytes {
            let found_bytes = match &mut self.decoder {
                None => file.metadata()?.len(),
                Some(decoder) => {
                    while decoder.skip_towards(u64::MAX)? {
                        progress.advance(&[])?;
                    }
                    decoder.at()
                }
            };
            if found_bytes > sample.len_bytes {
                return Err(FailureCause::Grown { planned_bytes: sample.len_bytes, found_bytes }.into());
            }
        }
        Ok(())
    }
}

/// The bytes of `part` in the file of its sample.
fn ranges_of(sample: &Sample, part: &SamplePart) -> impl Iterator<Item = FileRange> {
    let (mut skip, mut left) = (part.start, part.len_bytes);
    sample.ranges.iter().filter_map(move |range| {
        let skipped = skip.min(range.len_bytes);
        skip -= skipped;
        let len_bytes = left.min(range.len_bytes - skipped);
        left -= len_bytes;
        (len_bytes > 0).then(|| FileRange { offset: range.offset + skipped, len_bytes })
    })
}

/// Copies the fields without a decoder to the start of `into`. Returns their length.
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

/// Checks the stop flag after each chunk, and adds the chunk to the checksum while it is in the cache.
struct ReadProgress<'a> {
    stop: &'a StopFlag,
    hasher: Option<Xxh3Default>,
}

impl ReadProgress<'_> {
    /// Fills `into` by `read`, which gets a chunk and its offset and returns how many bytes it read.
    fn read(
        &mut self,
        into: &mut [u8],
        mut read: impl FnMut(&mut [u8], u64) -> Result<usize, FailureCause>,
    ) -> Result<(), ReadEnd> {
        let mut at = 0;
        while at < into.len() {
            let end = into.len().min(at + CHUNK_BYTES);
            match read(&mut into[at..end], at as u64) {
                Ok(0) => {
                    let (planned_bytes, read_bytes) = (into.len() as u64, at as u64);
                    return Err(FailureCause::Truncated { planned_bytes, read_bytes }.into());
                }
                Ok(read) => {
                    self.advance(&into[at..at + read])?;
                    at += read;
                }
                Err(FailureCause::Io(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(cause) => return Err(cause.into()),
            }
        }
        Ok(())
    }

    fn advance(&mut self, chunk: &[u8]) -> Result<(), ReadEnd> {
        if let Some(hasher) = &mut self.hasher {
            hasher.update(chunk);
        }
        if self.stop.is_raised() { Err(ReadEnd::Stopped) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::open_files::Decoders;
    use super::*;

    #[test]
    fn a_stop_drops_the_batch() {
        let catalog = Catalog::synthetic(1, 1);
        let stop = StopFlag::new();
        stop.raise();
        let part = SamplePart { sample: 0, start: 0, len_bytes: catalog.len_bytes() };
        let batch = PlannedBatch { parts: vec![part], len_bytes: part.len_bytes, ..PlannedBatch::default() };
        let mut buffer = vec![0; usize::try_from(batch.len_bytes).unwrap()];
        let (files, decoders) = (OpenFiles::default(), Decoders::default());
        let (catalog, stop, files) = (&catalog, &stop, &files);
        let mut reader = SampleReader { catalog, stop, files, verify: false, decoder: None, open: None };
        assert!(reader.fill(&[], &batch, &mut decoders.turns(&[]), &mut buffer).is_none());
    }

    #[test]
    fn the_ranges_of_parts_are_those_of_the_sample() {
        let lengths = [0, 5, 1, 0, 7, 3];
        let offsets = [10, 100, 200, 300, 400, 500];
        let ranges: Vec<_> =
            offsets.iter().zip(lengths).map(|(&offset, len_bytes)| FileRange { offset, len_bytes }).collect();
        let bytes_of = |range: FileRange| range.offset..range.offset + range.len_bytes;
        let all: Vec<u64> = ranges.iter().copied().flat_map(bytes_of).collect();
        let sample = Sample {
            file: 0,
            member: None,
            ranges: ranges.into(),
            len_bytes: all.len() as u64,
            fields: Box::default(),
        };
        for step in 1..=all.len() {
            let parts = (0..sample.len_bytes).step_by(step).map(|start| {
                let len_bytes = (sample.len_bytes - start).min(step as u64);
                SamplePart { sample: 0, start, len_bytes }
            });
            let read: Vec<u64> =
                parts.flat_map(|part| ranges_of(&sample, &part).flat_map(bytes_of).collect::<Vec<_>>()).collect();
            assert_eq!(read, all, "in parts of {step}");
        }
    }
}
