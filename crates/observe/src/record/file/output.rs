//! The open file of a recording, written block by block.

use std::fs::File;
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;

use super::format::{BLOCK_BYTES, Item, add_item, block};
use super::open::{Opened, flock};
use crate::record::Recorded;
use pinpool_os::file_id::FileId;

/// The file, up to the first write that fails, and the block that is being filled.
pub(super) struct Output {
    opened: Opened,
    is_compressed: bool,
    /// The head until it is written.
    head: Vec<u8>,
    items: Vec<u8>,
    /// Records of the block.
    records: u64,
    pub(super) recorded: Recorded,
}

impl Output {
    pub(super) fn new(opened: Opened, is_compressed: bool, head: Vec<u8>) -> Self {
        let (items, records, recorded) = Default::default();
        Self { opened, is_compressed, head, items, records, recorded }
    }

    /// Adds an item to the block, which is written if it is long enough.
    pub(super) fn add(&mut self, item: &Item) {
        self.records += u64::from(matches!(item, Item::Record(_)));
        add_item(&mut self.items, item);
        if self.items.len() >= BLOCK_BYTES {
            self.write();
        }
    }

    /// Writes the block.
    pub(super) fn write(&mut self) {
        let (items, records) = (std::mem::take(&mut self.items), std::mem::take(&mut self.records));
        if !items.is_empty() && self.recorded.failure.is_none() {
            self.recorded.failure = self.write_block(&block(&items)).err().map(|error| error.to_string());
        }
        let Recorded { records: written, lost, failure } = &mut self.recorded;
        *(if failure.is_none() { written } else { lost }) += records;
    }

    fn write_block(&mut self, block: &[u8]) -> io::Result<()> {
        let mut bytes = [&*std::mem::take(&mut self.head), block].concat();
        if self.is_compressed {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(&bytes)?;
            bytes = encoder.finish()?;
        }
        let mut file: &File = &self.opened.file;
        let written = file.write_all(&bytes);
        if let Some(end) = &mut self.opened.bytes {
            match written {
                Ok(()) => *end += bytes.len() as u64,
                // Nothing after a partial block could be read.
                Err(_) => _ = file.set_len(*end),
            }
        }
        written
    }

    /// Unlocks the file, and returns it with its length; `None` for a file without a length. The unlock is explicit because a child created
    /// without the `fork` handlers may hold a copy of the descriptor.
    pub(super) fn end(&self) -> Option<(FileId, u64)> {
        let Opened { file, bytes, .. } = &self.opened;
        let _ = flock(file, libc::LOCK_UN);
        file.metadata().ok().map(|metadata| FileId::from_metadata(&metadata)).zip(*bytes)
    }
}
