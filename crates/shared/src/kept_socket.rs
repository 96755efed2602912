//! The socket of a keeper, and the lock beside it that only one keeper of a name has.
//!
//! ```text
//!   lock pinpool-keep-NAME.lock ─▶ replace the socket of a keeper that was killed: pinpool-keep-NAME.sock
//! ```
//!
//! Nobody can be asked whether a socket is in use and replace it in one step, so both happen under the lock, which the kernel ends with
//! its process.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use super::kept_file::{peer, shared};
use crate::error::Result;
use pinpool_os::file_id::{FileId, this_user};
use pinpool_os::fork::{self, ForkGeneration};
use pinpool_os::local_socket::LocalSocket;
use pinpool_shm::file::LockFile;

/// Longest name.
const NAME_MAX: usize = 64;

/// The socket of the keeper of `name`: in `$XDG_RUNTIME_DIR`, else in `/tmp/pinpool-UID`, which is this user's alone.
///
/// # Errors
///
/// [`is_shared`](crate::Error::is_shared): the name is no name, or the directory is of another user or open to others.
pub fn socket_of(name: &str) -> Result<PathBuf> {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(is_plain) || name.starts_with('.') {
        return Err(shared(format!("{name:?} is no name: use 1 to {NAME_MAX} letters, digits, '-', '_' and '.'")));
    }
    let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    let dir = match runtime_dir {
        Some(dir) => PathBuf::from(dir),
        None => own_dir()?,
    };
    Ok(dir.join(format!("pinpool-keep-{name}.sock")))
}

fn own_dir() -> Result<PathBuf> {
    let user = this_user();
    let dir = PathBuf::from(format!("/tmp/pinpool-{user}"));
    let failed = |error: io::Error| shared(format!("{}: {error}", dir.display()));
    match DirBuilder::new().mode(0o700).create(&dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    let found = fs::symlink_metadata(&dir).map_err(failed)?;
    if !found.is_dir() || found.uid() != user || found.mode() & 0o077 != 0 {
        return Err(shared(format!(
            "{} is not a directory of this user alone (mode 0700): remove it, or set XDG_RUNTIME_DIR",
            dir.display()
        )));
    }
    Ok(dir)
}

/// A socket that listens under a name, for this process alone.
#[derive(Debug)]
pub(super) struct KeptSocket {
    socket: LocalSocket,
    /// Dropped after the socket, so removed first, then unlocked.
    _lock: NameLock,
}

impl KeptSocket {
    pub(super) fn new(name: &str) -> Result<Self> {
        let path = socket_of(name)?;
        let lock = NameLock::take(name, &path)?;
        let socket = LocalSocket::listen(&path).map_err(|error| match error.kind() {
            // A program that takes no lock listens there.
            io::ErrorKind::AddrInUse => kept_already(name, &path),
            _ => shared(format!("{}: {error}", path.display())),
        })?;
        Ok(Self { socket, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        self.socket.path()
    }

    pub(super) fn listener(&self) -> &UnixListener {
        self.socket.listener()
    }
}

fn kept_already(name: &str, path: &Path) -> crate::Error {
    peer(format!("{name} is kept by another process already ({})", path.display()))
}

/// The lock of a name: on a file beside the socket, which its owner removes.
#[derive(Debug)]
struct NameLock {
    path: PathBuf,
    file: FileId,
    generation: ForkGeneration,
    _locks: LockFile,
}

impl NameLock {
    fn take(name: &str, socket: &Path) -> Result<Self> {
        let path = socket.with_file_name(format!("pinpool-keep-{name}.lock"));
        let failed = |error: io::Error| shared(format!("{}: {error}", path.display()));
        loop {
            let no_fork = fork::hold_off();
            let (file, id) = open(&path).map_err(failed)?;
            let locks = LockFile::over(file, &no_fork).map_err(failed)?;
            drop(no_fork);
            if !locks.try_lock_slot(0).map_err(failed)? {
                return Err(kept_already(name, socket));
            }
            // The owner before may have removed the file between its opening and its lock.
            if FileId::at(&path).is_ok_and(|found| found == id) {
                let generation = ForkGeneration::now();
                return Ok(Self { path: path.clone(), file: id, generation, _locks: locks });
            }
        }
    }
}

fn open(path: &Path) -> io::Result<(File, FileId)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let id = FileId::of(&file.metadata()?);
    Ok((file, id))
}

impl Drop for NameLock {
    fn drop(&mut self) {
        if !self.generation.is_stale() {
            self.file.remove_at(&self.path);
        }
    }
}
