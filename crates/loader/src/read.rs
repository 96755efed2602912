//! From a planned batch to bytes in a buffer.
//!
//! Owns the reading of files and of synthetic data, and the checksums of what was read. Reads into a slice that is the
//! pinned memory itself, so the host copies nothing.
//!
//! ```text
//!   planned   [ a ][ b, truncated ][ c ]
//!   read      [ a ][ c ]                      a part that fails leaves no gap
//! ```
//!
//! - **read-I1**: the parts read lie back to back from the start of the buffer, in the planned order.
//! - **read-I2**: a file that is no longer as long as it was when it was listed is a failure, never cut silently. Other changes
//!   to a file after it was listed are not looked for.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use xxhash_rust::xxh3::Xxh3Default;

use super::batches::{PlannedBatch, SamplePart, Skipped};
use super::catalog::{Catalog, DataOrigin, FileRange, Sample};
use super::compressed::Decoder;
use super::compression::Compression;
use super::decoders::Turns;
use super::failure::{Failure, FailureCause};
use super::open_files::{OpenFile, OpenFiles};
use super::run::StopFlag;
use super::synthetic::SyntheticBytes;

/// Bytes read at a time: few enough to be in the core's cache for the checksum, and to see a stop soon.
const CHUNK_BYTES: usize = 256 * 1024;

/// A part of a sample in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchSegment {
    /// Index into [`Catalog::samples`].
    pub(super) sample: usize,
    /// First byte in the sample.
    pub(super) start: u64,
    /// First byte in the batch.
    pub(super) offset: usize,
    /// Bytes from there.
    pub(super) len_bytes: usize,
    /// XXH3 checksum of the bytes that were read, if the run verifies.
    pub(super) checksum: Option<u64>,
}

/// What was read of a planned batch.
#[derive(Debug, Default)]
pub(super) struct BatchContents {
    pub(super) segments: Vec<BatchSegment>,
    pub(super) skipped: Vec<Skipped>,
    pub(super) len_bytes: usize,
    /// Where the array of each decoded field lies.
    pub(super) arrays: Vec<Range<usize>>,
}

/// Reads samples for one worker. Within a batch the last file stays open, since the next sample often lies in it.
#[derive(Debug)]
pub(super) struct SampleReader<'a> {
    catalog: &'a Catalog,
    stop: &'a StopFlag,
    files: &'a OpenFiles,
    verify: bool,
    // In this order: a decoder leaves its file before the file counts as closed.
    decoder: Option<Decoder>,
    open: Option<(usize, OpenFile<'a>)>,
}

/// Why a sample was not read to its end.
pub(super) enum ReadEnd {
    Stopped,
    Failed(FailureCause),
}

impl<C: Into<FailureCause>> From<C> for ReadEnd {
    fn from(cause: C) -> ReadEnd {
        ReadEnd::Failed(cause.into())
    }
}

