//! Words that processes share under a name, and in which the death of each is noticed at once.
//!
//! ```text
//!   file:   [header: magic, kind, version, sizes, where the memory is]        removed by its last owner
//!   memory: [cookie] [words of all] [slot 0] [slot 1] ... [slot n-1]          goes with its last owner
//!   locks:  one byte for the file as a whole, one for each slot; far behind the end of the file
//!
//!   attach: lock the file ─▶ check the header, or write one if nobody is attached ─▶ lock a free slot ─▶ unlock the file
//!   death:  the kernel ends the process, unmaps its memory, then drops its locks: the slot is free
//! ```
//!
//! **Why locks of open file descriptions.** A slot belongs to a living owner exactly while its byte is locked.
//!
//! - The kernel drops the lock when the owner ends, by whatever signal at whatever instruction: no daemon, no time limit. It
//!   does so after it has taken the memory of the process apart, so what `mlock` had locked is unlocked by then. What a driver
//!   has page-locked goes when the descriptors of the driver are closed, in the same pass as the lock's: Linux 6.18 closes
//!   the highest number first, so after it where the driver was opened later, but promises no order. Else another process may
//!   claim the bytes a moment before they are unlocked.
//! - A number of a process tells nothing here: it is reused, and means another process in another namespace. A lock is on the
//!   file itself, so containers that share the file see each other's.
//! - POSIX locks of a process (`F_SETLK`) would be dropped when any code of that process closes any descriptor of the file,
//!   and two copies of this crate in one process would not see each other's. A robust mutex needs one thread that lives as long
//!   as its process, the same C library in all processes, and is released before the memory of its process is. A
//!   descriptor of a process (`pidfd`) reaches no other namespace.
//! - The price: children of `fork` share the description, with its locks. So each child closes it before `fork` returns there.
//!   Children made in other ways close it at `exec`.
//!
//! **Why the words are not in the file.** A process that may write to a file may cut it, and each access behind its end would end its
//! process by SIGBUS. A segment cannot be cut (`segment`). The price: containers must share the namespace of interprocess
//! communication with the file's directory, as those of one pod do.
//!
//! | file | owns |
//! | --- | --- |
//! | `header` | the header and what is wrong with one: bytes in, verdict out |
//! | `locks` | locks on bytes of a file by open file description; the list of descriptors that a child of `fork` closes |
//! | `presence` | whether owners of the name use another file than the one that has it now |
//! | `segment` | the words in the memory of this process |
//! | `snapshot` | the words, for one that looks without attaching |
//! | `futex` | threads that sleep on a word and are woken by other processes |
//! | `event_count` | waits for something that another process changes |
//!
//! Knows no pool and no meaning of the words. Linux only: elsewhere attaching is an error.
//!
//! - shared-I1: the memory of a file is made anew only under the lock of the file while no slot is locked.
//! - shared-I2: a slot's words are written by its owner, and by who holds the lock of its byte: a newcomer or one that clears
//!   what a dead owner left.
//! - shared-I3: a description with locks is closed in each child of `fork`, and nothing else is closed by its number.
//! - shared-I4: each owner shares a lock that tells its name and its file, for as long as it is attached to that file.
#![allow(unsafe_code)] // Locks, maps and wakes by calls of the system.

use std::fs::{File, Metadata, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

mod event_count;
mod futex;
mod header;
mod locks;
mod presence;
mod segment;
mod snapshot;

pub use event_count::EventCount;
pub use futex::{sleep_while, wake_all};
pub use header::Layout;
use header::{HEADER_BYTES, Memory, Verdict};
pub use locks::LockFile;
use presence::Presence;
use segment::Segment;
pub use snapshot::Snapshot;

use pinpool_os::fork::{self, ForkGeneration};
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicBool, AtomicU64, Ordering};

/// Named files lie here.
pub const DIRECTORY: &str = "/dev/shm";
/// Longest wait for the lock of the file, which others hold for less than a millisecond.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at a damaged file.
const DAMAGED_PAUSE: Duration = Duration::from_millis(5);
/// Only a user's own processes may attach.
const MODE: u32 = 0o600;

