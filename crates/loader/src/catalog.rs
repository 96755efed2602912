//! The files to load and their samples. [`Catalog::from_paths`] and [`Catalog::synthetic`] make a catalog.
//!
//! ```text
//!   file 0  a.jpg              sample 0   [0 .. 5120)
//!   file 1  shard.tar          sample 1   0001: [512 .. 9000) [9728 .. 9730)     two members, one sample
//!                              sample 2   0002: [10752 .. 20000)
//!   file 2  w.safetensors      sample 3   wte: [264 .. 4360)
//!   file 3  more.tar.gz        sample 4   0003: [512 .. 9000)                    of the decompressed data
//! ```
//!
//! - **catalog-I1**: the samples of one file are consecutive, in the order of the file.
//! - **catalog-I2**: `Sample::len_bytes` is the sum of the sample's ranges, and each range lay within its file, or the data of
//!   its file, when the file was listed.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::compressed::Compression;
use crate::failure::{Failure, FailureCause};

/// A range of bytes in a file, or in the data of a compressed file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileRange {
    /// First byte.
    pub offset: u64,
    /// Number of bytes from `offset` on.
    pub len_bytes: u64,
}

/// The origin of the bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum DataOrigin {
    /// A regular file.
    File(PathBuf),
    /// A generator of pseudo-random bytes.
    Synthetic {
        /// Seed of the data set.
        seed: u64,
        /// Number of the file in the data set.
        stream: u64,
    },
}

impl fmt::Display for DataOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Synthetic { seed, stream } => write!(f, "synthetic-{seed}/{stream:08}"),
        }
    }
}

/// A plain file, an archive or a synthetic file.
#[derive(Debug)]
#[non_exhaustive]
pub struct DataFile {
    /// The origin of the bytes.
    pub origin: DataOrigin,
    /// Number of samples in it: 1 for a plain file, any number for an archive.
    pub samples: u64,
    /// `true` if it was opened as an archive.
    pub is_archive: bool,
    /// The compression, if it was opened as a compressed file. Such a file can only be read in order.
    pub compression: Option<Compression>,
}

/// The unit that is shuffled, counted and checked. Only a sample longer than the limit of a batch lies in several batches.
#[derive(Debug)]
#[non_exhaustive]
pub struct Sample {
    /// Index of its file in [`Catalog::files`].
    pub file: usize,
    /// Name inside an archive.
    pub member: Option<Box<str>>,
    /// Ranges of the bytes, in order.
    pub ranges: Box<[FileRange]>,
    /// Sum of the lengths of its ranges.
    pub len_bytes: u64,
    /// In a tar archive, the name of each range: the part of the member's base name after the first dot, in lower case. Otherwise
    /// empty.
    pub field_names: Box<[Arc<str>]>,
}

impl Sample {
    /// Returns the fields of a sample of a tar archive: their names, and the ranges of their bytes in the sample, in order.
    pub fn fields(&self) -> impl Iterator<Item = (&str, Range<u64>)> {
        let mut start = 0;
        self.field_names.iter().zip(&self.ranges).map(move |(name, range)| {
            let bytes = start..start + range.len_bytes;
            start = bytes.end;
            (&**name, bytes)
        })
    }
}

/// A sample as an archive lists it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ArchiveMember {
    pub(super) name: String,
    pub(super) ranges: Vec<FileRange>,
    /// A name for each range, or empty if the ranges have no names.
    pub(super) fields: Vec<Arc<str>>,
}

/// The content of a file.
#[derive(Debug, Default)]
pub(super) struct FileContent {
    /// The samples of an archive, in the order in which they lie in the file, or in its data if it is compressed.
    pub(super) members: Option<Vec<ArchiveMember>>,
    /// Length of the file or of its data, if it is one sample.
    pub(super) len_bytes: u64,
    pub(super) compression: Option<Compression>,
}

/// Everything that a run loads. Clones share the same lists.
#[derive(Debug, Default, Clone)]
pub struct Catalog {
    lists: Arc<CatalogLists>,
}

