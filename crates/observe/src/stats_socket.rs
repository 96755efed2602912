//! Serves the statistics of the pools of this process on a Unix socket. Each reader gets a line of JSON within 0.1 s, then one
//! every second.
//!
//! ```text
//! {"process":4711,"pools":[{"name":"train","preset":"adaptive", ..., "holders":[{"tag":"images", ...}]}, ...]}
//! ```
//!
//! Each object in `pools` contains the statistics, the largest holders (`tag`, `buffers`, `bytes`, `requested_bytes`, and
//! `oldest_age_seconds`, which is `null` for untagged buffers), `why` (the diagnosis), `snapshot` (the input of the diagnosis), and
//! the texts `table` and `dump`.
//!
//! One thread serves all sockets of the process and reads the statistics only while there are readers, so requests and returns
//! cost nothing. A slow reader is dropped. Only root and the user of the process can read the socket. Its file is removed with
//! its last pool or when the process exits; a file left by a killed process is replaced.

use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Weak;
use std::thread;
use std::time::Duration;

use pinpool_os::exit::call_at_exit;
use pinpool_os::fork::PerProcess;
use pinpool_os::local_socket::{self, LocalSocket, check_peer};
use pinpool_os::sync::unmodeled::{AtomicBool, Mutex};
use pinpool_os::threads;

/// Time between two checks for new readers.
const ACCEPT_EVERY: Duration = Duration::from_millis(100);
/// Number of checks between two lines.
const CHECKS: u32 = 10;

/// Longest path of a socket, without the terminating zero.
pub const PATH_BYTES_MAX: usize = local_socket::PATH_BYTES_MAX;

/// A pool with statistics to serve.
pub trait StatisticsSource: Send + Sync {
    /// Returns the statistics and holders as a JSON object.
    fn object(&self) -> serde_json::Value;
}

/// The sockets of this process.
static SERVING: PerProcess<Mutex<Serving>> = PerProcess::new(Mutex::default);

#[derive(Default)]
struct Serving {
    sockets: Vec<Served>,
    /// Whether the thread is running.
    is_running: bool,
}

/// One socket; closed on drop.
struct Served {
    path: PathBuf,
    socket: LocalSocket,
    pools: Vec<Weak<dyn StatisticsSource>>,
    readers: Vec<UnixStream>,
}

/// Serves a pool until it is dropped.
#[derive(Debug)]
pub struct ServedPool(Weak<dyn StatisticsSource>);

/// Returns the path of the socket of a process that was started with `PINPOOL_SOCKET=1`: in `$XDG_RUNTIME_DIR`, else in `/tmp`.
pub fn path_of(process: u32) -> PathBuf {
    let runtime_dir = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
    runtime_dir.map_or_else(|| PathBuf::from("/tmp"), PathBuf::from).join(format!("pinpool-{process}.sock"))
}

/// Connects to the socket at `path`, which a process of this user or of root serves.
///
/// # Errors
///
/// If no process serves the socket, or a process of another user does.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    UnixStream::connect(path).and_then(|socket| check_peer(&socket).map(|()| socket))
}

/// Serves a pool at `path`; the first pool opens the socket.
///
/// # Errors
///
/// If the socket cannot be created, another process serves it, or no thread can be started.
pub fn serve(path: &Path, pool: Weak<dyn StatisticsSource>) -> io::Result<ServedPool> {
    let mut serving = SERVING.get().lock();
    match serving.sockets.iter_mut().find(|served| served.path == path) {
        Some(known) => known.pools.push(pool.clone()),
        None => {
            let socket = LocalSocket::listen(path)?;
            static REGISTERED: AtomicBool = AtomicBool::new(false);
            call_at_exit(&REGISTERED, remove_files);
            if !serving.is_running {
                threads::spawn(c"pinpool-stats", run)?;
                serving.is_running = true;
            }
            let (path, readers) = (path.to_owned(), Vec::new());
            serving.sockets.push(Served { path, socket, pools: vec![pool.clone()], readers });
        }
    }
    Ok(ServedPool(pool))
}

impl Drop for ServedPool {
    fn drop(&mut self) {
        // A forked child has no list.
        let Some(serving) = SERVING.get_if_made() else { return };
        // Under the lock, so that a new pool opens its socket only afterwards.
        serving.lock().sockets.retain_mut(|served| {
            served.pools.retain(|pool| !pool.ptr_eq(&self.0));
            !served.pools.is_empty()
        });
    }
}

/// Removes the socket files of pools that still exist when the process exits.
extern "C" fn remove_files() {
    // A forked child that serves nothing has no list.
    if let Some(serving) = SERVING.get_if_made() {
        serving.lock().sockets.iter().for_each(|served| served.socket.remove_file());
    }
}