/// Why a shared file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SharedFileError {
    #[error("{action} {place}: {error}{}", remedy_of(.error))]
    System { action: &'static str, place: String, error: io::Error },
    #[error("{place} {why}; remove it, or use another name")]
    Foreign { place: String, why: String },
    #[error(
        "{place} has layout version {found}, and this process knows version {own}: let all processes that share it use the same \
         release of pinpool, or use another name"
    )]
    Version { place: String, found: u32, own: u32 },
    #[error("{place} {why} while other processes use it: end them, or use another name")]
    Damaged { place: String, why: String },
    #[error("all {slots} slots of {place} are taken by living owners: end some of them, or use another name")]
    Full { place: String, slots: usize },
    #[error("no memory can be shared by {place}: {error} (`ipcs -l` shows the limits)")]
    Memory { place: String, error: io::Error },
    #[error(
        "{place} is used in another namespace of interprocess communication: share that too (docker --ipc, Kubernetes hostIPC), \
         or use another name"
    )]
    Elsewhere { place: String },
    #[error("{place} stays locked by another process: is it stopped (SIGSTOP) or in a debugger?")]
    Locked { place: String },
}

fn remedy_of(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOSPC) => " (make room there: `df -h /dev/shm`; in a container raise --shm-size)",
        Some(libc::EACCES | libc::EPERM) => " (it belongs to another user, or may not be written: use another name)",
        Some(libc::EROFS) => " (mount it writable)",
        Some(libc::ELOOP) => " (it is a symbolic link: remove it)",
        Some(libc::EINVAL) => " (the system may lack locks of open file descriptions)",
        _ => "",
    }
}

/// What became of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileState {
    Whole,
    /// Its name leads elsewhere, or nowhere.
    Removed,
    /// It is not as long as it was made.
    Cut,
    /// Code of this process has closed a descriptor that is not its own, and with it the locks.
    Closed,
}

/// A shared file with a slot of its own for this owner. One process may attach several times; each is an owner.
#[derive(Debug)]
pub struct SharedFile {
    path: PathBuf,
    layout: Layout,
    segment: Segment,
    locks: LockFile,
    presence: Presence,
    slot: usize,
    /// Only one thread at a time looks at dead owners: threads share the description, so its locks do not keep them apart.
    clearing: Mutex<()>,
    generation: ForkGeneration,
    has_left: AtomicBool,
}

impl SharedFile {
    /// Attaches to the file at `path`, which is made if it is not there, and takes a free slot of it, all zeros. If nobody
    /// else is attached, all words are zero and `begin` sets those of all; returns whether that was so.
    pub fn attach(
        path: &Path,
        layout: &Layout,
        patience: Duration,
        begin: impl FnOnce(&[AtomicU64]),
    ) -> Result<(Self, bool), SharedFileError> {
        if !cfg!(target_os = "linux") {
            return Err(failed("attach to", path, io::Error::new(io::ErrorKind::Unsupported, "needs Linux")));
        }
        let deadline = Instant::now() + patience;
        let locking = |error| failed("lock", path, error);
        loop {
            let no_fork = fork::hold_off();
            let (file, metadata) = open(path, true)?;
            let locks = LockFile::over(file, &no_fork).map_err(|error| failed("watch", path, error))?;
            let presence = Presence::of(path, metadata.ino(), &no_fork).map_err(locking)?;
            drop(no_fork);
            if !locks.lock_file_until(deadline).map_err(locking)? {
                return Err(SharedFileError::Locked { place: text_of(path) });
            }
            // The last owner may have removed the file between its opening and its lock.
            if !is_still(path, &metadata) {
                continue;
            }
            presence.begin().map_err(locking)?;
            let is_first = !locks.has_owner().map_err(locking)?;
            let segment = if is_first {
                create(path, layout, &locks, begin).inspect_err(|_| remove_if_empty(path, &locks))?
            } else {
                let memory = memory_of(path, layout, &locks);
                if let (Err(SharedFileError::Damaged { .. }), true) = (&memory, Instant::now() < deadline) {
                    // Its owners notice, and remove it.
                    drop((locks, presence));
                    thread::sleep(DAMAGED_PAUSE);
                    continue;
                }
                let Memory { id, cookie } = memory?;
                let found = Segment::attach(id, layout.words(), cookie, false);
                found.ok_or_else(|| SharedFileError::Elsewhere { place: text_of(path) })?
            };
            let taken = take_slot(&locks, layout).map_err(locking)?;
            let slot = taken.ok_or_else(|| SharedFileError::Full { place: text_of(path), slots: layout.slots })?;
            let (generation, clearing) = (ForkGeneration::now(), Mutex::new(()));
            let (has_left, path, layout) = (AtomicBool::new(false), path.to_owned(), *layout);
            let file = Self { path, layout, segment, locks, presence, slot, clearing, generation, has_left };
            file.zero(slot);
            file.locks.mark_slot(slot).map_err(|error| failed("lock", &file.path, error))?;
            file.locks.unlock_file();
            return Ok((file, is_first));
        }
    }

