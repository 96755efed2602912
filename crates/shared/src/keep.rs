//! Memory that outlives the process that uses it: a keeper holds the file, and the process that is started next finds its bytes.
//!
//! ```text
//!   pinpool keep NAME ──makes──▶ memory file ◀──maps, page-locks── trainer      killed
//!          └── its descriptor, over a Unix socket ──────────────▶ the next trainer: same bytes, next generation
//! ```
//!
//! The keeper is a process that does nothing but hold the file. Memory that is in the file already is page-locked without being
//! allocated, zeroed or read again. One process holds it at a time, by a lock of the kernel that ends
//! with it, or earlier with the last buffer and the last copy.
//!
//! The file begins with a page of numbers: how often it was attached, and what was last marked as complete.
//!
//! Keeper and holder belong to one user, which both check. The file is sealed, so its length stays. A seal against holes
//! (`fallocate` with `FALLOC_FL_PUNCH_HOLE`) would be one against writing, so there is none: a process of this user that has the file can
//! take pages out of it, and the pages that a driver has page-locked are then no longer those of the file.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

pub use super::kept_file::Mark;
use super::kept_file::{Header, KEPT, KeptFile, peer, shared};
use super::kept_socket::KeptSocket;
pub use super::kept_socket::socket_of;
use super::lend::Lender;
use super::worker::locks_of;
use crate::error::Result;
use crate::memory_file::{MemoryFile, SharedMemory};
use pinpool::backend::PAGE_BYTES;
use pinpool::{PinnedBuf, Pool};
use pinpool_os::fork::ForkGeneration;
use pinpool_os::local_socket::check_peer;
use pinpool_os::sync::plain::Mutex;

/// Between two looks for a process that asks.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Longest wait for an answer of a keeper.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest wait for a holder that is ending.
const ENDING: Duration = Duration::from_millis(200);
/// Between two tries to accept a process when descriptors or memory are short.
const SHORT_PAUSE: Duration = Duration::from_millis(100);

/// Holds memory under a name for other processes of this user. `pinpool keep` is a process with nothing else.
#[derive(Debug)]
pub struct Keeper {
    socket: KeptSocket,
    file: MemoryFile,
    is_hugetlb: bool,
}

impl Keeper {
    /// Makes `bytes` of memory, zero, under `name`. `hugetlb`: in such pages or an error, or never; by default if enough are set
    /// aside.
    ///
    /// # Errors
    ///
    /// - [`is_peer`](crate::Error::is_peer): another process keeps that name,
    /// - [`is_shared`](crate::Error::is_shared): the name is no name, there is not enough memory, or the socket cannot be made.
    pub fn new(name: &str, bytes: usize, hugetlb: Option<bool>) -> Result<Self> {
        let socket = KeptSocket::new(name)?;
        let (file, is_hugetlb) = KeptFile::create(bytes, hugetlb)?;
        Ok(Self { socket, file, is_hugetlb })
    }

    /// Its socket.
    pub fn path(&self) -> &Path {
        self.socket.path()
    }

    /// Whether the memory is in hugetlb pages.
    pub fn is_hugetlb(&self) -> bool {
        self.is_hugetlb
    }

