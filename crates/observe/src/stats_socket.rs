//! The statistics of this process's pools on a Unix socket, for `pinpool top`: to each reader a line of JSON at once, and one a
//! second.
//!
//! ```text
//! {"process":4711,"pools":[{"name":"train","preset":"adaptive", ..., "owners":[{"tag":"images", ...}]}, ...]}
//! ```
//!
//! The objects of `pools` are the statistics, with the largest owners beside them: `tag`, `buffers`, `bytes`, `asked_bytes` and
//! `oldest_seconds`, which is `null` for buffers without a tag; `why`, what the judge says; `table` and `dump`, the texts for people. A thread of its own reads them, and only while there are readers, so that nothing is
//! done for it by a get or a put. A reader that does not keep up is left, and where there are `READERS_MAX` the one that came first: its last line is
//! `{"closed":"..."}`, which says so. Nobody but the user that the process belongs to can read the socket. The file is removed with the last pool that it
//! shows, or by the end of the process; one that is left behind by a process that was killed is replaced.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use pinpool_os::fork::OfProcess;
use pinpool_os::local_socket::{self, LocalSocket, check_peer};
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicBool, Ordering};
use pinpool_os::threads;

/// Time between two lines.
const EVERY: Duration = Duration::from_secs(1);
/// Time between two looks for new readers.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Most readers at once.
const READERS_MAX: usize = 16;

/// Longest path of a socket: what the kernel takes, without the zero behind it.
pub const PATH_BYTES_MAX: usize = local_socket::PATH_BYTES_MAX;

/// A pool that is shown.
pub trait Shown: Send + Sync {
    /// What is sent of it: its statistics and its owners, as an object of JSON.
    fn object(&self) -> serde_json::Value;
}

/// What this process serves.
static SERVED: OfProcess<Mutex<Vec<Served>>> = OfProcess::new(Mutex::default);

/// One socket.
struct Served {
    path: PathBuf,
    socket: Arc<LocalSocket>,
    pools: Vec<Weak<dyn Shown>>,
}

/// A pool is shown as long as this lives.
#[derive(Debug)]
pub struct Showing {
    socket: Arc<LocalSocket>,
    /// Where the pool lies.
    pool: usize,
}

/// The socket of a process that was started with `PINPOOL_SOCKET=1`: in `$XDG_RUNTIME_DIR`, else in `/tmp`.
pub fn path_of(process: u32) -> PathBuf {
    let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    let dir = runtime_dir.map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
    dir.join(format!("pinpool-{process}.sock"))
}

/// Connects to the socket at `path`, which a process of this user or of root serves.
///
/// # Errors
///
/// If nobody listens there, or another user does.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = UnixStream::connect(path)?;
    check_peer(&socket)?;
    Ok(socket)
}

/// Shows one more pool at `path`, where the first pool opens the socket.
///
/// # Errors
///
/// If the socket cannot be made, another process serves it, or no thread can be had.
pub fn serve(path: &Path, pool: Weak<dyn Shown>) -> io::Result<Showing> {
    let shown = address_of(&pool);
    let mut served = SERVED.get().lock();
    if let Some(known) = served.iter_mut().find(|served| served.path == path) {
        known.pools.push(pool);
        return Ok(Showing { socket: known.socket.clone(), pool: shown });
    }
    let socket = Arc::new(LocalSocket::listen(path)?);
    let there = socket.clone();
    remove_at_exit();
    threads::spawn(c"pinpool-stats", move || run(&there))?;
    served.push(Served { path: path.to_owned(), socket: socket.clone(), pools: vec![pool] });
    Ok(Showing { socket, pool: shown })
}

fn address_of(pool: &Weak<dyn Shown>) -> usize {
    pool.as_ptr().cast::<()>().addr()
}

impl Drop for Showing {
    fn drop(&mut self) {
        // In a child of `fork` nothing is found.
        let Some(served) = SERVED.get_if_made() else { return };
        let mut served = served.lock();
        let Some(at) = served.iter().position(|served| Arc::ptr_eq(&served.socket, &self.socket)) else { return };
        served[at].pools.retain(|pool| address_of(pool) != self.pool);
        if served[at].pools.is_empty() {
            served.swap_remove(at);
            // Under the lock, so that a pool that is made now opens a socket after this. The thread closes the socket when it looks next.
            self.socket.remove_file();
        }
    }
}

/// The end of the process removes the files of pools that have not ended.
#[allow(unsafe_code)]
fn remove_at_exit() {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    extern "C" fn remove() {
        // In a child of `fork` that serves nothing there is no list, and no lock that a thread of the parent holds.
        if let Some(served) = SERVED.get_if_made() {
            served.lock().iter().for_each(|served| served.socket.remove_file());
        }
    }
    // A child of `fork` has the handlers of its parent.
    if !REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: the handler does not unwind. If it cannot be registered for lack of memory, files stay behind.
        unsafe { libc::atexit(remove) };
    }
}

