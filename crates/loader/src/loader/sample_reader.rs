//! Reads planned batches into buffers.
//!
//! Samples are read directly into pinned memory. Encoded fields pass through memory of the thread.
//!
//! ```text
//!   planned   [ a ][ b, truncated ][ c ]
//!   read      [ a ][ c ]                                a failed part leaves no gap
//!   decoded   [jpg a][jpg c]..[npy a][npy c]..[cls a][cls c]
//!             an array for each decoder       the other fields of all samples
//! ```
//!
//! - **read-I1**: the parts read are contiguous from the start of the buffer, in the planned order.
//! - **read-I2**: a sample that its file no longer contains is a failure, as is a file of one sample that has grown since it
//!   was listed. Other changes are not detected.
//! - **decode-I1**: row `i` of each array belongs to part `i` of the batch. A failed sample leaves no row.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3Default;

use crate::batch_plan::{LoadedBatch, LoadedPart, PlannedBatch, SamplePart};
use crate::catalog::{Catalog, DataOrigin, FileRange, Sample};
use crate::compressed::{Decompressor, Turn};
use crate::decode::{DecodedField, undecoded_fields};
use crate::failure::FailureCause;
use crate::loader::Loader;
use crate::options::LoadOptions;
use crate::stop::StopFlag;
use crate::synthetic::SyntheticBytes;
use pinpool::{Error, PinnedBuf};
use pinpool_os::unwind::catch_panic;

/// Bytes read at a time, few enough to stay in the cache for the checksum and to stop soon.
const CHUNK_BYTES: usize = 256 * 1024;
/// Arrays begin at a multiple of this, the alignment of every NumPy type.
const ALIGN_BYTES: usize = 64;

/// Returns the start of each array of a batch, and the start of the other fields. Returns `None` if the batch exceeds the address space.
fn array_starts(decode: &[DecodedField], samples: usize) -> Option<(Vec<usize>, usize)> {
    let mut end: usize = 0;
    let starts = decode.iter().map(|field| {
        let start = end;
        end = field.len_bytes().checked_mul(samples)?.checked_add(start)?.checked_next_multiple_of(ALIGN_BYTES)?;
        Some(start)
    });
    Some((starts.collect::<Option<_>>()?, end))
}

/// Returns the number of bytes of a batch. On overflow returns `usize::MAX`: the pool refuses a length beyond the address space.
pub(super) fn batch_bytes(decode: &[DecodedField], batch: &PlannedBatch, catalog: &Catalog) -> usize {
    let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    if decode.is_empty() {
        return bytes(batch.len_bytes);
    }
    let kept = |part: &SamplePart| {
        let last = catalog.samples()[part.sample].kept_fields(decode).last();
        last.map_or(0, |(_, range)| bytes(range.end))
    };
    let kept = batch.parts.iter().map(kept).fold(0, usize::saturating_add);
    array_starts(decode, batch.parts.len()).map_or(usize::MAX, |(_, end)| end.saturating_add(kept))
}

/// An open file.
enum OpenFile {
    Plain(File),
    /// A compressed file, with the turn of this batch.
    Compressed(Decompressor, Option<Turn>),
}

/// Reads samples for one thread. Within a batch the last file stays open, since the next sample is often in the same file.
pub(super) struct SampleReader<'a> {
    loader: &'a Loader,
    /// The open file, with its index in [`Catalog::files`].
    open: Option<(usize, OpenFile)>,
}

/// The reason why a sample was not read completely.
enum ReadEnd {
    Stopped,
    Failed(FailureCause),
}

impl<C: Into<FailureCause>> From<C> for ReadEnd {
    fn from(cause: C) -> Self {
        Self::Failed(cause.into())
    }
}

impl<'a> SampleReader<'a> {
    pub(super) fn new(loader: &'a Loader) -> Self {
        SampleReader { loader, open: None }
    }

    /// Reads the planned batch into its buffer. If the pool failed, the batch contains that failure. Returns `None` if the
    /// run was stopped.
    pub(super) fn load(&mut self, mut planned: PlannedBatch, buffer: Result<PinnedBuf, Error>) -> Option<LoadedBatch> {
        let PlannedBatch { index_overall, epoch, index_in_epoch, .. } = planned;
        let mut batch = LoadedBatch { index_overall, epoch, index_in_epoch, ..LoadedBatch::default() };
        let filled = buffer.and_then(|mut buffer| {
            let len_bytes = self.fill(&mut planned, &mut batch, buffer.wait_slice_mut()?);
            self.leave_file();
            buffer.truncate(len_bytes.unwrap_or(0));
            Ok(len_bytes.map(|_| buffer))
        });
        match filled {
            Ok(None) => return None,
            // A buffer without a sample returns to the pool.
            Ok(buffer) => batch.buffer = buffer.filter(|buffer| !buffer.is_empty()).unwrap_or_default(),
            Err(error) => {
                let samples: Vec<_> = planned.parts.iter().map(|part| part.sample).collect();
                batch.failures.push(batch.failure(&self.loader.catalog, &samples, error));
            }
        }
        Some(batch)
    }