    /// Passes the memory to each process that asks, until `is_over`. Where the system is short of descriptors or memory, processes
    /// wait until it is not.
    ///
    /// # Errors
    ///
    /// [`is_shared`](crate::Error::is_shared): the socket fails.
    pub fn serve(&self, is_over: impl Fn() -> bool) -> Result<()> {
        let failed = |error: io::Error| shared(format!("{}: {error}", self.path().display()));
        let listener = self.socket.listener();
        let mut is_told = false;
        while !is_over() {
            match listener.accept() {
                Ok((socket, _)) => {
                    is_told = false;
                    // One that is gone by now needs nothing, and one of another user gets nothing.
                    if check_peer(&socket).is_ok() {
                        drop(super::pass::pass(&socket, self.file.as_fd(), KEPT));
                    }
                }
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    thread::sleep(LOOK_EVERY);
                }
                // A process that asked and ended.
                Err(error) if error.raw_os_error() == Some(libc::ECONNABORTED) => {}
                // The memory is worth more than an answer now.
                Err(error) if is_short(&error) => {
                    if !is_told {
                        keeper_is_short(self.path(), &error);
                    }
                    is_told = true;
                    thread::sleep(SHORT_PAUSE);
                }
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(())
    }
}

/// A line of a keeper, which has no pool.
///
/// `keeper: no process can attach at PATH ...` (warn): what the line says; `pinpool keep` tries again ten times a
/// second and keeps the memory.
fn keeper_is_short(path: &Path, error: &io::Error) {
    log::warn!(
        "keeper: no process can attach at {} for now, and the memory stays: {error} (raise `ulimit -n`, or end other programs)",
        path.display()
    );
}

/// Whether the system, or a limit of this process, lacks what others may give back.
fn is_short(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM))
}

type Parts = Arc<Mutex<Vec<(usize, usize)>>>;

/// Kept memory in the process that holds it: page-locked as the memory of a pool, under the ceiling of that pool.
///
/// The process holds it until this, its buffers and their copies are gone: a buffer that outlives this keeps other holders out. Under
/// the ceiling is the whole file: the bytes, a page of numbers, and in hugetlb pages the rest of the last one.
///
/// ```no_run
/// use pinpool_shared::keep::Kept;
///
/// // While `pinpool keep weights --bytes 4GiB` runs:
/// let pool = pinpool::Pool::from_env()?;
/// let kept = Kept::attach(&pool, "weights", 4 << 30)?;
/// if kept.completed().is_none_or(|mark| mark.label != "step 100") {
///     kept.begin(); // from here on nothing is complete
///     kept.get(0, 1 << 20)?.as_mut_slice()?.fill(1);
///     kept.complete("step 100", 1 << 20)?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Kept {
    lender: Lender,
    parts: Parts,
    bytes: usize,
    generation: u64,
    made_by: ForkGeneration,
    /// One thread at a time reads or writes the mark, which is several words.
    marking: Mutex<()>,
}

