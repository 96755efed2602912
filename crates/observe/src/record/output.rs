//! The open file of a recording, written block by block.

use std::fs::File;
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::format::BlockWriter;
use super::open::flock;
use pinpool_os::child_descriptors::ParentOnly;
use pinpool_os::file_id::FileId;

/// The file, up to the first write that fails.
pub(super) struct Output {
    file: Option<ParentOnly<File>>,
    /// Length up to the last whole block; `None` for a file without a length.
    bytes: Option<u64>,
    /// The file and its length when it was closed.
    pub(super) left: Option<(FileId, u64)>,
    is_compressed: bool,
    /// The head until it is written.
    head: Vec<u8>,
    pub(super) failure: Option<String>,
}

impl Output {
    pub(super) fn new(file: ParentOnly<File>, bytes: Option<u64>, is_compressed: bool, head: Vec<u8>) -> Self {
        Self { file: Some(file), bytes, left: None, is_compressed, head, failure: None }
    }

    /// Writes the block. Returns how many records of it are in the file.
    pub(super) fn write(&mut self, block: &mut BlockWriter) -> u64 {
        if block.is_empty() {
            return 0;
        }
        let records = block.records;
        let mut bytes = std::mem::take(&mut self.head);
        bytes.extend(block.finish());
        let Some(file) = &self.file else { return 0 };
        let mut file: &File = file;
        let encoded = if self.is_compressed {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(&bytes).and_then(|()| encoder.finish())
        } else {
            Ok(bytes)
        };
        let written = encoded.and_then(|bytes| file.write_all(&bytes).map(|()| bytes.len() as u64));
        match written {
            Ok(written) => self.bytes = self.bytes.map(|bytes| bytes + written),
            Err(error) => {
                self.failure = Some(error.to_string());
                // Nothing after a partial block could be read.
                let _ = self.bytes.map(|bytes| file.set_len(bytes));
                self.close();
                return 0;
            }
        }
        records
    }

    /// Unlocks and closes the file. The unlock is explicit because a child created without the `fork` handlers may hold a copy of the
    /// descriptor.
    pub(super) fn close(&mut self) {
        let Some(file) = self.file.take() else { return };
        self.left = file.metadata().ok().map(|metadata| FileId::from_metadata(&metadata)).zip(self.bytes);
        let _ = flock(&file, libc::LOCK_UN);
    }
}
