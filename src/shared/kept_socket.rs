//! The socket of a keeper, and the lock beside it that only one keeper of a name has.
//!
//! ```text
//!   lock pinpool-keep-NAME.lock ─▶ remove the socket of a keeper that was killed ─▶ bind pinpool-keep-NAME.sock
//! ```
//!
//! Nobody can be asked whether a socket is in use and replace it in one step, so both happen under the lock, which the kernel ends with
//! its process.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use super::kept_file::{peer, shared};
use crate::error::Result;
use crate::fork::{self, ForkGeneration};
use crate::shared_memory::LockFile;

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
    let user = user();
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

#[allow(unsafe_code)]
fn user() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}

/// A socket that listens under a name, for this process alone.
#[derive(Debug)]
pub(super) struct KeptSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Of the socket at `path`.
    inode: Inode,
    generation: ForkGeneration,
    /// Removed first, then unlocked.
    _lock: NameLock,
}

type Inode = (u64, u64);

fn inode_of(metadata: &Metadata) -> Inode {
    (metadata.dev(), metadata.ino())
}

impl KeptSocket {
    pub(super) fn new(name: &str) -> Result<Self> {
        let path = socket_of(name)?;
        let failed = |error: io::Error| shared(format!("{}: {error}", path.display()));
        let lock = NameLock::take(name, &path)?;
        remove_left_behind(name, &path)?;
        let listener = UnixListener::bind(&path).map_err(failed)?;
        let inode = inode_of(&fs::symlink_metadata(&path).map_err(failed)?);
        let socket = Self { listener, path: path.clone(), inode, generation: ForkGeneration::now(), _lock: lock };
        // The directory may be open to others.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).map_err(failed)?;
        Ok(socket)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for KeptSocket {
    fn drop(&mut self) {
        if !self.generation.is_stale() {
            remove_own(&self.path, self.inode);
        }
    }
}

/// Removes what is at `path`, if it is still what this process made there.
fn remove_own(path: &Path, inode: Inode) {
    if fs::symlink_metadata(path).is_ok_and(|found| inode_of(&found) == inode) {
        let _ = fs::remove_file(path);
    }
}

/// Under the lock of the name.
fn remove_left_behind(name: &str, path: &Path) -> Result<()> {
    let failed = |error: io::Error| shared(format!("{}: {error}", path.display()));
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(failed)?,
    };
    if !found.file_type().is_socket() {
        return Err(shared(format!("{} is no socket: remove it, or use another name", path.display())));
    }
    match UnixStream::connect(path) {
        // Of something that takes no lock.
        Ok(_) => Err(kept_already(name, path)),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).map_err(failed),
        Err(error) => Err(failed(error)),
    }
}

fn kept_already(name: &str, path: &Path) -> crate::Error {
    peer(format!("{name} is kept by another process already ({})", path.display()))
}

/// The lock of a name: on a file beside the socket, which its owner removes.
#[derive(Debug)]
struct NameLock {
    path: PathBuf,
    inode: Inode,
    generation: ForkGeneration,
    _locks: LockFile,
}

impl NameLock {
    fn take(name: &str, socket: &Path) -> Result<Self> {
        let path = socket.with_file_name(format!("pinpool-keep-{name}.lock"));
        let failed = |error: io::Error| shared(format!("{}: {error}", path.display()));
        loop {
            let no_fork = fork::hold_off();
            let (file, inode) = open(&path).map_err(failed)?;
            let locks = LockFile::over(file, &no_fork).map_err(failed)?;
            drop(no_fork);
            if !locks.try_lock_slot(0).map_err(failed)? {
                return Err(kept_already(name, socket));
            }
            // The owner before may have removed the file between its opening and its lock.
            if fs::symlink_metadata(&path).is_ok_and(|found| inode_of(&found) == inode) {
                let generation = ForkGeneration::now();
                return Ok(Self { path: path.clone(), inode, generation, _locks: locks });
            }
        }
    }
}

fn open(path: &Path) -> io::Result<(File, Inode)> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let inode = inode_of(&file.metadata()?);
    Ok((file, inode))
}

impl Drop for NameLock {
    fn drop(&mut self) {
        if !self.generation.is_stale() {
            remove_own(&self.path, self.inode);
        }
    }
}
