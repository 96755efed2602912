//! A file in shared memory that processes use together, in which the death of each is noticed at once.
//!
//! ```text
//!   file:   [header: magic, kind, version, sizes] [words of all] [slot 0] [slot 1] ... [slot n-1]
//!   locks:  one byte for the file as a whole, one for each slot; far behind the end of the file
//!
//!   attach: lock the file ─▶ check the header, or write one if nobody is attached ─▶ lock a free slot ─▶ unlock the file
//!   death:  the kernel ends the process, unpins its memory, then drops its locks: the slot is free
//! ```
//!
//! **Why locks of open file descriptions.** A slot belongs to a living owner exactly while its byte is locked.
//!
//! - The kernel drops the lock when the owner ends, by whatever signal at whatever instruction: no daemon, no time limit. It
//!   does so after it has taken the memory of the process apart, so what the owner had pinned is unpinned by then.
//! - A number of a process tells nothing here: it is reused, and means another process in another namespace. A lock is on the
//!   file itself, so containers that share the file see each other's.
//! - POSIX locks of a process (`F_SETLK`) would be dropped when any code of that process closes any descriptor of the file,
//!   and two copies of this crate in one process would not see each other's. A robust mutex needs one thread that lives as long
//!   as its process, the same C library in all processes, and is released before the memory of its process is. A
//!   descriptor of a process (`pidfd`) reaches no other namespace.
//! - The price: children of `fork` share the description, with its locks. So each child closes it before `fork` returns there,
//!   and what is locked is never mapped: a mapping would keep the description open in a child after that. Children made in
//!   other ways close it at `exec`.
//!
//! | file | owns |
//! | --- | --- |
//! | `header` | the header and what is wrong with one: bytes in, verdict out |
//! | `locks` | locks on bytes of a file by open file description; the list of descriptors that a child of `fork` closes |
//! | `mapping` | the words of the file in the memory of this process |
//! | `futex` | threads that sleep on a word and are woken by other processes |
//! | `event_count` | waits for something that another process changes |
//!
//! Knows no pool and no meaning of the words. Linux only: elsewhere attaching is an error.
//!
//! - shared-I1: the bytes of the file that are mapped are allocated and stay as many while an owner is attached: the file is
//!   cut and allocated anew only under the lock of the file while no slot is locked.
//! - shared-I2: a slot's words are written by its owner, and by who holds the lock of its byte: a newcomer or one that clears
//!   what a dead owner left.
//! - shared-I3: a description with locks is never mapped, and closed in each child of `fork`.
#![allow(unsafe_code)] // Locks, maps and wakes by calls of the system.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

mod event_count;
mod futex;
mod header;
mod locks;
mod mapping;

pub(crate) use event_count::EventCount;
pub(crate) use futex::{sleep_while, wake_all};
pub(crate) use header::Layout;
use header::{HEADER_BYTES, Verdict};
pub(crate) use locks::LockFile;
use mapping::Mapping;

use crate::fork::{self, ForkGeneration};
use crate::sync::plain::Mutex;
use crate::sync::process::{AtomicBool, AtomicU64, Ordering};

/// Named files lie here.
pub(crate) const DIRECTORY: &str = "/dev/shm";
/// Longest wait for the lock of the file, which others hold for less than a millisecond.
const PATIENCE: Duration = Duration::from_secs(5);
/// A snapshot of words that change all the time is taken so often.
const READINGS: u32 = 64;
/// Only a user's own processes may attach.
const MODE: u32 = 0o600;

/// Where a shared file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// A file with a name, which the last owner removes.
    Named(PathBuf),
    /// An open descriptor, such as one of a memfd. It stays the caller's, and is opened anew through `/proc`.
    #[allow(dead_code)] // For memory that has no name.
    Descriptor(RawFd),
}

/// Why a shared file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SharedFileError {
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
    #[error("{place} stays locked by another process for {PATIENCE:?}: is it stopped (SIGSTOP) or in a debugger?")]
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

