//! Opens the file of a recording without damaging other files at its path.
//!
//! | at the path | action |
//! | --- | --- |
//! | nothing | a file is created that only this user can read |
//! | an empty file of this user | it is written |
//! | a recording of this user | it is continued if this process wrote it last, and overwritten otherwise |
//! | a pipe of this user with a reader; `/dev/null`, `/dev/full` | it is written |
//! | anything else, including links | it is refused and left unchanged |

use std::fs::{self, File, FileType, Metadata, OpenOptions};
use std::io::ErrorKind::{NotFound, WouldBlock};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use flate2::bufread::GzDecoder;

use super::Unrecorded;
use super::format::MAGIC;
use pinpool_os::child_descriptors::ParentOnly;
use pinpool_os::file_id::{FileId, this_user};
use pinpool_os::fork;

/// Bytes of a compressed file that are read to find the magic number.
const HEAD_BYTES_MAX: u64 = 64 << 10;

/// A file opened and locked by this process.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) file: ParentOnly<File>,
    /// Length of the content to keep; `None` for a pipe or device.
    pub(super) bytes: Option<u64>,
}

/// Fails if no pool may write the file at `path`. Changes nothing.
pub fn check_path(path: &Path) -> Result<(), Unrecorded> {
    let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
    if check(path, &found)?.is_file() { check_content(&File::open(path).map_err(failed)?, found.len()) } else { Ok(()) }
}

/// Opens and locks `path`. Continues the file that this process left (`left`), if it is still at `path` with the same length.
pub(super) fn open_locked(path: &Path, left: Option<(FileId, u64)>) -> Result<Opened, Unrecorded> {
    let kind = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == NotFound => None,
        found => Some(check(path, &found.map_err(failed)?)?),
    };
    let file = open_at(path, kind)?;
    let is_device = kind.is_some_and(|kind| kind.is_char_device());
    if !is_device && flock(&file, libc::LOCK_EX | libc::LOCK_NB).is_err_and(|error| error.kind() == WouldBlock) {
        return Err(Unrecorded::Taken);
    }
    // Another file may have replaced the file that was checked, and a process that had it locked before may have written it.
    let metadata = file.metadata().map_err(failed)?;
    if !check(path, &metadata)?.is_file() {
        return Ok(Opened { file, bytes: None });
    }
    let (id, bytes) = (FileId::from_metadata(&metadata), metadata.len());
    check_content(&file, bytes)?;
    // Content from another process is kept until the first write overwrites it, because the build of the pool may still fail.
    Ok(Opened { file, bytes: Some(if left == Some((id, bytes)) { bytes } else { 0 }) })
}

/// Returns the error with the text that follows the name of the setting.
fn refused(what: impl std::fmt::Display, remedy: &str) -> Unrecorded {
    Unrecorded::Failed(format!("cannot be written: {what}; {remedy}"))
}

fn failed(error: io::Error) -> Unrecorded {
    refused(error, "name a file in a writable directory, or omit it")
}

/// Returns the type of the file, or an error if it may not be written.
fn check(path: &Path, found: &Metadata) -> Result<FileType, Unrecorded> {
    let kind = found.file_type();
    let (user, own) = (found.uid(), this_user());
    match kind {
        _ if kind.is_symlink() => Err(refused("it is a symbolic link", "name the file that it leads to")),
        _ if kind.is_dir() => Err(refused("it is a directory", "name a file in it")),
        _ if kind.is_char_device() && ["/dev/null", "/dev/full"].map(Path::new).contains(&path) => Ok(kind),
        _ if !kind.is_file() && !kind.is_fifo() => Err(refused("it is a device or a socket", "name a file")),
        _ if user != own => {
            let what = format!("it belongs to user {user}, and this process to user {own}");
            Err(refused(what, "name a file of your own"))
        }
        _ => Ok(kind),
    }
}

/// Opens the file that was found at `path`, or creates a new file.
fn open_at(path: &Path, found: Option<FileType>) -> Result<ParentOnly<File>, Unrecorded> {
    let is_pipe = found.is_some_and(|kind| kind.is_fifo());
    let mut options = OpenOptions::new();
    // Opened without blocking, so that a pipe without a reader is refused immediately.
    options.append(true).read(!is_pipe).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let no_fork = fork::delay_forks();
    let opened = options.open(path).and_then(|file| ParentOnly::new(file, &no_fork));
    drop(no_fork);
    match opened.and_then(|file| set_blocking(&file).map(|()| file)) {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
            Err(refused("it is a pipe without a reader", "start its reader first"))
        }
        opened => opened.map_err(failed),
    }
}

/// Refuses a file that is not empty and does not begin as a recording, compressed or not.
fn check_content(file: &File, bytes: u64) -> Result<(), Unrecorded> {
    let (mut head, mut begin) = (Vec::new(), [0; MAGIC.len()]);
    let _ = file.take(bytes.min(HEAD_BYTES_MAX)).read_to_end(&mut head).map_err(failed)?;
    // This fails if the file is not compressed.
    let _ = GzDecoder::new(&*head).read_exact(&mut begin);
    let free = bytes == 0 || head.starts_with(&MAGIC) || begin == MAGIC;
    let what = format!("it holds {bytes} bytes that are not a recording");
    if free { Ok(()) } else { Err(refused(what, "name another file, or remove this one")) }
}

/// Makes writes to the file block.
#[allow(unsafe_code)]
fn set_blocking(file: &File) -> io::Result<()> {
    // SAFETY: the call only reads the number, and `file` keeps the descriptor open.
    done(unsafe { libc::ioctl(file.as_raw_fd(), libc::FIONBIO, &0) })
}

#[allow(unsafe_code)]
pub(super) fn flock(file: &File, operation: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `file` is.
    done(unsafe { libc::flock(file.as_raw_fd(), operation) })
}

/// Converts the result of a system call to a `Result`.
fn done(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
