//! From a planned batch to bytes in a buffer.
//!
//! Owns the reading of files and of synthetic data, and the checksums of what was read. Reads into a slice that is the
//! pinned memory itself, so the host copies nothing.
//!
//! ```text
//!   planned   [ a ][ b, truncated ][ c ]
//!   read      [ a ][ c ]                      a sample that fails leaves no gap
//! ```
//!
//! - **read-I1**: the samples read lie back to back from the start of the buffer, in the planned order.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rand::Rng;
use xxhash_rust::xxh3::Xxh3Default;

use super::batches::{PlannedBatch, Skipped};
use super::catalog::{Catalog, DataOrigin, Sample};
use super::failure::{Failure, FailureCause};
use super::run::StopFlag;
use super::synthetic::stream_of;

/// Bytes read at a time: few enough to be in the core's cache for the checksum, and to see a stop soon.
const CHUNK_BYTES: usize = 256 * 1024;

/// A sample in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchSegment {
    /// Index into [`Catalog::samples`].
    pub(super) sample: usize,
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
}

/// Reads samples for one worker. The last file stays open, since the next sample often lies in it.
#[derive(Debug)]
pub(super) struct SampleReader<'a> {
    catalog: &'a Catalog,
    stop: &'a StopFlag,
    verify: bool,
    open: Option<(usize, File)>,
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

impl<'a> SampleReader<'a> {
    pub(super) fn new(catalog: &'a Catalog, stop: &'a StopFlag, verify: bool) -> SampleReader<'a> {
        SampleReader { catalog, stop, verify, open: None }
    }

    /// Reads the samples of `batch` into `buffer`, which holds at least as many bytes. `None` if the run was stopped.
    pub(super) fn fill(&mut self, batch: &PlannedBatch, buffer: &mut [u8]) -> Option<BatchContents> {
        let mut contents = BatchContents::default();
        let mut rest = buffer;
        for &index in &batch.samples {
            let sample = &self.catalog.samples[index];
            // The buffer has the sum of these lengths, so each fits a usize and the rest of the buffer.
            let len_bytes = usize::try_from(sample.len_bytes).unwrap_or(usize::MAX).min(rest.len());
            match self.read(sample, &mut rest[..len_bytes]) {
                Ok(checksum) => {
                    let offset = contents.len_bytes;
                    contents.segments.push(BatchSegment { sample: index, offset, len_bytes, checksum });
                    contents.len_bytes += len_bytes;
                    rest = &mut rest[len_bytes..];
                }
                Err(ReadEnd::Stopped) => return None,
                Err(ReadEnd::Failed(cause)) => {
                    let failure = Failure::new(self.catalog.name(index), cause);
                    contents.skipped.push(Skipped { files: vec![sample.file], failure });
                }
            }
        }
        Some(contents)
    }

    /// Reads `sample` and returns its checksum, if the run verifies.
    fn read(&mut self, sample: &Sample, into: &mut [u8]) -> Result<Option<u64>, ReadEnd> {
        let mut progress = ReadProgress { stop: self.stop, hasher: self.verify.then(Xxh3Default::new) };
        match &self.catalog.files[sample.file].origin {
            DataOrigin::File(path) => {
                let file = self.open(sample.file, path)?;
                let mut rest = into;
                for range in &sample.ranges {
                    let len_bytes = usize::try_from(range.len_bytes).unwrap_or(usize::MAX).min(rest.len());
                    let (into, after) = rest.split_at_mut(len_bytes);
                    progress.read_at(file, range.offset, into)?;
                    rest = after;
                }
            }
            DataOrigin::Synthetic { seed, stream } => {
                let mut bytes = stream_of(*seed, *stream);
                for chunk in into.chunks_mut(CHUNK_BYTES) {
                    bytes.fill_bytes(chunk);
                    progress.advance(chunk)?;
                }
            }
        }
        Ok(progress.hasher.map(|hasher| hasher.digest()))
    }

    fn open(&mut self, file: usize, path: &Path) -> io::Result<&File> {
        let open = match self.open.take() {
            Some((number, open)) if number == file => open,
            _ => File::open(path)?,
        };
        Ok(&self.open.insert((file, open)).1)
    }
}

/// Looks at the stop flag after each chunk, and adds the chunk to the checksum while it is in the cache.
struct ReadProgress<'a> {
    stop: &'a StopFlag,
    hasher: Option<Xxh3Default>,
}

impl ReadProgress<'_> {
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
    fn a_stop_drops_the_batch() {
        let catalog = Catalog::synthetic(1, 1);
        let stop = StopFlag::new();
        stop.raise();
        let batch = PlannedBatch { number: 0, epoch: 0, samples: vec![0], len_bytes: catalog.len_bytes() };
        let mut buffer = vec![0; usize::try_from(batch.len_bytes).unwrap()];
        assert!(SampleReader::new(&catalog, &stop, false).fill(&batch, &mut buffer).is_none());
    }
}