impl<'a> SampleReader<'a> {
    pub(super) fn new(
        catalog: &'a Catalog,
        stop: &'a StopFlag,
        files: &'a OpenFiles,
        verify: bool,
    ) -> SampleReader<'a> {
        SampleReader { catalog, stop, files, verify, decoder: None, open: None }
    }

    pub(super) fn catalog(&self) -> &'a Catalog {
        self.catalog
    }

    /// Reads a sample from its first byte to its last, into memory of its own.
    pub(super) fn read_whole(
        &mut self,
        part: &SamplePart,
        turns: &mut Turns<'_>,
        into: &mut Vec<u8>,
    ) -> Result<(), ReadEnd> {
        let too_long = || io::Error::from(io::ErrorKind::OutOfMemory);
        let len_bytes = usize::try_from(part.len_bytes).map_err(|_| too_long())?;
        into.clear();
        into.try_reserve(len_bytes).map_err(|_| too_long())?;
        into.resize(len_bytes, 0);
        self.read(&self.catalog.samples()[part.sample], part, turns, into).map(drop)
    }

    /// Reads the parts of `batch` into `buffer`, which holds at least as many bytes. `None` if the run was stopped.
    pub(super) fn fill(
        &mut self,
        batch: &PlannedBatch,
        turns: &mut Turns<'_>,
        buffer: &mut [u8],
    ) -> Option<BatchContents> {
        let mut contents = BatchContents::default();
        let mut rest = buffer;
        for part in &batch.parts {
            let sample = &self.catalog.samples()[part.sample];
            // The buffer has the sum of these lengths, so each fits a usize and the rest of the buffer.
            let len_bytes = usize::try_from(part.len_bytes).unwrap_or(usize::MAX).min(rest.len());
            match self.read(sample, part, turns, &mut rest[..len_bytes]) {
                Ok(checksum) => {
                    let offset = contents.len_bytes;
                    let SamplePart { sample, start, .. } = *part;
                    contents.segments.push(BatchSegment { sample, start, offset, len_bytes, checksum });
                    contents.len_bytes += len_bytes;
                    rest = &mut rest[len_bytes..];
                }
                Err(ReadEnd::Stopped) => return None,
                Err(ReadEnd::Failed(cause)) => {
                    let failure = Failure::new(self.catalog.name(part.sample), cause);
                    contents.skipped.push(Skipped { files: vec![sample.file], failure });
                }
            }
        }
        Some(contents)
    }

    /// Reads a part of `sample` and returns its checksum, if the run verifies.
    fn read(
        &mut self,
        sample: &Sample,
        part: &SamplePart,
        turns: &mut Turns<'_>,
        into: &mut [u8],
    ) -> Result<Option<u64>, ReadEnd> {
        let mut progress = ReadProgress { stop: self.stop, hasher: self.verify.then(Xxh3Default::new) };
        let file = &self.catalog.files()[sample.file];
        match &file.origin {
            DataOrigin::File(path) => {
                if let Some(compression) = file.compression {
                    self.open_decoder(sample.file, path, compression, turns)?;
                    self.decompress(sample, part, compression, &mut progress, into)?;
                    return Ok(progress.checksum());
                }
                let file = self.open(sample.file, path, turns)?;
                let mut rest = into;
                for range in ranges_of(sample, part) {
                    let len_bytes = usize::try_from(range.len_bytes).unwrap_or(usize::MAX).min(rest.len());
                    let (into, after) = rest.split_at_mut(len_bytes);
                    progress.read_at(file, range.offset, into)?;
                    rest = after;
                }
                let is_end_of_file = sample.member.is_none() && part.start + part.len_bytes == sample.len_bytes;
                if is_end_of_file {
                    check_length(file, sample.len_bytes)?;
                }
            }
            DataOrigin::Synthetic { seed, stream } => {
                let mut bytes = SyntheticBytes::new(*seed, *stream, part.start);
                for chunk in into.chunks_mut(CHUNK_BYTES) {
                    bytes.fill(chunk);
                    progress.advance(chunk)?;
                }
            }
        }
        Ok(progress.checksum())
    }

    fn open(&mut self, file: usize, path: &Path, turns: &mut Turns<'_>) -> io::Result<&File> {
        // Closes another file first (open-I1).
        if self.open.as_ref().is_some_and(|(number, _)| *number != file) {
            self.leave_file(turns);
        }
        let open = match self.open.take() {
            Some((_, open)) => open,
            None => self.files.open(path)?,
        };
        Ok(&self.open.insert((file, open)).1)
    }

    /// Closes the file; its decoder, if it is compressed, goes to the next batch that reads it. A worker that waits for its next
    /// batch keeps no descriptor from another.
    pub(super) fn leave_file(&mut self, turns: &mut Turns<'_>) {
        if let Some((file, open)) = self.open.take() {
            if let Some(decoder) = self.decoder.take() {
                turns.end(file, Some(decoder));
            }
            drop(open);
        }
    }

    /// Opens a compressed file when its turn has come, where the batch before has ended.
    fn open_decoder(
        &mut self,
        file: usize,
        path: &Path,
        compression: Compression,
        turns: &mut Turns<'_>,
    ) -> io::Result<()> {
        if self.decoder.is_some() && self.open.as_ref().is_some_and(|(number, _)| *number == file) {
            return Ok(());
        }
        self.leave_file(turns);
        let left = turns.take(file);
        let open = self.files.open(path)?;
        let decoder = match left {
            Some(mut decoder) => {
                decoder.reopen(open.share())?;
                decoder
            }
            None => Decoder::new(open.share(), compression)?,
        };
        self.decoder = Some(decoder);
        self.open = Some((file, open));
        Ok(())
    }

    /// Reads a part of `sample` from the data of the open file.
    fn decompress(
        &mut self,
        sample: &Sample,
        part: &SamplePart,
        compression: Compression,
        progress: &mut ReadProgress<'_>,
        into: &mut [u8],
    ) -> Result<(), ReadEnd> {
        let (Some(decoder), Some((_, open))) = (&mut self.decoder, &self.open) else { return Ok(()) };
        let mut rest = into;
        for range in ranges_of(sample, part) {
            if decoder.at() > range.offset {
                // An epoch before has gone further.
                *decoder = Decoder::new(open.share(), compression)?;
            }
            let len_bytes = usize::try_from(range.len_bytes).unwrap_or(usize::MAX).min(rest.len());
            let (into, after) = rest.split_at_mut(len_bytes);
            progress.decompress_at(decoder, range.offset, into)?;
            rest = after;
        }
        let is_end_of_file = sample.member.is_none() && part.start + part.len_bytes == sample.len_bytes;
        if is_end_of_file && decoder.read(&mut [0])? > 0 {
            while decoder.skip_towards(u64::MAX)? {
                progress.advance(&[])?;
            }
            let planned_bytes = sample.len_bytes;
            return Err(FailureCause::Grown { planned_bytes, found_bytes: decoder.at() }.into());
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

/// The file must still end where it ended when it was listed.
fn check_length(file: &File, listed_bytes: u64) -> Result<(), ReadEnd> {
    let found_bytes = file.metadata()?.len();
    if found_bytes > listed_bytes {
        return Err(FailureCause::Grown { planned_bytes: listed_bytes, found_bytes }.into());
    }
    Ok(())
}

/// Looks at the stop flag after each chunk, and adds the chunk to the checksum while it is in the cache.
struct ReadProgress<'a> {
    stop: &'a StopFlag,
    hasher: Option<Xxh3Default>,
}

impl ReadProgress<'_> {
    fn checksum(&self) -> Option<u64> {
        self.hasher.as_ref().map(Xxh3Default::digest)
    }

    fn read_at(&mut self, file: &File, offset: u64, into: &mut [u8]) -> Result<(), ReadEnd> {
        let mut at = 0;
        while at < into.len() {
            let end = into.len().min(at + CHUNK_BYTES);
            match file.read_at(&mut into[at..end], offset + at as u64) {
                Ok(0) => {
                    let (planned_bytes, read_bytes) = (into.len() as u64, at as u64);
                    return Err(FailureCause::Truncated { planned_bytes, read_bytes }.into());
                }
                Ok(read) => {
                    self.advance(&into[at..at + read])?;
                    at += read;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn decompress_at(&mut self, decoder: &mut Decoder, offset: u64, into: &mut [u8]) -> Result<(), ReadEnd> {
        let planned_bytes = into.len() as u64;
        let truncated = |read: usize| FailureCause::Truncated { planned_bytes, read_bytes: read as u64 };
        while decoder.at() < offset {
            if !decoder.skip_towards(offset)? && decoder.at() < offset {
                return Err(truncated(0).into());
            }
            self.advance(&[])?;
        }
        let mut at = 0;
        while at < into.len() {
            let end = into.len().min(at + CHUNK_BYTES);
            match decoder.read(&mut into[at..end])? {
                0 => return Err(truncated(at).into()),
                read => {
                    self.advance(&into[at..at + read])?;
                    at += read;
                }
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
    use super::super::decoders::Decoders;
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
        let mut reader = SampleReader::new(&catalog, &stop, &files, false);
        assert!(reader.fill(&batch, &mut decoders.turns(&[]), &mut buffer).is_none());
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