/// A shared file with a slot of its own for this owner. One process may attach several times; each is an owner.
#[derive(Debug)]
pub(crate) struct SharedFile {
    place: Place,
    layout: Layout,
    mapping: Mapping,
    locks: LockFile,
    slot: usize,
    /// Device and number of the file.
    identity: (u64, u64),
    /// Only one thread at a time looks at dead owners: threads share the description, so its locks do not keep them apart.
    clearing: Mutex<()>,
    generation: ForkGeneration,
    has_left: AtomicBool,
}

impl SharedFile {
    /// Attaches to the file at `place`, which is made if it is not there, and takes a free slot of it, all zeros. If nobody
    /// else is attached, all words are zero and `begin` sets those of all; returns whether that was so.
    pub(crate) fn attach(
        place: &Place,
        layout: &Layout,
        begin: impl FnOnce(&[AtomicU64]),
    ) -> Result<(Self, bool), SharedFileError> {
        if !cfg!(target_os = "linux") {
            return Err(failed("attach to", place, io::Error::new(io::ErrorKind::Unsupported, "needs Linux")));
        }
        let deadline = Instant::now() + PATIENCE;
        loop {
            let no_fork = fork::hold_off();
            let (file, metadata) = open(place, MODE)?;
            let locks = LockFile::over(file, &no_fork).map_err(|error| failed("watch", place, error))?;
            drop(no_fork);
            if !locks.lock_file_until(deadline).map_err(|error| failed("lock", place, error))? {
                return Err(SharedFileError::Locked { place: text_of(place) });
            }
            // The last owner may have removed the file between its opening and its lock.
            if matches!(place, Place::Named(path) if !is_still(path, &metadata)) {
                continue;
            }
            let is_first = !locks.has_owner().map_err(|error| failed("lock", place, error))?;
            prepare(place, layout, &locks, is_first).inspect_err(|_| remove_if_empty(place, &locks))?;
            let (file, mapped) = open(place, MODE)?;
            if (mapped.dev(), mapped.ino()) != (metadata.dev(), metadata.ino()) {
                continue;
            }
            let mapping = Mapping::of(&file, layout.file_bytes()).map_err(|error| failed("map", place, error))?;
            if is_first {
                begin(&mapping.words()[layout.common_words()]);
                // Release: who reads the magic without the lock of the file finds the rest complete.
                mapping.words()[0].store(header::MAGIC, Ordering::Release);
            }
            let taken = take_slot(&locks, layout).map_err(|error| failed("lock", place, error))?;
            let slot = taken.ok_or_else(|| SharedFileError::Full { place: text_of(place), slots: layout.slots })?;
            let (generation, clearing) = (ForkGeneration::now(), Mutex::new(()));
            let has_left = AtomicBool::new(false);
            let (place, layout) = (place.clone(), *layout);
            let identity = (metadata.dev(), metadata.ino());
            let file = Self { place, layout, mapping, locks, slot, identity, clearing, generation, has_left };
            file.zero(slot);
            file.locks.mark_slot(slot).map_err(|error| failed("lock", &file.place, error))?;
            file.locks.unlock_file();
            return Ok((file, is_first));
        }
    }

    /// The words that belong to all owners.
    pub(crate) fn common(&self) -> &[AtomicU64] {
        &self.mapping.words()[self.layout.common_words()]
    }

    /// The words of slot `index`; none for a number that no slot has.
    pub(crate) fn slot(&self, index: usize) -> &[AtomicU64] {
        self.mapping.words().get(self.layout.slot_words(index)).unwrap_or_default()
    }

    /// The number of this owner's slot.
    pub(crate) fn own_slot(&self) -> usize {
        self.slot
    }

    pub(crate) fn slots(&self) -> usize {
        self.layout.slots
    }

    /// Whether slot `index` belongs to an owner that lives, this one or another: words that are read after this are its own.
    pub(crate) fn is_owned(&self, index: usize) -> bool {
        // What cannot be asked counts as alive.
        index == self.slot || self.locks.is_slot_marked(index).unwrap_or(true)
    }