impl Kept {
    /// Takes the `bytes` that a keeper holds under `name`, maps and page-locks them.
    ///
    /// # Errors
    ///
    /// - [`is_peer`](crate::Error::is_peer): nobody keeps that name, or another process holds it,
    /// - [`is_shared`](crate::Error::is_shared): the keeper has another number of bytes, is of another version, belongs to another user, or memory cannot be
    ///   page-locked,
    /// - [`is_limit`](crate::Error::is_limit): it does not fit under the ceiling of `pool`.
    pub fn attach(pool: &Pool, name: &str, bytes: usize) -> Result<Self> {
        let path = socket_of(name)?;
        let socket = UnixStream::connect(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
                peer(format!("nobody keeps {name} ({}): start `pinpool keep {name} --bytes {bytes}`", path.display()))
            }
            _ => shared(format!("{}: {error}", path.display())),
        })?;
        let failed = |error: io::Error| shared(format!("{}: {error}", path.display()));
        // Else another user could change the bytes, or release them under the device.
        check_peer(&socket).map_err(failed)?;
        socket.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        let from = format!("the keeper of {name}");
        let file = MemoryFile::of(super::pass::take(&socket, &from, KEPT)?).map_err(super::layout::failed(KEPT))?;
        let held = locks_of(&file)?;
        // A holder that is ending needs a moment.
        let until = Instant::now() + ENDING;
        while !held.try_lock_slot(0).map_err(failed)? {
            if Instant::now() >= until {
                return Err(peer(format!(
                    "{name} is held by another process, or by this one, whose buffers and copies hold it too: one holds it at a time"
                )));
            }
            thread::sleep(Duration::from_millis(1));
        }
        let kept = KeptFile::open(&file, name, bytes)?;
        let generation = kept.generation();
        let parts = Parts::default();
        let lent = parts.clone();
        let give_back = move |_: &SharedMemory, offset: usize| {
            lent.lock().retain(|&(from, _)| from + PAGE_BYTES != offset);
        };
        // With the page of numbers, and the rest of a page of hugetlb.
        let lender = Lender::new(pool, Some(held), kept.into_memory(), Box::new(give_back))?;
        let made_by = ForkGeneration::now();
        let kept = Self { lender, parts, bytes, generation, made_by, marking: Mutex::new(()) };
        kept.with_header(Header::count_holder);
        Ok(kept)
    }

    /// What `act` makes of the numbers of the file, which no other thread reads or writes meanwhile.
    fn with_header<R>(&self, act: impl FnOnce(&Header) -> R) -> Option<R> {
        // In a child of fork a driver's memory is not mapped, and the lock may be held by a thread of the parent.
        let header = self.lender.memory().shared(0).filter(|_| !self.made_by.is_stale())?;
        let _one_at_a_time = self.marking.lock();
        Some(act(header))
    }

    /// How many processes held it before this one.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// What was last marked as complete, by this process or one before it. `None` while nothing is: the bytes are zeros, or partly written.
    pub fn completed(&self) -> Option<Mark> {
        self.with_header(Header::mark)?
    }

    /// From now on nothing is complete: to be called before bytes are changed that were.
    pub fn begin(&self) {
        self.with_header(Header::clear);
    }

    /// Marks the first `len` bytes as complete, under a label of at most 192 bytes. A process that is killed meanwhile leaves the mark as it was.
    /// Of threads that mark at once, one is the last, and its label and length are the mark.
    ///
    /// # Errors
    ///
    /// [`is_shared`](crate::Error::is_shared): there are fewer bytes, or the label is too long.
    pub fn complete(&self, label: &str, len: u64) -> Result<()> {
        if len > self.bytes as u64 {
            return Err(shared(format!("{len} B cannot be complete of {} B", self.bytes)));
        }
        let marked = self.with_header(|header| header.set_mark(label, len, self.generation));
        marked.unwrap_or_else(|| Err(shared("the memory is not mapped")))
    }

    /// The `len` bytes from `offset` on as a buffer, to be filled, read and copied like every buffer. `offset` is a multiple of 4096. No byte is in two
    /// buffers at a time: dropped, once its copies are over, its bytes can be had again.
    ///
    /// # Errors
    ///
    /// [`is_shared`](crate::Error::is_shared): outside of the memory, not at such an offset, or in another buffer.
    pub fn get(&self, offset: usize, len: usize) -> Result<PinnedBuf> {
        let end = offset.checked_add(len).filter(|&end| end <= self.bytes);
        let Some(end) = end.filter(|_| offset.is_multiple_of(PAGE_BYTES)) else {
            return Err(shared(format!(
                "{len} B at {offset} of {} B: a buffer begins at a multiple of {PAGE_BYTES} and ends with the memory",
                self.bytes
            )));
        };
        let end = end.max(offset + 1).next_multiple_of(PAGE_BYTES);
        let mut parts = self.parts.lock();
        if let Some(other) = parts.iter().find(|other| other.0 < end && offset < other.1) {
            return Err(shared(format!(
                "{len} B at {offset}: another buffer has the bytes from {} to {}",
                other.0, other.1
            )));
        }
        parts.push((offset, end));
        drop(parts);
        self.lender
            .lend(offset + PAGE_BYTES, len)
            .inspect_err(|_| self.parts.lock().retain(|&part| part != (offset, end)))
    }

    /// What page-locks the memory: `register`, `mlock` or `none`.
    pub fn page_lock(&self) -> &'static str {
        self.lender.locked_by()
    }

    /// The pool that its buffers are of.
    pub fn pool(&self) -> Pool {
        self.lender.pool().clone()
    }
}
