//! From a planned batch to bytes in a buffer.
//!
//! Owns the reading of files and of the generator, and the checksum taken on the way. Knows a buffer only as a slice, which
//! is the pinned memory itself: there is no copy in between.
//!
//! ```text
//!   planned   [ a ][ b, truncated ][ c ]
//!   filled    [ a ][ c ]                      a sample that fails leaves no hole
//! ```
//!
//! I1. The samples read lie back to back from the start of the buffer, in the planned order.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use xxhash_rust::xxh3::Xxh3Default;

use super::catalog::{Catalog, Origin, Sample};
use super::failure::{Cause, Failure};
use super::plan::Planned;
use super::stop::Stop;
use super::synthetic::Generator;

/// Bytes read at a time: what a core's cache holds until they are summed, and how soon a stop is seen.
const CHUNK_BYTES: usize = 256 * 1024;

/// A sample where it lies in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    /// Index into [`Catalog::samples`].
    pub(super) sample: usize,
    /// First byte in the batch.
    pub(super) offset: usize,
    /// Bytes from there.
    pub(super) len_bytes: usize,
    /// XXH3 of the bytes as they were read, if the run verifies.
    pub(super) checksum: Option<u64>,
}

/// What became of a planned batch.
#[derive(Debug, Default)]
pub(super) struct Filled {
    pub(super) segments: Vec<Segment>,
    pub(super) losses: Vec<Loss>,
    pub(super) len_bytes: usize,
}

/// A failure and the sources that it spoils.
#[derive(Debug)]
pub(super) struct Loss {
    pub(super) sources: Vec<usize>,
    pub(super) failure: Failure,
}

/// One worker's hands: the file it read from last stays open, since the next sample often lies in it.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    catalog: &'a Catalog,
    stop: &'a Stop,
    verify: bool,
    last: Option<(usize, Tap)>,
}

#[derive(Debug)]
enum Tap {
    File(File),
    Seeded { seed: u64, stream: u64 },
}

impl<'a> Reader<'a> {
    pub(super) fn new(catalog: &'a Catalog, stop: &'a Stop, verify: bool) -> Reader<'a> {
        Reader { catalog, stop, verify, last: None }
    }

    /// Reads the samples of `planned` into `buffer`, which is at least as long as they are. `None`: stopped on the way.
    pub(super) fn fill(&mut self, planned: &Planned, buffer: &mut [u8]) -> Option<Filled> {
        let mut filled = Filled::default();
        let mut rest = buffer;
        for &index in &planned.samples {
            let sample = &self.catalog.samples[index];
            // The buffer was got for the sum of these lengths, so each fits a usize and what is left of the buffer.
            let len_bytes = usize::try_from(sample.len_bytes).unwrap_or(usize::MAX).min(rest.len());
            match self.read(sample, &mut rest[..len_bytes]) {
                Ok(checksum) => {
                    filled.segments.push(Segment { sample: index, offset: filled.len_bytes, len_bytes, checksum });
                    filled.len_bytes += len_bytes;
                    rest = &mut rest[len_bytes..];
                }
                Err(Cause::Stopped) => return None,
                Err(cause) => {
                    let failure = Failure::new(self.catalog.name(index), cause);
                    filled.losses.push(Loss { sources: vec![sample.source], failure });
                }
            }
        }
        Some(filled)
    }

    fn read(&mut self, sample: &Sample, into: &mut [u8]) -> Result<Option<u64>, Cause> {
        let mut progress = Progress { stop: self.stop, sum: self.verify.then(Xxh3Default::new) };
        let tap = self.open(sample.source)?;
        let mut at = 0;
        for extent in &sample.extents {
            let len_bytes = usize::try_from(extent.len_bytes).unwrap_or(usize::MAX).min(into.len() - at);
            let place = &mut into[at..at + len_bytes];
            match tap {
                Tap::File(file) => progress.read_at(file, extent.offset, place)?,
                Tap::Seeded { seed, stream } => progress.generate(Generator::new(*seed, *stream), place)?,
            }
            at += len_bytes;
        }
        Ok(progress.sum.map(|sum| sum.digest()))
    }

    fn open(&mut self, source: usize) -> Result<&Tap, Cause> {
        let last = match self.last.take() {
            Some((held, tap)) if held == source => tap,
            _ => match &self.catalog.sources[source].origin {
                Origin::File(path) => Tap::File(File::open(path)?),
                Origin::Seeded { seed, stream } => Tap::Seeded { seed: *seed, stream: *stream },
            },
        };
        Ok(&self.last.insert((source, last)).1)
    }
}