/// Serves all sockets until none is left.
fn run() {
    for check in (0..CHECKS).cycle() {
        let is_due = check == CHECKS - 1;
        let mut serving = SERVING.get().lock();
        serving.is_running = !serving.sockets.is_empty();
        if !serving.is_running {
            return;
        }
        let rounds: Vec<_> = serving.sockets.iter_mut().filter_map(|served| served.begin_round(is_due)).collect();
        // The lines are made without the lock, because the last reference to a pool may be dropped here, which takes the lock.
        drop(serving);
        for (path, pools, mut readers) in rounds {
            let shown: Vec<_> = pools.iter().filter_map(Weak::upgrade).map(|pool| pool.object()).collect();
            let line = format!("{}\n", serde_json::json!({ "process": std::process::id(), "pools": shown }));
            // Slow readers are dropped.
            readers.retain_mut(|reader| reader.write_all(line.as_bytes()).is_ok());
            if let Some(served) = SERVING.get().lock().sockets.iter_mut().find(|served| served.path == path) {
                served.readers.append(&mut readers);
            }
        }
        thread::sleep(ACCEPT_EVERY);
    }
}

/// The path and pools of a socket, and the readers that get a line now.
type Round = (PathBuf, Vec<Weak<dyn StatisticsSource>>, Vec<UnixStream>);

impl Served {
    /// Returns the readers that have just connected and, if a line is due, all others. Returns `None` without readers.
    fn begin_round(&mut self, is_due: bool) -> Option<Round> {
        let mut readers = if is_due { std::mem::take(&mut self.readers) } else { Vec::new() };
        while let Ok((reader, _)) = self.socket.listener().accept() {
            if check_peer(&reader).and_then(|()| reader.set_nonblocking(true)).is_ok() {
                readers.push(reader);
            }
        }
        (!readers.is_empty()).then(|| (self.path.clone(), self.pools.clone(), readers))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::os::unix::fs::PermissionsExt;

    use std::sync::Arc;

    use tempfile::TempDir;

    use super::*;
    use pinpool_os::sync::unmodeled::{AtomicU64, Ordering};

    /// A pool that counts how often its statistics are read.
    struct Counted(AtomicU64);

    impl StatisticsSource for Counted {
        fn object(&self) -> serde_json::Value {
            self.0.fetch_add(1, Ordering::Relaxed);
            serde_json::json!({ "gets": 7 })
        }
    }

    /// Returns a folder, the path of a socket in it, and a pool.
    fn counted() -> (TempDir, PathBuf, Arc<Counted>, Weak<Counted>) {
        let (dir, pool) = (tempfile::tempdir().unwrap(), Arc::new(Counted(AtomicU64::new(0))));
        let (path, weak) = (dir.path().join("stats.sock"), Arc::downgrade(&pool));
        (dir, path, pool, weak)
    }

    /// Connects a reader, and returns it with its first line.
    fn reader(path: &Path) -> (BufReader<UnixStream>, serde_json::Value) {
        let mut reader = BufReader::new(connect(path).unwrap());
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        (reader, serde_json::from_str(&line).unwrap())
    }

    #[test]
    fn statistics_are_read_only_while_there_are_readers() {
        let (_dir, path, pool, weak) = counted();
        let _showing = serve(&path, weak).unwrap();
        // This time includes several checks for readers.
        thread::sleep(3 * ACCEPT_EVERY);
        assert_eq!(pool.0.load(Ordering::Relaxed), 0);
        assert_eq!(reader(&path).1["pools"][0]["gets"], 7);
        assert_ne!(pool.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_last_pool_closes_the_listener_immediately() {
        let (dir, path, _pool, weak) = counted();
        let link = dir.path().join("link.sock");
        let showing = serve(&path, weak).unwrap();
        // The file of the socket is removed, but through another name of the file a listener could still be reached.
        fs::hard_link(&path, &link).unwrap();
        drop(reader(&link));
        drop(showing);
        assert_eq!(UnixStream::connect(&link).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn one_thread_serves_all_sockets() {
        let dir = tempfile::tempdir().unwrap();
        let serve_at = |number: usize| {
            let (_, _, pool, weak) = counted();
            (serve(&dir.path().join(format!("{number}.sock")), weak).unwrap(), pool)
        };
        let threads = || {
            let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path().join("comm"));
            tasks.filter(|comm| fs::read_to_string(comm).is_ok_and(|name| name == "pinpool-stats\n")).count()
        };
        (0..20).for_each(|number| drop(serve_at(number)));
        let all: Vec<_> = (0..20).map(serve_at).collect();
        let pools = |number| reader(&dir.path().join(format!("{number}.sock"))).1["pools"].as_array().unwrap().len();
        assert!((0..all.len()).all(|number| pools(number) == 1));
        // A thread that served earlier sockets may still be ending.
        assert!(threads() <= 2, "{} threads", threads());
    }

    #[test]
    fn readers_get_a_line_immediately_and_the_last_pool_removes_the_file() {
        let (dir, path, _first, weak) = counted();
        let (_, _, _second, other) = counted();
        let showing = [serve(&path, weak).unwrap(), serve(&path, other).unwrap()];
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the folder contains only the socket");
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
        // The path can be served again immediately.
        let (_, _, _third, weak) = counted();
        let _showing = serve(&path, weak).unwrap();
        assert_eq!(reader(&path).1["pools"].as_array().unwrap().len(), 1);
    }

    #[test]
    fn a_file_that_replaced_the_socket_is_kept() {
        let (_dir, path, _pool, weak) = counted();
        let showing = serve(&path, weak).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "precious").unwrap();
        drop(showing);
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }
}
