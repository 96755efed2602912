//! Identifies the file behind a descriptor or a path by device and inode, since names move between files and descriptor numbers
//! are reused. Also returns the effective user of the process.
#![allow(unsafe_code)] // Calls `fstat`, which may be called in a child of `fork`, and `geteuid`.

use std::fs::{self, Metadata};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The identity of a file, a socket or a pipe, valid while the file is open anywhere or has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileId {
    pub device: u64,
    pub inode: u64,
}

impl FileId {
    pub fn from_metadata(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }

    /// Returns the identity of the file at `path`. Does not follow a symbolic link.
    pub fn at(path: &Path) -> io::Result<Self> {
        fs::symlink_metadata(path).map(|metadata| Self::from_metadata(&metadata))
    }

    /// Returns the identity of the file that `descriptor` refers to. Allocates nothing and takes no lock.
    #[cfg_attr(not(target_os = "linux"), allow(clippy::cast_sign_loss))]
    #[allow(clippy::unnecessary_cast)] // The types vary by target.
    pub fn of_descriptor(descriptor: i32) -> io::Result<Self> {
        let mut stat = MaybeUninit::<libc::stat>::uninit();
        // SAFETY: the call writes only to `stat`, and fails for a number that is not a descriptor.
        if unsafe { libc::fstat(descriptor, stat.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has succeeded, so it has written all of `stat`.
        let stat = unsafe { stat.assume_init() };
        Ok(Self { device: stat.st_dev as u64, inode: stat.st_ino as u64 })
    }

    /// Removes the name `path` if it still refers to this file.
    pub fn remove_at(self, path: &Path) {
        if Self::at(path).is_ok_and(|found| found == self) {
            let _ = fs::remove_file(path);
        }
    }
}

/// Returns the effective user of this process.
pub fn this_user() -> u32 {
    // SAFETY: the call has no arguments and cannot fail.
    unsafe { libc::geteuid() }
}