    /// Sets the words of slot `index` to zero if its owner has ended without doing so. Returns whether it did.
    pub(crate) fn clear_if_dead(&self, index: usize) -> bool {
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
    pub(crate) fn is_forked(&self) -> bool {
        self.generation.is_stale()
    }

    /// Whether the descriptor with the locks leads to the file still. Code of the same process that closes descriptors that are
    /// not its own ends the locks, and the number may be another file's by now.
    pub(crate) fn is_open(&self) -> bool {
        self.locks.file().metadata().is_ok_and(|found| (found.dev(), found.ino()) == self.identity)
    }

    fn zero(&self, index: usize) {
        // SeqCst: in the order of all sums over slots (the host ledger's claims).
        self.slot(index).iter().for_each(|word| word.store(0, Ordering::SeqCst));
    }
}

impl SharedFile {
    /// Gives the slot up; the words of the file stay mapped. The last owner removes the file. Its drop does the same.
    pub(crate) fn detach(&self) {
        // A child of `fork` has closed the description, and the slot is its parent's.
        if self.is_forked() || self.has_left.swap(true, Ordering::SeqCst) {
            return;
        }
        let _one_thread = self.clearing.lock();
        let is_locked = self.locks.lock_file_until(Instant::now() + PATIENCE).unwrap_or(false);
        self.locks.unmark_slot(self.slot);
        self.zero(self.slot);
        self.locks.unlock_slot(self.slot);
        if is_locked && !self.locks.has_owner().unwrap_or(true) {
            remove(&self.place, &self.locks);
        }
        self.locks.unlock_file();
    }
}

impl SharedFile {
    /// The slot is not this owner's any more: it is left as it is.
    pub(crate) fn abandon(&self) {
        self.has_left.store(true, Ordering::SeqCst);
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        self.detach();
    }
}

/// What a shared file contains, read without attaching: by a tool that looks.
#[derive(Debug)]
pub(crate) struct Snapshot {
    layout: Layout,
    bytes: Vec<u8>,
    owned: Vec<usize>,
}

impl Snapshot {
    /// The file at `place`; `None` if there is none, or it has no header yet.
    pub(crate) fn read(place: &Place, layout: &Layout) -> Result<Option<Self>, SharedFileError> {
        let no_fork = fork::hold_off();
        let (file, metadata) = match open_existing(place) {
            Err(SharedFileError::System { error, .. }) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let locks = LockFile::over(file, &no_fork).map_err(|error| failed("watch", place, error))?;
        drop(no_fork);
        let file = locks.file();
        // Before their words: those of an owner that ends later are still its own.
        let owned = (0..layout.slots).filter(|&index| locks.is_slot_marked(index).unwrap_or(false)).collect();
        let (mut bytes, mut again) = (vec![0; layout.file_bytes()], vec![0; layout.file_bytes()]);
        let mut read = read_up_to(file, &mut bytes).map_err(|error| failed("read", place, error))?;
        // Words that change while they are read may not belong together: two equal readings do.
        for _ in 0..READINGS {
            read = read_up_to(file, &mut again).map_err(|error| failed("read", place, error))?;
            if again == bytes {
                break;
            }
            std::mem::swap(&mut bytes, &mut again);
        }
        match header::check(&bytes[..read.min(HEADER_BYTES)], metadata.len(), layout) {
            Verdict::Empty => return Ok(None),
            verdict => refuse(place, layout, verdict)?,
        }
        Ok(Some(Self { layout: *layout, bytes, owned }))
    }

    fn words(&self, range: std::ops::Range<usize>) -> Vec<u64> {
        let bytes = self.bytes.get(range.start * 8..range.end * 8).unwrap_or_default();
        bytes.chunks_exact(8).map(|word| u64::from_ne_bytes(word.try_into().unwrap_or_default())).collect()
    }

    pub(crate) fn common(&self) -> Vec<u64> {
        self.words(self.layout.common_words())
    }

    /// The words of the slots whose owners live.
    pub(crate) fn owned_slots(&self) -> Vec<Vec<u64>> {
        self.owned.iter().map(|&index| self.words(self.layout.slot_words(index))).collect()
    }
}

fn text_of(place: &Place) -> String {
    match place {
        Place::Named(path) => path.display().to_string(),
        Place::Descriptor(descriptor) => format!("descriptor {descriptor}"),
    }
}

fn failed(action: &'static str, place: &Place, error: io::Error) -> SharedFileError {
    SharedFileError::System { action, place: text_of(place), error }
}

fn open(place: &Place, mode: u32) -> Result<(File, Metadata), SharedFileError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(mode).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    options.create(matches!(place, Place::Named(_)));
    open_by(place, &mut options)
}

fn open_existing(place: &Place) -> Result<(File, Metadata), SharedFileError> {
    let mut options = OpenOptions::new();
    // For writing as well: the kernel asks that of who looks for a lock for writing.
    open_by(place, options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK))
}

