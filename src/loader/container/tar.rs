//! `.tar` shards as WebDataset writes them: members that share a name up to the first dot are one sample.
//!
//! Owns the grouping and the checks that the `tar` crate leaves to its user. Never reads a member's data.
//!
//! ```text
//!   train/0001.jpg   train/0001.cls   train/0002.jpg        members
//!   '--------- train/0001 ---------'  '- train/0002 -'      samples: neighbours with one key
//! ```
//!
//! - **tar-I1**: a member ends within the file.
//! - **tar-I2**: the archive ends with a block of zeros, so an archive that was cut between two members is refused.
//! - **tar-I3**: at most [`MAX_HEADER_RUN_BYTES`] are read for one header, whatever length it claims.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use ::tar::{Archive, Entry, EntryType};

use crate::loader::catalog::{ContainerMember, FileRange};
use crate::loader::failure::TarError;

const BLOCK_BYTES: u64 = 512;
/// Bound on a header with its long name and its PAX records.
const MAX_HEADER_RUN_BYTES: u64 = 1 << 20;

/// Lists the samples, in the order in which they lie in the archive.
pub(super) fn index(file: File, file_bytes: u64) -> Result<Vec<ContainerMember>, TarError> {
    let mut archive = Archive::new(HeaderReader { file, left_bytes: MAX_HEADER_RUN_BYTES });
    let mut samples: Vec<ContainerMember> = Vec::new();
    let mut end = 0;
    for entry in archive.entries_with_seek()? {
        let mut entry = entry?;
        let member = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        match is_sparse(&mut entry) {
            Ok(false) => {}
            Ok(true) => return Err(TarError::Sparse { member }),
            Err(error) => return Err(TarError::Records { member, error }),
        }
        let range = FileRange { offset: entry.raw_file_position(), len_bytes: entry.size() };
        let data_end = range.offset.checked_add(range.len_bytes).filter(|end| *end <= file_bytes);
        let Some(data_end) = data_end else {
            let left_bytes = file_bytes.saturating_sub(range.offset);
            return Err(TarError::PastEnd { member, claimed_bytes: range.len_bytes, left_bytes });
        };
        // Data is padded to whole blocks; the next header or the end mark follows.
        end = data_end.next_multiple_of(BLOCK_BYTES);
        // Links, directories and metadata have no data of their own.
        if !matches!(entry.header().entry_type(), EntryType::Regular | EntryType::Continuous) {
            continue;
        }
        let key = key(&member);
        match samples.last_mut() {
            Some(sample) if sample.name == key => sample.ranges.push(range),
            _ => samples.push(ContainerMember { name: key.to_string(), ranges: vec![range] }),
        }
    }
    if end + BLOCK_BYTES > file_bytes {
        return Err(TarError::NoEndMark { end });
    }
    Ok(samples)
}

/// Whether the member is stored without its holes, by the old GNU type or by its PAX records. A malformed record is an error;
/// the crate ignores it.
fn is_sparse(entry: &mut Entry<'_, HeaderReader>) -> io::Result<bool> {
    let mut sparse = entry.header().entry_type() == EntryType::GNUSparse;
    for record in entry.pax_extensions()?.into_iter().flatten() {
        sparse |= record?.key_bytes().starts_with(b"GNU.sparse.");
    }
    Ok(sparse)
}

/// The path up to the first dot of its last part; the whole path if that part has no dot or starts with one.
fn key(path: &str) -> &str {
    let base = path.rfind('/').map_or(0, |slash| slash + 1);
    match path[base..].find('.') {
        None | Some(0) => path,
        Some(dot) => &path[..base + dot],
    }
}

/// The archive's file for the `tar` crate. The crate seeks before each header, so the bytes read between two seeks are one
/// header with its long name; more than the bound is an error (tar-I3).
struct HeaderReader {
    file: File,
    left_bytes: u64,
}

impl Read for HeaderReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(into)?;
        self.left_bytes = self.left_bytes.checked_sub(read as u64).ok_or_else(|| {
            io::Error::other(format!("a header with its name is longer than {MAX_HEADER_RUN_BYTES} bytes"))
        })?;
        Ok(read)
    }
}

impl Seek for HeaderReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.left_bytes = MAX_HEADER_RUN_BYTES;
        self.file.seek(to)
    }
}