    /// The words that belong to all owners.
    pub fn common(&self) -> &[AtomicU64] {
        &self.segment.words()[self.layout.common_words()]
    }

    /// The words of slot `index`; none for a number that no slot has.
    pub fn slot(&self, index: usize) -> &[AtomicU64] {
        self.segment.words().get(self.layout.slot_words(index)).unwrap_or_default()
    }

    /// The number of this owner's slot.
    pub fn own_slot(&self) -> usize {
        self.slot
    }

    pub fn slots(&self) -> usize {
        self.layout.slots
    }

    /// Whether slot `index` belongs to an owner that lives, this one or another: words that are read after this are its own.
    pub fn is_owned(&self, index: usize) -> bool {
        // What cannot be asked counts as alive.
        index == self.slot || self.locks.is_slot_marked(index).unwrap_or(true)
    }

    /// Sets the words of slot `index` to zero if its owner has ended without doing so. Returns whether it did.
    pub fn clear_if_dead(&self, index: usize) -> bool {
        let has_left = self.has_left.load(Ordering::SeqCst);
        if has_left || self.is_forked() || index == self.slot || index >= self.layout.slots {
            return false;
        }
        let _one_thread = self.clearing.lock();
        if !self.locks.try_lock_slot(index).unwrap_or(false) {
            return false;
        }
        self.zero(index);
        self.locks.unlock_slot(index);
        true
    }

    /// Whether this process is a child of the one that attached: then it owns nothing here.
    pub fn is_forked(&self) -> bool {
        self.generation.is_stale()
    }

    /// What became of the file and of its descriptors.
    pub fn state(&self) -> FileState {
        match self.locks.metadata() {
            Some(_) if !self.presence.is_open() => FileState::Closed,
            Some(found) if found.nlink() == 0 => FileState::Removed,
            Some(found) if found.len() != HEADER_BYTES as u64 => FileState::Cut,
            Some(_) => FileState::Whole,
            None => FileState::Closed,
        }
    }

    /// Whether owners of the name use another file, because this one or that one was removed.
    pub fn has_owners_elsewhere(&self) -> bool {
        self.presence.is_elsewhere()
    }

    /// Takes the name from a file that was cut: no owner can attach to it.
    pub fn remove_cut(&self, patience: Duration) {
        if self.locks.lock_file_until(Instant::now() + patience).unwrap_or(false) {
            remove(&self.path, &self.locks);
            self.locks.unlock_file();
        }
    }

    fn zero(&self, index: usize) {
        // SeqCst: in the order of all sums over slots (the host ledger's claims).
        self.slot(index).iter().for_each(|word| word.store(0, Ordering::SeqCst));
    }
}

impl SharedFile {
    /// Gives the slot up; the words stay mapped. The last owner removes the file. Its drop does the same.
    pub fn detach(&self) {
        // A child of `fork` has closed the description, and the slot is its parent's.
        if self.is_forked() || self.has_left.swap(true, Ordering::SeqCst) {
            return;
        }
        let _one_thread = self.clearing.lock();
        let is_locked = self.locks.lock_file_until(Instant::now() + PATIENCE).unwrap_or(false);
        self.locks.unmark_slot(self.slot);
        self.zero(self.slot);
        // Before the name can be another file's, whose owners would wait for this one.
        self.presence.end();
        self.locks.unlock_slot(self.slot);
        if is_locked && !self.locks.has_owner().unwrap_or(true) {
            remove(&self.path, &self.locks);
        }
        self.locks.unlock_file();
    }
}

impl SharedFile {
    /// The slot is not this owner's any more: it is left as it is.
    pub fn abandon(&self) {
        if !self.has_left.swap(true, Ordering::SeqCst) && self.presence.is_open() {
            self.presence.end();
        }
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        self.detach();
    }
}

/// A number that no other owner and no other segment has.
pub fn random() -> u64 {
    // Keys from the system. A child of `fork` has those of its parent, and another number.
    RandomState::new().hash_one((std::process::id(), Instant::now()))
}

fn text_of(path: &Path) -> String {
    path.display().to_string()
}

fn failed(action: &'static str, path: &Path, error: io::Error) -> SharedFileError {
    SharedFileError::System { action, place: text_of(path), error }
}

