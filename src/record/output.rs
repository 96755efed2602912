//! The file of a recording: opened for one process, written block by block.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

use super::Unrecorded;
use super::format::BlockWriter;

/// Opens `path` for this process alone, and returns its length if it has one. A file that is as long as this process has left
/// it is continued; another one is emptied.
pub(super) fn open(path: &Path, left_bytes: Option<Option<u64>>) -> Result<(File, Option<u64>), Unrecorded> {
    let failed = |error: io::Error| Unrecorded::Failed(error.to_string());
    // Not blocking: a pipe that nobody reads is refused, in place of a wait for its reader.
    let nonblocking = libc::O_NONBLOCK;
    let file = OpenOptions::new().create(true).append(true).custom_flags(nonblocking).open(path).map_err(failed)?;
    set_blocking(&file).map_err(failed)?;
    if flock(&file, libc::LOCK_EX | libc::LOCK_NB).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
        return Err(Unrecorded::Taken);
    }
    let metadata = file.metadata().map_err(failed)?;
    // A pipe or a terminal has no length.
    if !metadata.is_file() {
        return Ok((file, None));
    }
    let bytes = metadata.len();
    if left_bytes == Some(Some(bytes)) {
        return Ok((file, Some(bytes)));
    }
    file.set_len(0).map_err(failed)?;
    Ok((file, Some(0)))
}

/// From now on a write waits until the file takes it.
#[allow(unsafe_code)]
fn set_blocking(file: &File) -> io::Result<()> {
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(file);
    // SAFETY: the descriptor is open as long as `file` is.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    let result = unsafe { libc::fcntl(descriptor, libc::F_SETFL, flags & !libc::O_NONBLOCK) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[allow(unsafe_code)]
fn flock(file: &File, operation: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `file` is.
    let result = unsafe { libc::flock(std::os::fd::AsRawFd::as_raw_fd(file), operation) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The file, up to the first write that fails.
pub(super) struct Output {
    file: Option<File>,
    /// Its length up to the last whole block, if it has one.
    pub(super) bytes: Option<u64>,
    is_compressed: bool,
    /// The head, before it is written.
    head: Vec<u8>,
    pub(super) failure: Option<String>,
}

impl Output {
    pub(super) fn new(file: File, bytes: Option<u64>, is_compressed: bool, head: Vec<u8>) -> Self {
        Self { file: Some(file), bytes, is_compressed, head, failure: None }
    }

    /// Writes the block. Returns how many records of it are in the file.
    pub(super) fn write(&mut self, block: &mut BlockWriter) -> u64 {
        if block.is_empty() {
            return 0;
        }
        let records = block.records();
        let mut bytes = std::mem::take(&mut self.head);
        bytes.extend(block.finish());
        let Some(file) = &mut self.file else { return 0 };
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
                // What follows a torn block could not be read.
                let _ = self.bytes.map(|bytes| file.set_len(bytes));
                self.close();
                return 0;
            }
        }
        records
    }

    /// Unlocks and closes the file. Children of `fork` have copies of the descriptor, which alone would keep the lock.
    pub(super) fn close(&mut self) {
        let _ = self.file.take().map(|file| flock(&file, libc::LOCK_UN));
    }
}