    /// Reads the parts of `planned` into `buffer`, which has the length [`batch_bytes`]. Returns the number of bytes used, or
    /// `None` if the run was stopped.
    fn fill(&mut self, planned: &mut PlannedBatch, batch: &mut LoadedBatch, buffer: &mut [u8]) -> Option<usize> {
        let Loader { catalog, options: LoadOptions { decode, .. }, .. } = self.loader;
        let PlannedBatch { parts, turns, .. } = planned;
        let (starts, arrays_end) = array_starts(decode, parts.len())?;
        let (arrays, rest) = buffer.split_at_mut(arrays_end);
        let (mut encoded, mut end) = (Vec::new(), 0);
        for part in &*parts {
            let row = batch.parts.len();
            let filled = if decode.is_empty() {
                // The buffer has the sum of these lengths, so each part fits into the rest of the buffer.
                let len_bytes = usize::try_from(part.len_bytes).unwrap_or(usize::MAX).min(rest.len() - end);
                self.read(part, turns, &mut rest[end..end + len_bytes]).map(|checksum| (len_bytes, checksum))
            } else {
                self.read_whole(part, turns, &mut encoded).and_then(|()| {
                    let sample = &catalog.samples()[part.sample];
                    for (field, start) in decode.iter().zip(&starts) {
                        let start = start + row * field.len_bytes();
                        decode_field(field, catalog, sample, &encoded, &mut arrays[start..start + field.len_bytes()])?;
                    }
                    Ok((copy_kept(decode, sample, &encoded, &mut rest[end..])?, None))
                })
            };
            match filled {
                Ok((len_bytes, checksum)) => {
                    let (start, SamplePart { sample, start: first, .. }) = (arrays_end + end, *part);
                    batch.parts.push(LoadedPart {
                        sample,
                        range: start..start + len_bytes,
                        sample_offset: first,
                        checksum,
                    });
                    end += len_bytes;
                }
                Err(ReadEnd::Stopped) => return None,
                Err(ReadEnd::Failed(cause)) => batch.failures.push(catalog.failure(part.sample, cause)),
            }
        }
        let rows = batch.parts.len();
        if rows == 0 {
            return Some(0);
        }
        let array = |(field, &start): (&DecodedField, &usize)| start..start + rows * field.len_bytes();
        batch.arrays = decode.iter().zip(&starts).map(array).collect();
        Some(arrays_end + end)
    }

    /// Reads a sample from its first byte to its last into memory of the thread.
    fn read_whole(&mut self, part: &SamplePart, turns: &mut Vec<Turn>, into: &mut Vec<u8>) -> Result<(), ReadEnd> {
        let too_long = || io::Error::from(io::ErrorKind::OutOfMemory);
        let len_bytes = usize::try_from(part.len_bytes).map_err(|_| too_long())?;
        into.try_reserve(len_bytes.saturating_sub(into.len())).map_err(|_| too_long())?;
        // No need to clear the old bytes: the read overwrites all of them, or fails.
        into.resize(len_bytes, 0);
        self.read(part, turns, into).map(drop)
    }

