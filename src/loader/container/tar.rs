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

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::super::testing::tar_file;
    use super::*;
    use crate::loader::failure::FailureCause;

    fn index_bytes(bytes: &[u8]) -> Result<Vec<ContainerMember>, FailureCause> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.rewind().unwrap();
        Ok(index(file, bytes.len() as u64)?)
    }

    fn refusal(bytes: &[u8]) -> String {
        index_bytes(bytes).expect_err("a broken archive").to_string()
    }

    /// A header block with a valid checksum.
    fn header(name: &str, kind: EntryType, size: u64) -> Vec<u8> {
        let mut header = ::tar::Header::new_gnu();
        header.set_path(name).unwrap();
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_cksum();
        header.as_bytes().to_vec()
    }

    #[test]
    fn members_are_grouped_by_name_up_to_the_first_dot() {
        let bytes = tar_file(&[
            ("a/0001.jpg", b"one"),
            ("a/0001.seg.png", b"two!"),
            ("b/0001.jpg", b"other directory"),
            ("v1.2/plain", b"no dot in the last part"),
            (".hidden", b""),
            ("a/0001.txt", b"too late: no neighbour"),
        ]);
        let samples = index_bytes(&bytes).unwrap();
        let names: Vec<_> = samples.iter().map(|sample| sample.name.as_str()).collect();
        assert_eq!(names, ["a/0001", "b/0001", "v1.2/plain", ".hidden", "a/0001"]);
        let index_of = |bytes: u64| usize::try_from(bytes).unwrap();
        let read = |range: &FileRange| &bytes[index_of(range.offset)..][..index_of(range.len_bytes)];
        assert_eq!(samples[0].ranges.iter().map(read).collect::<Vec<_>>(), [&b"one"[..], b"two!"]);
        assert_eq!(read(&samples[3].ranges[0]), b"");
    }

    #[test]
    fn long_names_count_and_directories_do_not() {
        let long = format!("{}/0.bin", "d".repeat(300));
        let mut archive = ::tar::Builder::new(Vec::new());
        archive.append_dir("dir", ".").unwrap();
        let mut head = ::tar::Header::new_gnu();
        head.set_size(2);
        archive.append_data(&mut head, &long, &b"ab"[..]).unwrap();
        let samples = index_bytes(&archive.into_inner().unwrap()).unwrap();
        assert_eq!(samples.len(), 1);
        assert_eq!(samples[0].name, long.strip_suffix(".bin").unwrap());
        assert_eq!(samples[0].ranges[0].len_bytes, 2);
    }

    #[test]
    fn an_empty_archive_has_no_samples() {
        assert_eq!(index_bytes(&tar_file(&[])).unwrap(), []);
    }

    #[test]
    fn every_cut_before_the_end_mark_is_refused() {
        let bytes = tar_file(&[("0.a", &[1; 700]), ("0.b", b""), ("1.a", &[2; 512])]);
        let mark = bytes.len() - 1024;
        assert!(index_bytes(&bytes[..mark + 512]).is_ok(), "one block of zeros is a mark");
        for len in (0..mark + 512).step_by(4).chain([1, 511, 513, mark - 1, mark, mark + 1]) {
            assert!(refusal(&bytes[..len]).starts_with("broken tar"), "cut to {len} bytes");
        }
    }

    #[test]
    fn false_headers_are_refused() {
        let end_mark = [0; 1024];
        for claimed_bytes in [1025, 8 << 30, u64::MAX / 2, u64::MAX - 1, u64::MAX] {
            refusal(&[&header("x.bin", EntryType::Regular, claimed_bytes)[..], &end_mark[..]].concat());
        }
        // A name of two megabytes that the file really has (tar-I3).
        let run = 2 * MAX_HEADER_RUN_BYTES;
        let mut name = header("long", EntryType::GNULongName, run);
        name.resize(name.len() + usize::try_from(run).unwrap(), b'n');
        assert!(refusal(&[&name[..], &end_mark[..]].concat()).contains("longer than 1048576 bytes"));
        // A name without its member, a flipped bit, and noise.
        refusal(&[&header("long", EntryType::GNULongName, 3)[..], b"abc", &[0; 509][..], &end_mark[..]].concat());
        let mut flipped = tar_file(&[("0.a", b"x")]);
        flipped[3] ^= 1;
        assert!(refusal(&flipped).contains("checksum"));
        refusal(&[0x5a; 4096]);
    }

    #[test]
    fn malformed_and_sparse_records_are_refused() {
        let archive = |records: &str| {
            let mut bytes = header("records", EntryType::XHeader, records.len() as u64);
            bytes.extend_from_slice(records.as_bytes());
            bytes.resize(1024, 0);
            bytes.extend(header("x.bin", EntryType::Regular, 3));
            bytes.extend_from_slice(b"abc");
            bytes.resize(4 * 512 + 1024, 0);
            bytes
        };
        assert_eq!(index_bytes(&archive("10 path=y\n")).unwrap()[0].name, "y");
        assert!(refusal(&archive("22 GNU.sparse.major=1\n")).contains("stored sparse"));
        for malformed in ["no record", "99 path=y\n", "10 path:y\n"] {
            assert!(refusal(&archive(malformed)).contains("broken tar: x.bin: "), "{malformed}");
        }
    }
}