/// Serves until the last pool is gone.
fn run(socket: &Arc<LocalSocket>) {
    let mut readers: VecDeque<UnixStream> = VecDeque::new();
    let mut due = Instant::now() + EVERY;
    loop {
        let mut fresh = VecDeque::new();
        while let Ok((reader, _)) = socket.listener().accept() {
            if check_peer(&reader).and_then(|()| reader.set_nonblocking(true)).is_err() {
                continue;
            }
            fresh.push_back(reader);
            if readers.len() + fresh.len() > READERS_MAX {
                // The one that came first: a reader that is stuck is more likely than one that is new.
                readers.pop_front().or_else(|| fresh.pop_front()).into_iter().for_each(close);
            }
        }
        let is_due = Instant::now() >= due;
        if is_due {
            due = Instant::now() + EVERY;
        }
        if is_due || !fresh.is_empty() {
            let is_read = !fresh.is_empty() || !readers.is_empty();
            let Some(line) = line_or_end(socket, is_read) else { return };
            // A reader that does not keep up is left.
            let mut tell = |reader: &mut UnixStream| reader.write_all(line.as_bytes()).is_ok();
            if is_due {
                readers.retain_mut(&mut tell);
            }
            fresh.retain_mut(&mut tell);
            readers.append(&mut fresh);
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// Says why, and closes the connection.
fn close(mut reader: UnixStream) {
    let why = format!("{READERS_MAX} readers have come after this one, and the process serves no more at once");
    let _ = writeln!(reader, "{}", serde_json::json!({ "closed": why }));
}

/// The next line, empty if nobody reads; `None` when no pool is left.
fn line_or_end(socket: &Arc<LocalSocket>, is_read: bool) -> Option<String> {
    let served = SERVED.get().lock();
    let pools = served.iter().find(|served| Arc::ptr_eq(&served.socket, socket))?.pools.clone();
    drop(served);
    if !is_read {
        return Some(String::new());
    }
    // Under no lock: this may be the last reference to a pool.
    let shown: Vec<_> = pools.iter().filter_map(Weak::upgrade).map(|pool| pool.object()).collect();
    let line = serde_json::json!({ "process": std::process::id(), "pools": shown });
    Some(format!("{line}\n"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use pinpool_os::sync::process::AtomicU64;

    /// Counts how often it is looked at.
    struct Counted {
        looks: AtomicU64,
    }

    impl Shown for Counted {
        fn object(&self) -> serde_json::Value {
            self.looks.fetch_add(1, Ordering::Relaxed);
            serde_json::json!({ "gets": 7 })
        }
    }

    fn counted() -> (Arc<Counted>, Weak<Counted>) {
        let pool = Arc::new(Counted { looks: AtomicU64::new(0) });
        let weak = Arc::downgrade(&pool);
        (pool, weak)
    }

    /// A reader, and its first line.
    fn reader(path: &Path) -> (BufReader<UnixStream>, serde_json::Value) {
        let mut reader = BufReader::new(connect(path).unwrap());
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        (reader, serde_json::from_str(&line).unwrap())
    }

    #[test]
    fn a_pool_is_looked_at_for_readers_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("looked-at.sock");
        let socket = Arc::new(LocalSocket::listen(&path).unwrap());
        let (pool, weak) = counted();
        let shown: Weak<dyn Shown> = weak;
        let showing = Showing { socket: socket.clone(), pool: address_of(&shown) };
        SERVED.get().lock().push(Served { path, socket: socket.clone(), pools: vec![shown] });
        assert_eq!(line_or_end(&socket, false), Some(String::new()));
        assert_eq!(pool.looks.load(Ordering::Relaxed), 0);
        assert!(line_or_end(&socket, true).is_some_and(|line| line.contains("\"gets\":7")));
        assert_eq!(pool.looks.load(Ordering::Relaxed), 1);
        drop(showing);
        assert_eq!(line_or_end(&socket, false), None, "the last pool is gone");
    }

    #[test]
    fn readers_get_a_line_at_once_and_the_file_goes_with_the_last_pool() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stats.sock");
        let (_first, weak) = counted();
        let (_second, other) = counted();
        let showing = [serve(&path, weak).unwrap(), serve(&path, other).unwrap()];
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the directory that it was made in is gone");
        for _ in 0..2 {
            let (_, object) = reader(&path);
            assert_eq!(object["pools"].as_array().unwrap().len(), 2, "{object}");
            assert_eq!(object["pools"][0]["gets"], 7, "{object}");
            assert_eq!(object["process"], std::process::id());
        }
        let [first, second] = showing;
        drop(first);
        assert_eq!(reader(&path).1["pools"].as_array().unwrap().len(), 1);
        drop(second);
        assert!(!path.exists());
        // And at once again.
        let (_third, weak) = counted();
        let _showing = serve(&path, weak).unwrap();
        assert_eq!(reader(&path).1["pools"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn a_file_that_took_the_place_of_the_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stats.sock");
        let (_pool, weak) = counted();
        let showing = serve(&path, weak).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        drop(showing);
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }

    #[test]
    fn silent_readers_do_not_keep_a_new_one_out_and_the_first_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stats.sock");
        let (_pool, weak) = counted();
        let _showing = serve(&path, weak).unwrap();
        let mut all: Vec<_> = (0..=READERS_MAX).map(|_| reader(&path)).collect();
        assert!(all.iter().all(|(_, object)| object["pools"].is_array()));
        // Up to the end of the connection.
        let last = all.remove(0).0.lines().last().unwrap().unwrap();
        assert!(last.contains("\"closed\":\"16 readers have come after this one"), "{last}");
    }
}