fn open(path: &Path, is_made: bool) -> Result<(File, Metadata), SharedFileError> {
    let mut options = OpenOptions::new();
    // For writing as well: the kernel asks that of who looks for a lock for writing.
    options.read(true).write(true).create(is_made).mode(MODE).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path).map_err(|error| failed("open", path, error))?;
    let metadata = file.metadata().map_err(|error| failed("open", path, error))?;
    let foreign = |why: &str| Err(SharedFileError::Foreign { place: text_of(path), why: why.to_owned() });
    // SAFETY: reads a number of this process.
    let user = unsafe { libc::geteuid() };
    if !metadata.is_file() {
        return foreign("is no file");
    }
    if metadata.uid() != user {
        return foreign(&format!("belongs to user {}, and this process runs as {user}", metadata.uid()));
    }
    if metadata.mode() & 0o077 != 0 {
        return foreign(&format!("may be used by others (mode {:o}, not {MODE:o})", metadata.mode() & 0o777));
    }
    Ok((file, metadata))
}

/// Whether `path` still leads to the file that was opened.
fn is_still(path: &Path, opened: &Metadata) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|found| (found.dev(), found.ino()) == (opened.dev(), opened.ino()))
}

fn read_up_to(file: &File, bytes: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], done as u64)? {
            0 => break,
            read => done += read,
        }
    }
    Ok(done)
}

/// Where the words are, by the header.
fn memory_of(path: &Path, layout: &Layout, locks: &LockFile) -> Result<Memory, SharedFileError> {
    let place = text_of(path);
    Err(match verdict(path, layout, locks)? {
        Verdict::Ours(memory) => return Ok(memory),
        Verdict::Empty => SharedFileError::Damaged { place, why: "has lost its header".to_owned() },
        Verdict::OtherVersion(found) => SharedFileError::Version { place, found, own: layout.version },
        Verdict::Damaged(why) => SharedFileError::Damaged { place, why },
        Verdict::Foreign(why) => SharedFileError::Foreign { place, why },
    })
}

fn verdict(path: &Path, layout: &Layout, locks: &LockFile) -> Result<Verdict, SharedFileError> {
    let mut bytes = [0; HEADER_BYTES];
    let file = locks.file();
    let read = read_up_to(file, &mut bytes).map_err(|error| failed("read", path, error))?;
    let len = file.metadata().map_err(|error| failed("read", path, error))?.len();
    Ok(header::check(&bytes[..read], len, layout))
}

/// Makes the words, and the header that tells where they are, over whatever an earlier owner, a creator that was killed or an
/// older version has left. Under the lock of the file while nobody is attached.
fn create(
    path: &Path,
    layout: &Layout,
    locks: &LockFile,
    begin: impl FnOnce(&[AtomicU64]),
) -> Result<Segment, SharedFileError> {
    if let Verdict::Foreign(why) = verdict(path, layout, locks)? {
        return Err(SharedFileError::Foreign { place: text_of(path), why });
    }
    let cookie = random();
    let segment = Segment::create(layout.words(), cookie)
        .map_err(|error| SharedFileError::Memory { place: text_of(path), error })?;
    begin(&segment.words()[layout.common_words()]);
    let header = header::bytes_of(layout, Memory { id: segment.id(), cookie });
    let written = locks.file().write_all_at(&header, 0).and_then(|()| locks.file().set_len(HEADER_BYTES as u64));
    written.map(|()| segment).map_err(|error| failed("write", path, error))
}

/// Takes a free slot. A slot may look taken for a moment while another owner clears it.
fn take_slot(locks: &LockFile, layout: &Layout) -> io::Result<Option<usize>> {
    for _ in 0..3 {
        for index in 0..layout.slots {
            if locks.try_lock_slot(index)? {
                return Ok(Some(index));
            }
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(None)
}

/// Removes a file that could not be made. Under its lock.
fn remove_if_empty(path: &Path, locks: &LockFile) {
    let is_unused = !locks.has_owner().unwrap_or(true);
    let mut magic = [0; 8];
    // Never a file of another program.
    if is_unused && !read_up_to(locks.file(), &mut magic).is_ok_and(|read| read > 0 && magic != [0; 8]) {
        remove(path, locks);
    }
}

/// Removes the file under its lock: who opens it meanwhile sees that, and makes another.
fn remove(path: &Path, locks: &LockFile) {
    if locks.file().metadata().is_ok_and(|own| is_still(path, &own)) {
        // A file that stays is used by the next owner.
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(all(test, target_os = "linux", not(miri), not(pinpool_loom)))] // Processes and files.
mod tests;