/// A catalog under construction.
#[derive(Debug, Default)]
pub(super) struct CatalogLists {
    pub(super) files: Vec<DataFile>,
    pub(super) samples: Vec<Sample>,
    pub(super) failures: Vec<Failure>,
    pub(super) skipped_links: Vec<PathBuf>,
    pub(super) special_files: Vec<PathBuf>,
}

impl Catalog {
    /// Returns the files and archives, in the order in which they were listed.
    pub fn files(&self) -> &[DataFile] {
        &self.lists.files
    }

    /// Returns the samples of all files (catalog-I1).
    pub fn samples(&self) -> &[Sample] {
        &self.lists.samples
    }

    /// Returns the paths and archives that could not be listed.
    pub fn failures(&self) -> &[Failure] {
        &self.lists.failures
    }

    /// Returns the symbolic links that were not followed because they lead back to a directory already entered.
    pub fn skipped_links(&self) -> &[PathBuf] {
        &self.lists.skipped_links
    }

    /// Returns the pipes, sockets and devices under directories, which are not loaded.
    pub fn special_files(&self) -> &[PathBuf] {
        &self.lists.special_files
    }

    /// Returns the bytes of all samples, which one epoch copies.
    pub fn len_bytes(&self) -> u64 {
        self.samples().iter().fold(0, |sum, sample| sum.saturating_add(sample.len_bytes))
    }

    /// Returns the name of a sample in failures: its path, `path!member` in an archive, or `sample N` if there is no such sample.
    pub fn name(&self, sample: usize) -> String {
        let Some(sample) = self.samples().get(sample) else { return format!("sample {sample}") };
        let origin = &self.files()[sample.file].origin;
        sample.member.as_ref().map_or_else(|| origin.to_string(), |member| format!("{origin}!{member}"))
    }

    /// Returns the failure of a sample.
    pub(super) fn failure(&self, sample: usize, cause: FailureCause) -> Failure {
        Failure { files: vec![self.samples()[sample].file], ..Failure::new(self.name(sample), cause) }
    }

    /// Returns the label of a sample: the name of the directory of a plain file, or the member's name in an archive. The
    /// label is empty for synthetic data and for a file without a directory.
    pub fn label(&self, sample: usize) -> Cow<'_, str> {
        let Some(sample) = self.samples().get(sample) else { return Cow::Borrowed("") };
        match (&sample.member, &self.files()[sample.file].origin) {
            (Some(member), _) => Cow::Borrowed(member),
            (None, DataOrigin::File(path)) => {
                path.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy()
            }
            (None, DataOrigin::Synthetic { .. }) => Cow::Borrowed(""),
        }
    }
}

impl CatalogLists {
    pub(super) fn finish(self) -> Catalog {
        Catalog { lists: Arc::new(self) }
    }

    /// Adds a file: an archive of `members`, or one sample of `len_bytes` bytes.
    pub(super) fn push(&mut self, origin: DataOrigin, content: FileContent) {
        let FileContent { members, len_bytes, compression } = content;
        let is_archive = members.is_some();
        let samples = members.as_ref().map_or(1, Vec::len) as u64;
        match members {
            None => self.push_sample(None, vec![FileRange { offset: 0, len_bytes }], Vec::new()),
            Some(members) => members.into_iter().for_each(|ArchiveMember { name, ranges, fields }| {
                self.push_sample(Some(name.into_boxed_str()), ranges, fields);
            }),
        }
        self.files.push(DataFile { origin, samples, is_archive, compression });
    }

    /// Adds a sample of the file that is pushed next.
    fn push_sample(&mut self, member: Option<Box<str>>, ranges: Vec<FileRange>, field_names: Vec<Arc<str>>) {
        // The sum saturates, since sparse files can be longer than any buffer; the pool's error then contains the sum.
        let len_bytes = ranges.iter().fold(0u64, |sum, range| sum.saturating_add(range.len_bytes));
        let (ranges, field_names) = (ranges.into(), field_names.into());
        self.samples.push(Sample { file: self.files.len(), member, ranges, len_bytes, field_names });
    }
}
