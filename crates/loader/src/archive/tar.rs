//! `.tar` shards as WebDataset writes them: members that share a name up to the first dot are one sample.
//!
//! Groups the members and makes checks that the `tar` crate lacks. Reads no data of members.
//!
//! ```text
//!   train/0001.jpg   train/0001.cls   train/0002.jpg        members
//!   '--------- train/0001 ---------'  '- train/0002 -'      samples: consecutive members of one key
//!              jpg              cls              jpg        their fields, in lower case
//! ```
//!
//! - **tar-I1**: a member ends within the file.
//! - **tar-I2**: the archive ends with a block of zeros, so an archive truncated between two members is refused.
//! - **tar-I3**: at most [`HEADER_RUN_BYTES_MAX`] are read for one header, even if it claims more.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;

use ::tar::{Archive, Entry, EntryType};

use crate::catalog::{ArchiveMember, FileRange};
use crate::compressed::Decompressor;
use crate::failure::FailureCause;

const BLOCK_BYTES: u64 = 512;
/// Largest length of a header with its long name and its PAX records.
const HEADER_RUN_BYTES_MAX: u64 = 1 << 20;

/// Lists the samples in the order of the archive.
pub(super) fn index(file: File, file_bytes: u64) -> Result<Vec<ArchiveMember>, FailureCause> {
    let listed = members(file, file_bytes).and_then(|(samples, last)| check_end(&last, file_bytes).map(|()| samples));
    listed.map_err(broken)
}

/// Lists the samples of an archive of unknown length, which is read to its end.
pub(super) fn index_forward(archive: &mut Decompressor) -> Result<Vec<ArchiveMember>, FailureCause> {
    let (samples, last) = members(&mut *archive, u64::MAX).map_err(broken)?;
    check_end(&last, archive.skip_to_end()?).map_err(broken)?;
    Ok(samples)
}

fn broken(error: io::Error) -> FailureCause {
    FailureCause::Tar(error.to_string())
}

/// The last member of the archive.
type Last = Option<(String, FileRange)>;

/// Checks that the last member and the end mark lie within the archive (tar-I1, tar-I2).
fn check_end(last: &Last, archive_bytes: u64) -> io::Result<()> {
    let mut end = 0;
    if let Some((name, range)) = last {
        check_within(name, *range, archive_bytes)?;
        // Data is padded to whole blocks; the next header or the end mark follows.
        end = (range.offset + range.len_bytes).next_multiple_of(BLOCK_BYTES);
    }
    if end + BLOCK_BYTES > archive_bytes {
        return Err(io::Error::other(format!("truncated: no end mark after byte {end}")));
    }
    Ok(())
}

fn check_within(member: &str, range: FileRange, archive_bytes: u64) -> io::Result<()> {
    let end = range.offset.checked_add(range.len_bytes);
    if end.is_some_and(|end| end <= archive_bytes && end <= u64::MAX - 2 * BLOCK_BYTES) {
        return Ok(());
    }
    let left_bytes = archive_bytes.saturating_sub(range.offset);
    Err(io::Error::other(format!("{member} claims {} bytes, {left_bytes} are left", range.len_bytes)))
}

fn members(archive: impl Read + Seek, archive_bytes: u64) -> io::Result<(Vec<ArchiveMember>, Last)> {
    let mut archive = Archive::new(HeaderReader { archive, left_bytes: HEADER_RUN_BYTES_MAX });
    let mut samples: Vec<ArchiveMember> = Vec::new();
    // Samples share the names of their fields.
    let mut names: HashSet<Arc<str>> = HashSet::new();
    let mut last = None;
    for entry in archive.entries_with_seek()? {
        let mut entry = entry?;
        let member = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        if is_sparse(&mut entry).map_err(|error| io::Error::other(format!("{member}: {error}")))? {
            return Err(io::Error::other(format!("{member} is stored sparse, which cannot be read in place")));
        }
        let range = FileRange { offset: entry.raw_file_position(), len_bytes: entry.size() };
        check_within(&member, range, archive_bytes)?;
        // Links, directories and metadata have no data.
        if matches!(entry.header().entry_type(), EntryType::Regular | EntryType::Continuous) {
            let (key, field) = key_and_field(&member);
            let field: Arc<str> = field.to_lowercase().into();
            let field = names.get(&field).cloned().unwrap_or(field);
            names.insert(field.clone());
            match samples.last_mut() {
                Some(sample) if sample.name == key => {
                    sample.ranges.push(range);
                    sample.fields.push(field);
                }
                _ => samples.push(ArchiveMember { name: key.to_string(), ranges: vec![range], fields: vec![field] }),
            }
        }
        last = Some((member, range));
    }
    Ok((samples, last))
}

/// Returns whether the member is stored sparse, by the old GNU type or by its PAX records. A malformed record is an error; the
/// crate ignores it.
fn is_sparse<R: Read>(entry: &mut Entry<'_, R>) -> io::Result<bool> {
    let mut sparse = entry.header().entry_type() == EntryType::GNUSparse;
    for record in entry.pax_extensions()?.into_iter().flatten() {
        sparse |= record?.key_bytes().starts_with(b"GNU.sparse.");
    }
    Ok(sparse)
}

/// Splits the path at the first dot of its last part. The second result is empty if the last part has no dot or starts with a dot.
fn key_and_field(path: &str) -> (&str, &str) {
    let base = path.rfind('/').map_or(0, |slash| slash + 1);
    match path[base..].find('.') {
        None | Some(0) => (path, ""),
        Some(dot) => (&path[..base + dot], &path[base + dot + 1..]),
    }
}

/// The archive as the `tar` crate reads it. The crate seeks before each header, so the bytes read between two seeks are one
/// header with its long name. More than [`HEADER_RUN_BYTES_MAX`] is an error (tar-I3).
struct HeaderReader<R> {
    archive: R,
    left_bytes: u64,
}

impl<R: Read> Read for HeaderReader<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.archive.read(into)?;
        self.left_bytes = self.left_bytes.checked_sub(read as u64).ok_or_else(|| {
            io::Error::other(format!("a header with its name is longer than {HEADER_RUN_BYTES_MAX} bytes"))
        })?;
        Ok(read)
    }
}

impl<R: Seek> Seek for HeaderReader<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.left_bytes = HEADER_RUN_BYTES_MAX;
        self.archive.seek(to)
    }
}
