//! Unix sockets that only this user can open. The process that creates a socket removes its file.

use std::fs::{self, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::child_descriptors::ParentOnly;
use crate::file_id::{FileId, this_user};
use crate::fork::{self, ForkGeneration};

/// Longest socket path that the kernel accepts, without the terminating zero.
pub const PATH_BYTES_MAX: usize = 107;

/// A socket that this process listens on. Forked children close it.
#[derive(Debug)]
pub struct LocalSocket {
    listener: ParentOnly<UnixListener>,
    path: PathBuf,
    file: FileId,
    generation: ForkGeneration,
}

impl LocalSocket {
    /// Listens at `path`. Replaces a stale socket of this user at `path`, and fails if there is anything else.
    ///
    /// # Errors
    ///
    /// - [`AddrInUse`](io::ErrorKind::AddrInUse): another process listens at `path`,
    /// - [`AlreadyExists`](io::ErrorKind::AlreadyExists): `path` exists and is not a socket of this user,
    /// - other errors: the path is too long, or the system refuses the socket.
    pub fn listen(path: &Path) -> io::Result<Self> {
        check_length(path)?;
        remove_left_behind(path)?;
        let no_fork = fork::delay_forks();
        let listener = ParentOnly::new(UnixListener::bind(path)?, &no_fork)?;
        drop(no_fork);
        // `check_peer` refuses other users' processes that connect before the permissions are set.
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        let file = FileId::at(path)?;
        // The process may change its working directory before it removes the file.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        Ok(Self { listener, path, file, generation: ForkGeneration::now() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the listener, which does not block.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Removes the socket's file, if it is still there, so that no process connects any more. Does nothing in a forked child.
    pub fn remove_file(&self) {
        if !self.generation.is_stale() {
            self.file.remove_at(&self.path);
        }
    }
}

impl Drop for LocalSocket {
    fn drop(&mut self) {
        self.remove_file();
    }
}

fn check_length(path: &Path) -> io::Result<()> {
    let Some(excess) = path.as_os_str().len().checked_sub(PATH_BYTES_MAX).filter(|&excess| excess > 0) else {
        return Ok(());
    };
    Err(io::Error::other(format!(
        "the path is too long by {excess} bytes: a socket path has at most {PATH_BYTES_MAX}; name one in a directory with a \
         shorter path"
    )))
}

/// Removes a stale socket of this user. Fails if there is anything else at `path`.
fn remove_left_behind(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found?,
    };
    let refused = |what: String| Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
    let kind = found.file_type();
    if !kind.is_socket() {
        let what = match () {
            () if kind.is_dir() => "a directory",
            () if kind.is_symlink() => "a symbolic link",
            () => "a file",
        };
        return refused(format!("there is {what}, which is not a socket: name another path, or remove it"));
    }
    if found.uid() != this_user() {
        return refused(format!("there is a socket of user {}: name another path", found.uid()));
    }
    if is_listened_on(path)? {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process serves it"));
    }
    FileId::from_metadata(&found).remove_at(path);
    Ok(())
}

/// Returns whether a process has the socket at `path` open. Connects a datagram socket to it, since a stream socket would wait
/// until earlier connections are accepted. An open stream socket refuses the connection because of the type (`EPROTOTYPE`), and a
/// stale socket refuses every connection.
fn is_listened_on(path: &Path) -> io::Result<bool> {
    let asked = UnixDatagram::unbound()?.connect(path);
    Ok(asked.map_or_else(|error| error.raw_os_error() == Some(libc::EPROTOTYPE), |()| true))
}

/// Fails unless the process at the other end belongs to the user of this process, or to root.
///
/// # Errors
///
/// [`PermissionDenied`](io::ErrorKind::PermissionDenied): the other process belongs to another user.
pub fn check_peer(socket: &UnixStream) -> io::Result<()> {
    let (user, own) = (peer_user(socket)?, this_user());
    if user == own || user == 0 {
        return Ok(());
    }
    let why = format!("the process there belongs to user {user}, and this one to user {own}: run both as one user");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

/// Returns the user that the process at the other end had when it connected or began to listen.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
fn peer_user(socket: &UnixStream) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = libc::socklen_t::try_from(size_of_val(&peer)).map_err(io::Error::other)?;
    // SAFETY: the call writes at most `len` bytes to `peer`, which consists of numbers.
    let asked = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut len)
    };
    if asked == 0 { Ok(peer.uid) } else { Err(io::Error::last_os_error()) }
}

#[cfg(not(target_os = "linux"))]
#[allow(unsafe_code)]
fn peer_user(socket: &UnixStream) -> io::Result<u32> {
    let (mut user, mut group) = (0, 0);
    // SAFETY: the call writes two numbers.
    let asked = unsafe { libc::getpeereid(socket.as_raw_fd(), &raw mut user, &raw mut group) };
    if asked == 0 { Ok(user) } else { Err(io::Error::last_os_error()) }
}

#[cfg(all(test, not(miri), not(pinpool_loom)))] // Sockets.
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_was_left_behind_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stats.sock");
        drop(UnixListener::bind(&path).unwrap());
        let socket = LocalSocket::listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists() && LocalSocket::listen(&dir.path().join("none/stats.sock")).is_err());
    }

    #[test]
    fn a_socket_that_another_serves_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stats.sock");
        let other = UnixListener::bind(&path).unwrap();
        assert_eq!(LocalSocket::listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        other.set_nonblocking(true).unwrap();
        assert_eq!(other.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "the check does not connect");
    }
}