fn open_by(place: &Place, options: &mut OpenOptions) -> Result<(File, Metadata), SharedFileError> {
    let opened = match place {
        Place::Named(path) => options.open(path),
        // A link by its nature; what it leads to is the caller's.
        Place::Descriptor(descriptor) => {
            options.custom_flags(libc::O_NONBLOCK).open(format!("/proc/self/fd/{descriptor}"))
        }
    };
    let file = opened.map_err(|error| failed("open", place, error))?;
    let metadata = file.metadata().map_err(|error| failed("open", place, error))?;
    let foreign = |why: &str| Err(SharedFileError::Foreign { place: text_of(place), why: why.to_owned() });
    // SAFETY: reads a number of this process.
    let user = unsafe { libc::geteuid() };
    if !metadata.is_file() {
        return foreign("is no file");
    }
    if matches!(place, Place::Named(_)) {
        if metadata.uid() != user {
            return foreign(&format!("belongs to user {}, and this process runs as {user}", metadata.uid()));
        }
        if metadata.mode() & 0o077 != 0 {
            return foreign(&format!("may be used by others (mode {:o}, not {MODE:o})", metadata.mode() & 0o777));
        }
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

fn refuse(place: &Place, layout: &Layout, verdict: Verdict) -> Result<(), SharedFileError> {
    let place = text_of(place);
    Err(match verdict {
        Verdict::Ours => return Ok(()),
        Verdict::Empty => SharedFileError::Damaged { place, why: "has lost its header".to_owned() },
        Verdict::OtherVersion(found) => SharedFileError::Version { place, found, own: layout.version },
        Verdict::Damaged(why) => SharedFileError::Damaged { place, why },
        Verdict::Foreign(why) => SharedFileError::Foreign { place, why },
    })
}

/// Checks the file, or makes it anew if nobody is attached: what a creator that was killed left, an older version, damage,
/// and what earlier owners wrote. The magic is still missing then. Under the lock of the file.
fn prepare(place: &Place, layout: &Layout, locks: &LockFile, is_first: bool) -> Result<(), SharedFileError> {
    let mut bytes = [0; HEADER_BYTES];
    let file = locks.file();
    let read = read_up_to(file, &mut bytes).map_err(|error| failed("read", place, error))?;
    let len = file.metadata().map_err(|error| failed("read", place, error))?.len();
    let verdict = header::check(&bytes[..read], len, layout);
    if !is_first || matches!(verdict, Verdict::Foreign(_)) {
        return refuse(place, layout, verdict);
    }
    let anew = file.set_len(0).and_then(|()| mapping::allocate(file, layout.file_bytes()));
    let written = anew.and_then(|()| file.write_all_at(&header::without_magic(layout), 0));
    written.map_err(|error| failed("allocate", place, error))
}

/// Takes a free slot. A slot may look taken for a moment while another owner clears it.
fn take_slot(locks: &LockFile, layout: &Layout) -> io::Result<Option<usize>> {
    for _ in 0..3 {
        for index in 0..layout.slots {
            if locks.try_lock_slot(index)? {
                return Ok(Some(index));
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(None)
}

/// Removes a file that could not be made. Under its lock.
fn remove_if_empty(place: &Place, locks: &LockFile) {
    let is_unused = !locks.has_owner().unwrap_or(true);
    let mut magic = [0; 8];
    // Never a file of another program.
    if is_unused && !read_up_to(locks.file(), &mut magic).is_ok_and(|read| read > 0 && magic != [0; 8]) {
        remove(place, locks);
    }
}

/// Removes the file under its lock: who opens it meanwhile sees that, and makes another.
fn remove(place: &Place, locks: &LockFile) {
    if let Place::Named(path) = place
        && locks.file().metadata().is_ok_and(|own| is_still(path, &own))
    {
        // A file that stays is used by the next owner.
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(all(test, target_os = "linux", not(miri), not(loom)))] // Processes and files.
mod tests;
