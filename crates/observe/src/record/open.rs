//! Opens the file of a recording without damaging other files at its path.
//!
//! | at the path | action |
//! | --- | --- |
//! | nothing | a file is created that only this user can read |
//! | an empty file of this user | it is written |
//! | a recording of this user | it is continued if this process wrote it last; otherwise it is renamed to `NAME.old`, which may replace an older recording, and a file is created |
//! | a pipe of this user with a reader; `/dev/null`, `/dev/full` | it is written |
//! | anything else, including links | it is refused and left unchanged |

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read};
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
pub(super) fn open(path: &Path, left: Option<(FileId, u64)>) -> Result<Opened, Unrecorded> {
    let mut earlier = None;
    for _ in 0..TRIES {
        let found = match fs::symlink_metadata(path) {
            Ok(found) => Some(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed(&error)),
        };
        let place = found.as_ref().map_or(Ok(Place::New), |found| place(path, found))?;
        let Some(file) = open_at(path, place, found.as_ref())? else { continue };
        if place == Place::Device {
            return Ok(Opened { file, bytes: None, earlier });
        }
        if flock(&file, libc::LOCK_EX | libc::LOCK_NB).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            return Err(Unrecorded::Taken);
        }
        if place == Place::Pipe {
            return Ok(Opened { file, bytes: None, earlier });
        }
        let metadata = file.metadata().map_err(|error| failed(&error))?;
        // The process that had it locked before may have renamed it meanwhile.
        let id = FileId::from_metadata(&metadata);
        if FileId::at(path).ok() != Some(id) {
            continue;
        }
        let bytes = metadata.len();
        if bytes > 0 && !is_recording(&file) {
            return Err(no_recording(path, bytes));
        }
        if bytes == 0 || left == Some((id, bytes)) {
            return Ok(Opened { file, bytes: Some(bytes), earlier });
        }
        earlier = Some(set_aside(path)?);
    }
    Err(refused("other processes keep renaming it", "put %p (the process id) into the name"))
}

/// The kind of file at a path that may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    New,
    File,
    Pipe,
    Device,
}

/// The error text after the name of the setting.
fn refused(what: impl std::fmt::Display, remedy: &str) -> Unrecorded {
    Unrecorded::Failed(format!("cannot be written: {what}; {remedy}"))
}

fn failed(error: &io::Error) -> Unrecorded {
    refused(error, "name a file in a writable directory, or omit it")
}

fn no_recording(path: &Path, bytes: u64) -> Unrecorded {
    let what = format!("{} holds {bytes} bytes that are not a recording", path.display());
    refused(what, "name another file, or remove this one")
}

/// Classifies `found` at `path`.
fn place(path: &Path, found: &Metadata) -> Result<Place, Unrecorded> {
    let kind = found.file_type();
    if kind.is_symlink() {
        return Err(refused("it is a symbolic link", "name the file that it leads to"));
    }
    if kind.is_dir() {
        return Err(refused("it is a directory", "name a file in it"));
    }
    if kind.is_char_device() && DEVICES.iter().any(|device| Path::new(device) == path) {
        return Ok(Place::Device);
    }
    if !kind.is_file() && !kind.is_fifo() {
        return Err(refused("it is a device or a socket", "name a file"));
    }
    let (user, own) = (found.uid(), this_user());
    if user != own {
        let what = format!("it belongs to user {user}, and this process to user {own}");
        return Err(refused(what, "name a file of your own"));
    }
    Ok(if kind.is_fifo() { Place::Pipe } else { Place::File })
}

/// Opens `path`; `None` if it is no longer the file that was `found`.
fn open_at(path: &Path, place: Place, found: Option<&Metadata>) -> Result<Option<ParentOnly<File>>, Unrecorded> {
    let mut options = OpenOptions::new();
    // Non-blocking, so that a pipe without a reader is refused at once.
    options.append(true).read(place != Place::Pipe).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    if place == Place::New {
        options.create_new(true).mode(0o600);
    }
    let no_fork = fork::hold_off();
    let opened = options.open(path).and_then(|file| ParentOnly::new(file, &no_fork));
    drop(no_fork);
    let file = match opened {
        Ok(file) => file,
        Err(error) if place == Place::New && error.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
        Err(error) if place == Place::File && error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if place == Place::Pipe && error.raw_os_error() == Some(libc::ENXIO) => {
            return Err(refused("it is a pipe without a reader", "start its reader first"));
        }
        Err(error) => return Err(failed(&error)),
    };
    set_blocking(&file).map_err(|error| failed(&error))?;
    let id = file.metadata().map(|metadata| FileId::from_metadata(&metadata)).map_err(|error| failed(&error))?;
    Ok(found.is_none_or(|found| FileId::from_metadata(found) == id).then_some(file))
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
fn set_aside(path: &Path) -> Result<PathBuf, Unrecorded> {
    let mut old = path.as_os_str().to_owned();
    old.push(".old");
    let old = PathBuf::from(old);
    let in_the_way = |error: Unrecorded| match error {
        Unrecorded::Failed(why) => Unrecorded::Failed(format!(
            "holds a recording, which would be renamed to {}, and that {why}; or name another file for this recording",
            old.display()
        )),
        other => other,
    };
    match fs::symlink_metadata(&old) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(in_the_way(failed(&error))),
        Ok(found) => {
            if place(&old, &found).map_err(in_the_way)? != Place::File {
                return Err(in_the_way(refused("it is no file", "remove it")));
            }
            let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&old);
            if found.len() > 0 && !file.is_ok_and(|file| is_recording(&file)) {
                return Err(in_the_way(no_recording(&old, found.len())));
            }
        }
    }
    fs::rename(path, &old).map_err(|error| {
        Unrecorded::Failed(format!(
            "holds a recording, which cannot be renamed to {}: {error}; name another file for this recording",
            old.display()
        ))
    })?;
    Ok(old)
}

/// Makes writes block.
#[allow(unsafe_code)]
fn set_blocking(file: &File) -> io::Result<()> {
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(file);
    // SAFETY: `file` keeps the descriptor open.
    let flags = unsafe { libc::fcntl(descriptor, libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    let result = unsafe { libc::fcntl(descriptor, libc::F_SETFL, flags & !libc::O_NONBLOCK) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[allow(unsafe_code)]
pub(super) fn flock(file: &File, operation: libc::c_int) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `file` is.
    let result = unsafe { libc::flock(std::os::fd::AsRawFd::as_raw_fd(file), operation) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
