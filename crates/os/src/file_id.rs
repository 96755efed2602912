//! Identifies the file behind a descriptor or a path by device and inode, since names move between files and descriptor numbers
//! are reused. Also the effective user.
#![allow(unsafe_code)] // Calls `fstat`, which may be called in a child of `fork`, and `geteuid`.

use std::fs::{self, Metadata};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A file, a socket or a pipe, while it is open anywhere or has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    pub device: u64,
    pub inode: u64,
}

impl FileId {
    pub fn from_metadata(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }

    /// The file at `path`; a link is not followed.
    pub fn at(path: &Path) -> io::Result<Self> {
        fs::symlink_metadata(path).map(|metadata| Self::from_metadata(&metadata))
    }

    /// The file that `descriptor` is open on. Allocates nothing and takes no lock.
    #[cfg_attr(not(target_os = "linux"), allow(clippy::cast_sign_loss))]
    #[allow(clippy::unnecessary_cast)] // The types vary by target.
    pub fn of_descriptor(descriptor: i32) -> io::Result<Self> {
        let mut stat = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: writes to `stat` alone; a number that is no descriptor is an error.
        if unsafe { libc::fstat(descriptor, stat.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has succeeded, so all of it was written.
        let stat = unsafe { stat.assume_init() };
        Ok(Self { device: stat.st_dev as u64, inode: stat.st_ino as u64 })
    }

    /// Removes the name `path` if it still leads here.
    pub fn remove_at(self, path: &Path) {
        if Self::at(path).is_ok_and(|found| found == self) {
            let _ = fs::remove_file(path);
        }
    }
}

/// The effective user of this process.
pub fn this_user() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}
