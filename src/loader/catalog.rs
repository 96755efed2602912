//! What there is to load: sources (files on disk, or seeds) and the samples in them.
//!
//! Owns the list of sources and samples, and which files are opened as containers. Never reads a sample's bytes.
//!
//! ```text
//!   source 0  a.jpg              sample 0   [0 .. 5120)
//!   source 1  shard.tar          sample 1   0001: [512 .. 9000) [9728 .. 9730)     two members, one sample
//!                                sample 2   0002: [10752 .. 20000)
//!   source 2  w.safetensors      sample 3   wte: [264 .. 4360)
//! ```
//!
//! I1. Samples of one source are neighbours, in the order they lie in it.
//! I2. `Sample::len_bytes` is the sum of its extents, and each extent ended within its file when it was listed.

use std::fmt;
use std::path::{Path, PathBuf};

use super::container::Format;
use super::failure::Failure;
use super::stop::Stop;
use super::walk::{Found, Walked};

/// A run of bytes in a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes from there.
    pub len_bytes: u64,
}

/// Where the bytes of a source come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// A regular file.
    File(PathBuf),
    /// A generator: stream number `stream` of `seed`.
    Seeded {
        /// Seed of the data set.
        seed: u64,
        /// Number of this source in it.
        stream: u64,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File(path) => path.display().fmt(f),
            Origin::Seeded { seed, stream } => write!(f, "synthetic-{seed}/{stream:08}"),
        }
    }
}

/// A file, plain or container, or its synthetic stand-in.
#[derive(Debug)]
pub struct Source {
    /// Where its bytes come from.
    pub origin: Origin,
    /// How many samples it holds: 1 for a plain file, any number for a container.
    pub samples: u64,
}

/// The unit that is batched and shuffled, and never split.
#[derive(Debug)]
pub struct Sample {
    /// Index of its source in [`Catalog::sources`].
    pub source: usize,
    /// Its name inside a container.
    pub member: Option<Box<str>>,
    /// Its bytes, back to back.
    pub extents: Box<[Extent]>,
    /// Their sum.
    pub len_bytes: u64,
}

impl Sample {
    pub(super) fn new(source: usize, member: Option<String>, extents: Vec<Extent>) -> Sample {
        // Saturating: extents of sparse files may add up to more than any buffer; the pool then refuses with numbers.
        let len_bytes = extents.iter().fold(0u64, |sum, extent| sum.saturating_add(extent.len_bytes));
        Sample { source, member: member.map(String::into_boxed_str), extents: extents.into_boxed_slice(), len_bytes }
    }
}

/// Everything a run will load.
#[derive(Debug, Default)]
pub struct Catalog {
    /// Files and containers.
    pub sources: Vec<Source>,
    /// What they hold (I1).
    pub samples: Vec<Sample>,
    /// What was left out while the catalogue was made.
    pub failures: Vec<Failure>,
    /// Links that were not followed because they lead back.
    pub loops: Vec<PathBuf>,
}

impl Catalog {
    /// Lists the samples of the files that a walk found. A `.tar` or `.safetensors` file is opened as a container if it
    /// was named, or anywhere with `containers`; else it is a plain file like any other. Ends early if `stop` is raised.
    #[must_use]
    pub fn from_walk(walked: Walked, containers: bool, stop: &Stop) -> Catalog {
        let mut catalog = Catalog { failures: walked.failures, loops: walked.loops, ..Catalog::default() };
        for found in walked.files.into_iter().take_while(|_| !stop.is_requested()) {
            catalog.add(found, containers);
        }
        catalog
    }

    fn add(&mut self, found: Found, containers: bool) {
        let source = self.sources.len();
        let format = if found.named || containers { Format::of(&found.path) } else { None };
        let samples = match format {
            None => vec![Sample::new(source, None, vec![Extent { offset: 0, len_bytes: found.len_bytes }])],
            Some(format) => match format.index(&found.path) {
                Ok(members) => {
                    members.into_iter().map(|member| Sample::new(source, Some(member.name), member.extents)).collect()
                }
                Err(cause) => {
                    self.failures.push(Failure::new(found.path.display(), cause));
                    return;
                }
            },
        };
        self.sources.push(Source { origin: Origin::File(found.path), samples: samples.len() as u64 });
        self.samples.extend(samples);
    }

    /// Bytes of all samples: what one epoch moves.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.samples.iter().fold(0, |sum, sample| sum.saturating_add(sample.len_bytes))
    }

    /// The name a failure calls a sample by: `path`, or `path!member` in a container.
    #[must_use]
    pub fn name(&self, sample: usize) -> String {
        let Some(sample) = self.samples.get(sample) else { return format!("sample {sample}") };
        let origin = &self.sources[sample.source].origin;
        sample.member.as_ref().map_or_else(|| origin.to_string(), |member| format!("{origin}!{member}"))
    }

    /// Lists a file, a directory or several of each: [`walk`](super::walk::walk), then [`Catalog::from_walk`].
    #[must_use]
    pub fn of_paths<P: AsRef<Path>>(paths: &[P], containers: bool, stop: &Stop) -> Catalog {
        Catalog::from_walk(super::walk::walk(paths, stop), containers, stop)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::container::testing::{safetensors_file, tar_file};
    use super::*;

    #[test]
    fn a_container_is_opened_when_named_or_asked_for_and_else_read_plain() {
        let dir = tempfile::tempdir().unwrap();
        let shard = dir.path().join("shard.tar");
        fs::write(&shard, tar_file(&[("0.jpg", b"abc"), ("0.cls", b"7"), ("1.jpg", b"de")])).unwrap();
        let shard_bytes = fs::metadata(&shard).unwrap().len();

        let named = Catalog::of_paths(&[&shard], false, &Stop::new());
        assert_eq!((named.sources.len(), named.samples.len(), named.len_bytes()), (1, 2, 6));
        assert_eq!(named.name(1), format!("{}!1", shard.display()));

        let plain = Catalog::of_paths(&[dir.path()], false, &Stop::new());
        assert_eq!((plain.sources.len(), plain.samples.len(), plain.len_bytes()), (1, 1, shard_bytes));
        assert_eq!(plain.name(0), shard.display().to_string());

        let asked = Catalog::of_paths(&[dir.path()], true, &Stop::new());
        assert_eq!((asked.sources.len(), asked.samples.len(), asked.len_bytes()), (1, 2, 6));
    }

    #[test]
    fn a_broken_container_is_left_out_whole_and_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("bad.safetensors"), b"\xff\xff\xff\xff\xff\xff\xff\x7f{}").unwrap();
        fs::write(dir.path().join("bad.tar"), [b'x'; 1024]).unwrap();
        fs::write(dir.path().join("good.safetensors"), safetensors_file(&[("w", 16)])).unwrap();
        fs::write(dir.path().join("plain"), b"").unwrap();
        let catalog = Catalog::of_paths(&[dir.path()], true, &Stop::new());
        assert_eq!((catalog.sources.len(), catalog.samples.len(), catalog.len_bytes()), (2, 2, 16));
        let failed: Vec<_> = catalog.failures.iter().map(ToString::to_string).collect();
        assert_eq!(failed.len(), 2, "{failed:?}");
        assert!(failed[0].contains("bad.safetensors: broken safetensors"), "{failed:?}");
        assert!(failed[1].contains("bad.tar: broken tar"), "{failed:?}");
    }
}
