//! Whether owners of a name use another file than the one that has the name now.
//!
//! A file can be removed while its owners live, by `rm` or by systemd at the end of a session (`RemoveIPC=yes`), and the next
//! owner makes another. The locks of the first file lie where nobody can find them. So each owner also shares a lock on the
//! directory, which stays: at a place that the name and the file's number give.
//!
//! Any user may lock these bytes, and so keep the ledgers of others from growing, as any user may take their names.

use std::fs::File;
use std::io;
use std::path::Path;

use super::locks::LockFile;
use pinpool_os::fork::HeldOff;

/// A file has so many bits in the place of its lock, and a name those above.
const FILE_BITS: u32 = 32;
const NAME_BITS: u32 = 30;

/// An owner's lock on the directory of its file.
#[derive(Debug)]
pub(super) struct Presence {
    locks: LockFile,
    /// Where the locks of the name begin.
    first: i64,
    /// Where that of the file is, from there.
    own: i64,
}

impl Presence {
    /// For an owner of the file with this number at `path`.
    pub(super) fn of(path: &Path, file: u64, no_fork: &HeldOff) -> io::Result<Self> {
        let directory = path.parent().unwrap_or(Path::new("/"));
        let locks = LockFile::over(File::open(directory)?, no_fork)?;
        let name = hash(path.as_os_str().as_encoded_bytes()) >> (u64::BITS - NAME_BITS);
        let own = file & ((1 << FILE_BITS) - 1);
        let [first, own] = [name << FILE_BITS, own].map(u64::cast_signed);
        Ok(Self { locks, first, own })
    }

    /// Before the first claim of the owner.
    pub(super) fn begin(&self) -> io::Result<()> {
        self.locks.share(self.first + self.own).map(drop)
    }

    /// Whether an owner of the name uses another file. What cannot be asked counts as one.
    pub(super) fn is_elsewhere(&self) -> bool {
        let (before, behind) = (self.own, (1 << FILE_BITS) - 1 - self.own);
        let is_locked = |start, bytes| bytes > 0 && self.locks.is_locked(start, bytes).unwrap_or(true);
        is_locked(self.first, before) || is_locked(self.first + self.own + 1, behind)
    }

    pub(super) fn is_open(&self) -> bool {
        self.locks.is_open()
    }

    #[cfg(all(test, target_os = "linux", not(miri), not(pinpool_loom)))]
    pub(super) fn descriptor(&self) -> std::os::fd::RawFd {
        std::os::fd::AsRawFd::as_raw_fd(self.locks.file())
    }

    pub(super) fn end(&self) {
        self.locks.unlock_all();
    }
}

/// FNV-1a: the same in all processes and versions.
fn hash(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    // The last bytes differ most, and reach the highest bits only by more rounds.
    bytes.iter().chain(&[0; 8]).fold(0xcbf2_9ce4_8422_2325, step)
}
