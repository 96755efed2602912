//! The statistics of this process's pools on a Unix socket, for `pinpool top`: to each reader a line of JSON at once, and one a
//! second.
//!
//! ```text
//! {"process":4711,"pools":[{"name":"train","preset":"adaptive", ..., "owners":[{"tag":"images", ...}]}, ...]}
//! ```
//!
//! The objects of `pools` are [`Stats`], with the largest owners beside them: `tag`, `buffers`, `bytes`, `asked_bytes` and
//! `oldest_seconds`, which is `null` for buffers without a tag. A thread of its own reads them, and only while there are readers, so that nothing is
//! done for it by a get or a put. Nobody but the user that the process belongs to can read the socket. The file is removed when
//! the last pool that it shows is gone; one that is left behind by a process that was killed is replaced.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::thread;
use std::time::{Duration, Instant};

use crate::dump::Owner;
use crate::fork::OfProcess;
use crate::maintenance_thread::block_signals;
use crate::stats::Stats;
use crate::sync::plain::Mutex;

/// Time between two lines.
const EVERY: Duration = Duration::from_secs(1);
/// Time between two looks for new readers.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Most readers at once.
const READERS_MAX: usize = 16;
/// Most owners of a pool that are told.
const OWNERS_MAX: usize = 20;
/// Longest path of a socket: what the kernel takes, without the zero behind it.
pub const PATH_BYTES_MAX: usize = 107;

/// A pool that is shown.
pub(crate) trait Shown: Send + Sync {
    /// Its statistics of now.
    fn statistics(&self) -> Stats;

    /// Who holds its buffers, the largest first.
    fn owners(&self) -> Vec<Owner>;
}

/// What this process serves.
static SERVED: OfProcess<Mutex<Vec<Served>>> = OfProcess::new(Mutex::default);

/// One socket.
struct Served {
    path: PathBuf,
    pools: Vec<Weak<dyn Shown>>,
}

/// The socket of a process that was started with `PINPOOL_SOCKET=1`: in `$XDG_RUNTIME_DIR`, else in `/tmp`.
pub fn path_of(process: u32) -> PathBuf {
    let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    let dir = runtime_dir.map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
    dir.join(format!("pinpool-{process}.sock"))
}

/// Shows one more pool at `path`, where the first pool opens the socket.
///
/// # Errors
///
/// If the socket cannot be made, another process serves it, or no thread can be had.
pub(crate) fn serve(path: &Path, pool: Weak<dyn Shown>) -> io::Result<()> {
    let mut served = SERVED.get().lock();
    if let Some(known) = served.iter_mut().find(|served| served.path == path) {
        known.pools.push(pool);
        return Ok(());
    }
    let listener = listen(path)?;
    let there = path.to_owned();
    thread::Builder::new().name("pinpool-stats".to_owned()).spawn(move || {
        block_signals();
        run(&listener, &there);
    })?;
    served.push(Served { path: path.to_owned(), pools: vec![pool] });
    Ok(())
}

/// A socket at `path` that this user alone can open. It is made in a directory of its own, since between its making and the
/// change of its mode others could open it.
fn listen(path: &Path) -> io::Result<UnixListener> {
    match fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is a file that is no socket"));
        }
        Ok(_) if is_served(path)? => {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, "another process serves it"));
        }
        _ => {}
    }
    let name = format!(".pinpool-{}", std::process::id());
    let dir = path.parent().unwrap_or(Path::new("")).join(name);
    let longest = path.as_os_str().len().max(dir.join("s").as_os_str().len());
    if longest > PATH_BYTES_MAX {
        return Err(io::Error::other(format!(
            "the path is too long by {} bytes: that of a socket has at most {PATH_BYTES_MAX}; name one in a directory with a \
             shorter path",
            longest - PATH_BYTES_MAX
        )));
    }
    DirBuilder::new().mode(0o700).create(&dir)?;
    let made = listen_in(&dir, path);
    // Empty if the socket was moved; what was not moved is of no use.
    let _ = fs::remove_file(dir.join("s"));
    let _ = fs::remove_dir(&dir);
    made
}

/// Whether a process has the socket at `path` open. Asks with a datagram socket: an open stream socket refuses it as one of
/// another type, and one that nobody has refuses it as any. A stream would wait if the readers before it are not accepted.
fn is_served(path: &Path) -> io::Result<bool> {
    let asked = UnixDatagram::unbound()?.connect(path);
    Ok(asked.map_or_else(|error| error.raw_os_error() == Some(libc::EPROTOTYPE), |()| true))
}