/// The chunk by chunk part, where a stop is seen and the sum grows while the bytes are still in the cache.
struct Progress<'a> {
    stop: &'a Stop,
    sum: Option<Xxh3Default>,
}

impl Progress<'_> {
    fn read_at(&mut self, file: &File, offset: u64, into: &mut [u8]) -> Result<(), Cause> {
        let planned_bytes = into.len() as u64;
        let mut at = 0;
        while at < into.len() {
            let end = into.len().min(at + CHUNK_BYTES);
            match file.read_at(&mut into[at..end], offset + at as u64) {
                Ok(0) => return Err(Cause::Truncated { planned_bytes, read_bytes: at as u64 }),
                Ok(read) => {
                    self.took(&into[at..at + read])?;
                    at += read;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn generate(&mut self, mut generator: Generator, into: &mut [u8]) -> Result<(), Cause> {
        for chunk in into.chunks_mut(CHUNK_BYTES) {
            generator.fill(chunk);
            self.took(chunk)?;
        }
        Ok(())
    }

    fn took(&mut self, bytes: &[u8]) -> Result<(), Cause> {
        if let Some(sum) = &mut self.sum {
            sum.update(bytes);
        }
        if self.stop.is_requested() { Err(Cause::Stopped) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use xxhash_rust::xxh3::xxh3_64;

    use super::super::container::testing::tar_file;
    use super::*;

    fn whole(catalog: &Catalog) -> Planned {
        let samples = (0..catalog.samples.len()).collect();
        Planned { number: 0, epoch: 0, samples, len_bytes: catalog.len_bytes() }
    }

    fn fill(catalog: &Catalog) -> (Filled, Vec<u8>) {
        let mut buffer = vec![0xee; usize::try_from(catalog.len_bytes()).unwrap()];
        let filled = Reader::new(catalog, &Stop::new(), true).fill(&whole(catalog), &mut buffer).unwrap();
        (filled, buffer)
    }

    fn put(dir: &Path, name: &str, bytes: &[u8]) {
        fs::write(dir.join(name), bytes).unwrap();
    }

    #[test]
    fn samples_lie_back_to_back_with_their_sums() {
        let dir = tempfile::tempdir().unwrap();
        let long: Vec<u8> = (0..251).cycle().take(CHUNK_BYTES + 77).collect();
        put(dir.path(), "a", b"first");
        put(dir.path(), "b", b"");
        put(dir.path(), "c", &long);
        put(dir.path(), "d.tar", &tar_file(&[("0.x", b"one"), ("0.y", b"two"), ("1.x", b"three")]));
        let (filled, buffer) = fill(&Catalog::of_paths(&[dir.path()], true, &Stop::new()));
        assert!(filled.losses.is_empty());
        let expected: [&[u8]; 5] = [b"first", b"", &long, b"onetwo", b"three"];
        assert_eq!(buffer, expected.concat());
        for (segment, bytes) in filled.segments.iter().zip(expected) {
            assert_eq!(&buffer[segment.offset..segment.offset + segment.len_bytes], bytes);
            assert_eq!(segment.checksum, Some(xxh3_64(bytes)));
        }
    }

    #[test]
    fn a_sample_that_fails_leaves_no_hole_and_is_named() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b", "c", "d"] {
            put(dir.path(), name, &name.repeat(100).into_bytes());
        }
        let catalog = Catalog::of_paths(&[dir.path()], false, &Stop::new());
        put(dir.path(), "b", b"only this is left");
        fs::remove_file(dir.path().join("c")).unwrap();
        put(dir.path(), "d", &b"d".repeat(500));
        let (filled, buffer) = fill(&catalog);
        assert_eq!(filled.len_bytes, 200);
        assert_eq!(
            &buffer[..200],
            ["a".repeat(100), "d".repeat(100)].concat().as_bytes(),
            "what grew is read as planned"
        );
        assert_eq!(filled.losses.len(), 2);
        assert_eq!(filled.losses[0].sources, [1]);
        assert_eq!(
            filled.losses[0].failure.to_string(),
            format!("{}: truncated: 17 of the 100 bytes planned could be read", dir.path().join("b").display())
        );
        assert!(matches!(&filled.losses[1].failure.cause, Cause::Io(error) if error.kind() == io::ErrorKind::NotFound));
    }

    #[test]
    fn a_stop_drops_the_batch() {
        let catalog = Catalog::synthetic(1, 1);
        let stop = Stop::new();
        stop.request();
        let mut buffer = vec![0; usize::try_from(catalog.len_bytes()).unwrap()];
        assert!(Reader::new(&catalog, &stop, false).fill(&whole(&catalog), &mut buffer).is_none());
    }
}
