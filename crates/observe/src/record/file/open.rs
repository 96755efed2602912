//! Opens the file of a recording without damaging other files at its path.
//!
//! | at the path | action |
//! | --- | --- |
//! | nothing | a file is created that only this user can read |
//! | an empty file of this user | it is written |
//! | a recording of this user | it is continued if this process wrote it last; otherwise it is renamed to `NAME.old`, which may replace an older recording, and a file is created |
//! | a pipe of this user with a reader; `/dev/null`, `/dev/full` | it is written |
//! | anything else, including links | it is refused and left unchanged |

use std::fs::{self, File, FileType, Metadata, OpenOptions};
use std::io::ErrorKind::{NotFound, WouldBlock};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use flate2::bufread::GzDecoder;

use super::Unrecorded;
use super::format::MAGIC;
use pinpool_os::child_descriptors::ParentOnly;
use pinpool_os::file_id::{FileId, this_user};
use pinpool_os::fork;

/// Devices that may be written.
const DEVICES: [&str; 2] = ["/dev/null", "/dev/full"];
/// Bytes of a compressed file that are read to find the magic number.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Attempts; each fails only if another process renames the file meanwhile.
const TRIES: usize = 10;

/// A file opened and locked by this process.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) file: ParentOnly<File>,
    /// The length; `None` for a pipe or device.
    pub(super) bytes: Option<u64>,
    /// New path of the recording that was at the path before.
    pub(super) earlier: Option<PathBuf>,
}

/// Opens and locks `path`. The file that this process left is continued if its length is still the same.
pub(super) fn open_locked(path: &Path, left: Option<(FileId, u64)>) -> Result<Opened, Unrecorded> {
    let mut earlier = None;
    for _ in 0..TRIES {
        let kind = found_at(path)?.map(|found| found.file_type());
        let file = open_at(path, kind)?;
        let is_device = kind.is_some_and(|kind| kind.is_char_device());
        if !is_device && flock(&file, libc::LOCK_EX | libc::LOCK_NB).is_err_and(|error| error.kind() == WouldBlock) {
            return Err(Unrecorded::Taken);
        }
        // Another file may have replaced the one that was found, and the process that had it locked before may have written it.
        let metadata = file.metadata().map_err(failed)?;
        check(path, &metadata)?;
        if !metadata.is_file() {
            return Ok(Opened { file, bytes: None, earlier });
        }
        let (id, bytes) = (FileId::from_metadata(&metadata), metadata.len());
        if FileId::at(path).ok() != Some(id) {
            continue;
        }
        if bytes > 0 && !is_recording(&file) {
            return Err(no_recording(path, bytes).into());
        }
        if bytes == 0 || left == Some((id, bytes)) {
            return Ok(Opened { file, bytes: Some(bytes), earlier });
        }
        earlier = Some(set_aside(path)?);
    }
    Err(refused("other processes keep renaming it", "put %p (the process ID) into the name").into())
}

impl From<String> for Unrecorded {
    fn from(why: String) -> Self {
        Self::Failed(why)
    }
}

/// The error text after the name of the setting.
fn refused(what: impl std::fmt::Display, remedy: &str) -> String {
    format!("cannot be written: {what}; {remedy}")
}

fn failed(error: io::Error) -> String {
    refused(error, "name a file in a writable directory, or omit it")
}

fn no_recording(path: &Path, bytes: u64) -> String {
    let what = format!("{} holds {bytes} bytes that are not a recording", path.display());
    refused(what, "name another file, or remove this one")
}

/// What is at `path`, if it may be written.
fn found_at(path: &Path) -> Result<Option<Metadata>, String> {
    match fs::symlink_metadata(path) {
        Ok(found) => check(path, &found).map(|()| Some(found)),
        Err(error) if error.kind() == NotFound => Ok(None),
        Err(error) => Err(failed(error)),
    }
}

/// Refuses what may not be written.
fn check(path: &Path, found: &Metadata) -> Result<(), String> {
    let kind = found.file_type();
    let (user, own) = (found.uid(), this_user());
    match kind {
        _ if kind.is_symlink() => Err(refused("it is a symbolic link", "name the file that it leads to")),
        _ if kind.is_dir() => Err(refused("it is a directory", "name a file in it")),
        _ if kind.is_char_device() && DEVICES.iter().any(|device| Path::new(device) == path) => Ok(()),
        _ if !kind.is_file() && !kind.is_fifo() => Err(refused("it is a device or a socket", "name a file")),
        _ if user != own => {
            let what = format!("it belongs to user {user}, and this process to user {own}");
            Err(refused(what, "name a file of your own"))
        }
        _ => Ok(()),
    }
}

/// Opens what was found at `path`, or a new file.
fn open_at(path: &Path, found: Option<FileType>) -> Result<ParentOnly<File>, String> {
    let is_pipe = found.is_some_and(|kind| kind.is_fifo());
    let mut options = OpenOptions::new();
    // Non-blocking, so that a pipe without a reader is refused at once.
    options.append(true).read(!is_pipe).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let no_fork = fork::hold_off();
    let opened = options.open(path).and_then(|file| ParentOnly::new(file, &no_fork));
    drop(no_fork);
    match opened.and_then(|file| set_blocking(&file).map(|()| file)) {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
            Err(refused("it is a pipe without a reader", "start its reader first"))
        }
        opened => opened.map_err(failed),
    }
}

/// Returns true if the file begins as a recording, compressed or not.
fn is_recording(file: &File) -> bool {
    let mut head = vec![0; HEAD_BYTES_MAX];
    let Ok(read) = file.read_at(&mut head, 0) else { return false };
    let head = &head[..read];
    let mut begin = [0; MAGIC.len()];
    head.starts_with(&MAGIC) || GzDecoder::new(head).read_exact(&mut begin).is_ok() && begin == MAGIC
}

/// Renames the recording at `path` and returns its new path, at which only a recording of this user is replaced.
fn set_aside(path: &Path) -> Result<PathBuf, String> {
    let mut old = path.as_os_str().to_owned();
    old.push(".old");
    let old = PathBuf::from(old);
    let renamed = match check_replaceable(&old) {
        Ok(()) => fs::rename(path, &old).map_err(|error| format!("cannot be renamed to {}: {error};", old.display())),
        Err(why) => Err(format!("would be renamed to {}, and that {why}; or", old.display())),
    };
    renamed.map_err(|why| format!("holds a recording, which {why} name another file for this recording")).map(|()| old)
}

fn check_replaceable(old: &Path) -> Result<(), String> {
    let Some(found) = found_at(old)? else { return Ok(()) };
    let file = || OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(old);
    match found.len() {
        _ if !found.is_file() => Err(refused("it is no file", "remove it")),
        bytes if bytes > 0 && !file().is_ok_and(|file| is_recording(&file)) => Err(no_recording(old, bytes)),
        _ => Ok(()),
    }
}

/// Makes writes block.
#[allow(unsafe_code)]
fn set_blocking(file: &File) -> io::Result<()> {
    // SAFETY: `file` keeps the descriptor open.
    let flags = done(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: as above.
    done(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK) }).map(drop)
}

#[allow(unsafe_code)]
pub(super) fn flock(file: &File, operation: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `file` is.
    done(unsafe { libc::flock(file.as_raw_fd(), operation) }).map(drop)
}

/// The result of a system call.
fn done(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