fn listen_in(dir: &Path, path: &Path) -> io::Result<UnixListener> {
    let inner = dir.join("s");
    let listener = UnixListener::bind(&inner)?;
    fs::set_permissions(&inner, Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    fs::rename(&inner, path)?;
    Ok(listener)
}

/// Serves until the last pool is gone.
fn run(listener: &UnixListener, path: &Path) {
    let mut readers: Vec<UnixStream> = Vec::new();
    let mut due = Instant::now() + EVERY;
    loop {
        let mut fresh = Vec::new();
        while let Ok((reader, _)) = listener.accept() {
            if readers.len() + fresh.len() < READERS_MAX && reader.set_nonblocking(true).is_ok() {
                fresh.push(reader);
            }
        }
        let is_due = Instant::now() >= due;
        if is_due {
            due = Instant::now() + EVERY;
        }
        if is_due || !fresh.is_empty() {
            let is_read = !fresh.is_empty() || !readers.is_empty();
            let Some(line) = line_or_end(path, is_read) else { return };
            let tell = |mut reader: UnixStream| reader.write_all(line.as_bytes()).is_ok().then_some(reader);
            // A reader that does not keep up is left.
            let old = if is_due { readers.drain(..).filter_map(tell).collect() } else { std::mem::take(&mut readers) };
            readers = old;
            readers.extend(fresh.into_iter().filter_map(tell));
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// The next line, empty if nobody reads; `None` when no pool is left, and then the socket is gone.
fn line_or_end(path: &Path, is_read: bool) -> Option<String> {
    let mut served = SERVED.get().lock();
    let at = served.iter().position(|served| served.path == path)?;
    served[at].pools.retain(|pool| pool.strong_count() > 0);
    if served[at].pools.is_empty() {
        served.swap_remove(at);
        // Under the lock, so that a pool that is made now opens a socket after this.
        let _ = fs::remove_file(path);
        return None;
    }
    if !is_read {
        return Some(String::new());
    }
    let pools = served[at].pools.clone();
    drop(served);
    // Under no lock: this may be the last reference to a pool.
    let shown: Vec<_> = pools.iter().filter_map(Weak::upgrade).map(|pool| object(&*pool)).collect();
    let line = serde_json::json!({ "process": std::process::id(), "pools": shown });
    Some(format!("{line}\n"))
}

/// What is told of one pool.
fn object(pool: &dyn Shown) -> serde_json::Value {
    let owners = pool.owners();
    let owner = |owner: &Owner| {
        let oldest_seconds = owner.oldest.map(|age| age.as_secs_f64());
        let Owner { tag, buffers, bytes, asked_bytes, .. } = owner;
        serde_json::json!({
            "tag": tag, "buffers": buffers, "bytes": bytes, "asked_bytes": asked_bytes, "oldest_seconds": oldest_seconds,
        })
    };
    let mut object = serde_json::json!(pool.statistics());
    object["owners"] = owners.iter().take(OWNERS_MAX).map(owner).collect();
    object
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::sync::Arc;

    use super::*;
    use crate::sync::process::{AtomicU64, Ordering};

    /// Counts how often it is looked at.
    struct Counted {
        looks: AtomicU64,
    }

    impl Shown for Counted {
        fn statistics(&self) -> Stats {
            self.looks.fetch_add(1, Ordering::Relaxed);
            Stats { gets: 7, ..Stats::default() }
        }

        fn owners(&self) -> Vec<Owner> {
            vec![Owner::untagged("images", 2, 4096).unwrap()]
        }
    }

    #[test]
    fn a_pool_is_looked_at_for_readers_alone() {
        let path = Path::new("/nowhere/looked-at.sock");
        let pool = Arc::new(Counted { looks: AtomicU64::new(0) });
        let weak: Weak<Counted> = Arc::downgrade(&pool);
        SERVED.get().lock().push(Served { path: path.to_owned(), pools: vec![weak] });
        assert_eq!(line_or_end(path, false), Some(String::new()));
        assert_eq!(pool.looks.load(Ordering::Relaxed), 0);
        assert!(line_or_end(path, true).is_some_and(|line| line.contains("\"gets\":7")));
        assert_eq!(pool.looks.load(Ordering::Relaxed), 1);
        drop(pool);
        assert_eq!(line_or_end(path, false), None, "the last pool is gone");
    }

    #[test]
    fn readers_get_a_line_at_once_and_the_socket_goes_with_the_last_pool() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stats.sock");
        let pool = Arc::new(Counted { looks: AtomicU64::new(0) });
        let weak: Weak<Counted> = Arc::downgrade(&pool);
        serve(&path, weak).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the directory that it was made in is gone");
        for _ in 0..2 {
            let mut line = String::new();
            BufReader::new(UnixStream::connect(&path).unwrap()).read_line(&mut line).unwrap();
            let object: serde_json::Value = serde_json::from_str(&line).unwrap();
            assert_eq!(object["pools"][0]["gets"], 7, "{line}");
            assert_eq!(object["pools"][0]["owners"][0]["tag"], "images", "{line}");
            assert_eq!(object["process"], std::process::id());
        }
        drop(pool);
        let begun = Instant::now();
        while path.exists() {
            assert!(begun.elapsed() < Duration::from_secs(20), "the socket stays");
            thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_socket_that_was_left_behind_is_replaced_and_a_file_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stats.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(listen(&path).is_ok());
        fs::remove_file(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        assert!(listen(&dir.path().join("none/stats.sock")).is_err());
    }

    #[test]
    fn a_path_that_no_socket_can_have_is_refused_with_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let long = dir.path().join("x".repeat(120));
        let error = listen(&long.join("s")).unwrap_err().to_string();
        assert!(error.contains("at most 107") && error.contains("too long by "), "{error}");
        assert!(listen(&dir.path().join("x".repeat(100))).is_err_and(|error| error.to_string().contains("107")));
    }

    #[test]
    fn a_socket_that_another_serves_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stats.sock");
        let other = UnixListener::bind(&path).unwrap();
        assert_eq!(listen(&path).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        other.set_nonblocking(true).unwrap();
        assert_eq!(other.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock, "the question is no reader");
    }
}