    /// Reads a part of a sample and returns its checksum, if the run verifies.
    fn read(&mut self, part: &SamplePart, turns: &mut Vec<Turn>, into: &mut [u8]) -> Result<Option<u64>, ReadEnd> {
        let Loader { catalog, options, stop, .. } = self.loader;
        let mut progress = ReadProgress { stop, hasher: options.verify.then(Xxh3Default::new) };
        let file = catalog.samples()[part.sample].file;
        match &catalog.files()[file].origin {
            DataOrigin::File(path) => {
                self.open(file, path, turns)?;
                self.read_ranges(path, part, &mut progress, into)?;
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

    /// Opens a file, after closing the previous one. A compressed file is opened when its turn comes, and continues at the
    /// place at which the previous batch ended.
    fn open(&mut self, file: usize, path: &Path, turns: &mut Vec<Turn>) -> io::Result<()> {
        if self.open.as_ref().is_some_and(|(number, _)| *number == file) {
            return Ok(());
        }
        self.leave_file();
        let Loader { catalog, stop, .. } = self.loader;
        let open = match catalog.files()[file].compression {
            None => OpenFile::Plain(File::open(path)?),
            Some(compression) => {
                let mut turn = turns.iter().position(|turn| turn.file == file).map(|at| turns.remove(at));
                let decoder = turn.as_mut().and_then(Turn::wait);
                OpenFile::Compressed(decoder.map_or_else(|| Decompressor::open(path, compression, stop), Ok)?, turn)
            }
        };
        self.open = Some((file, open));
        Ok(())
    }

    /// Closes the file, or passes its decompressor to the next batch that reads the file.
    fn leave_file(&mut self) {
        if let Some((_, OpenFile::Compressed(decoder, Some(turn)))) = self.open.take() {
            turn.end(decoder);
        }
    }

    /// Reads a part of a sample from the open file, or from its data if the file is compressed.
    fn read_ranges(
        &mut self,
        path: &Path,
        part: &SamplePart,
        progress: &mut ReadProgress<'_>,
        into: &mut [u8],
    ) -> Result<(), ReadEnd> {
        let Some((_, open)) = &mut self.open else { return Ok(()) };
        let sample = &self.loader.catalog.samples()[part.sample];
        let mut rest = into;
        for range in ranges_of(sample, part) {
            let len_bytes = usize::try_from(range.len_bytes).unwrap_or(usize::MAX).min(rest.len());
            let (into, after) = rest.split_at_mut(len_bytes);
            match open {
                OpenFile::Plain(file) => progress.read(into, |into, at| Ok(file.read_at(into, range.offset + at)?))?,
                OpenFile::Compressed(decoder, _) => {
                    if decoder.at > range.offset {
                        // A decompressor only reads forward, so earlier data is decompressed again from the start of the file.
                        *decoder = Decompressor::open(path, decoder.compression, &self.loader.stop)?;
                    }
                    decoder.skip_to(range.offset)?;
                    progress.advance(&[])?;
                    if decoder.at < range.offset {
                        return Err(FailureCause::Truncated { planned_bytes: range.len_bytes, read_bytes: 0 }.into());
                    }
                    progress.read(into, |into, _| decoder.decompress(into))?;
                }
            }
            rest = after;
        }
        // The file must still end at its listed length.
        if sample.member.is_none() && part.start + part.len_bytes == sample.len_bytes {
            let found_bytes = match open {
                OpenFile::Plain(file) => file.metadata()?.len(),
                OpenFile::Compressed(decoder, _) => {
                    let end = decoder.skip_to_end()?;
                    progress.advance(&[])?;
                    end
                }
            };
            if found_bytes > sample.len_bytes {
                return Err(FailureCause::Grown { planned_bytes: sample.len_bytes, found_bytes }.into());
            }
        }
        Ok(())
    }
}

/// Returns the ranges of `part` in the file of its sample.
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

/// Decodes a field of a sample that was read whole.
fn decode_field(
    field: &DecodedField,
    catalog: &Catalog,
    sample: &Sample,
    encoded: &[u8],
    into: &mut [u8],
) -> Result<(), FailureCause> {
    let bytes = slice_of(encoded, &field.of(catalog, sample)?)?;
    // A panic would end this thread, and with it the load.
    let decoded = catch_panic(|| field.decoder.decode(bytes, into));
    let decoded = decoded.unwrap_or_else(|| Err("the decoder panicked".into()));
    decoded.map_err(|why| FailureCause::Decode(format!("its {} cannot be decoded: {why}", field.names.join(";"))))
}

/// Copies the fields without a decoder to the start of `into`. Returns their length.
fn copy_kept(decode: &[DecodedField], sample: &Sample, encoded: &[u8], into: &mut [u8]) -> Result<usize, FailureCause> {
    undecoded_fields(decode, sample).try_fold(0, |end, (_, bytes)| {
        let bytes = slice_of(encoded, &bytes)?;
        into[end..end + bytes.len()].copy_from_slice(bytes);
        Ok(end + bytes.len())
    })
}

/// Returns these bytes of a sample that was read whole.
fn slice_of<'a>(encoded: &'a [u8], bytes: &Range<u64>) -> Result<&'a [u8], FailureCause> {
    let at = |at| usize::try_from(at).unwrap_or(usize::MAX);
    let truncated = FailureCause::Truncated { planned_bytes: bytes.end, read_bytes: encoded.len() as u64 };
    encoded.get(at(bytes.start)..at(bytes.end)).ok_or(truncated)
}

/// The progress of a read: after each chunk, checks the stop flag and updates the checksum.
struct ReadProgress<'a> {
    stop: &'a StopFlag,
    hasher: Option<Xxh3Default>,
}

impl ReadProgress<'_> {
    /// Fills `into` by calling `read`, which takes a chunk and its offset and returns the number of bytes read.
    fn read(
        &mut self,
        into: &mut [u8],
        mut read: impl FnMut(&mut [u8], u64) -> Result<usize, FailureCause>,
    ) -> Result<(), ReadEnd> {
        let mut at = 0;
        while at < into.len() {
            match read(into[at..].chunks_mut(CHUNK_BYTES).next().unwrap_or_default(), at as u64) {
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
    use super::*;

    #[test]
    fn parts_cover_the_ranges_of_their_sample() {
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
            field_names: Box::default(),
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
