//! Locks on bytes of a file by open file description, and the descriptors that a forked child closes.
//!
//! A slot belongs to a living member exactly while its byte is locked.
//!
//! - The kernel drops the lock when the member exits or is killed, so no daemon and no timeout is needed. It does so after it has
//!   freed the memory of the process, including memory locked by `mlock`. Memory pinned by a driver is freed when the driver's
//!   descriptors are closed, in the same pass as the lock: Linux 6.18 closes the highest number first but guarantees no order. So
//!   another process may claim the bytes a moment before they are unpinned.
//! - A process number is not sufficient: it is reused, and differs between namespaces. A lock belongs to the file itself, so
//!   containers that share the file see each other's locks.
//! - The kernel drops POSIX locks (`F_SETLK`) when any code of the process closes any descriptor of the file. A robust mutex
//!   needs a thread that lives as long as its process, and is released before the process's memory. A `pidfd` does not work
//!   across namespaces.
//! - Forked children share the description and its locks, so each child closes it before `fork` returns there. Children that are
//!   created in other ways close it at `exec`.
//!
//! The locked bytes are beyond the end of any file and at the same offsets in all versions, so each version sees the members that
//! use another version.

use std::fs::{File, Metadata};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Seek, SeekFrom};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicI64};
use std::time::{Duration, Instant};

use pinpool_os::fork::{self, ForkDelay, ForkGeneration};
use pinpool_os::sync::unmodeled::{AtomicBool, Ordering};

/// The byte that locks the whole file; the byte of slot `i` is `1 + i` after it.
const FIRST: i64 = 1 << 40;
/// Number of bytes for slots. No layout has more slots.
const SLOTS_MAX: i64 = 1 << 20;
/// Lock types; their integer type differs between systems.
const WRITE: libc::c_int = libc::F_WRLCK as libc::c_int;
const NONE: libc::c_int = libc::F_UNLCK as libc::c_int;
/// Time between two attempts to lock the file.
const PAUSE: Duration = Duration::from_micros(200);

/// An open file description that is used for its locks. Dropping it releases the locks.
///
/// Other code of the process may close the descriptor, and its number may then be reused, even for the same file. So the
/// description has a unique mark, which is its file position. The position is free for this use, since all reads and writes name
/// their offset.
#[derive(Debug)]
pub struct LockFile {
    file: ManuallyDrop<File>,
    mark: i64,
    listed: usize,
    generation: ForkGeneration,
}

/// A descriptor that a forked child closes, if it still refers to the description with this mark.
struct Listed {
    /// -1 if there is none.
    descriptor: AtomicI32,
    mark: AtomicI64,
}

static LISTED: [Listed; 1024] = [const { Listed { descriptor: AtomicI32::new(-1), mark: AtomicI64::new(0) } }; 1024];

extern "C" fn close_listed() {
    for place in &LISTED {
        // Relaxed, here and below: the child has one thread.
        let descriptor = place.descriptor.swap(-1, Ordering::Relaxed);
        if descriptor >= 0 && mark_of(descriptor) == place.mark.load(Ordering::Relaxed) {
            // SAFETY: this is the child's copy of a descriptor that a `LockFile` owns. In a child a `LockFile` does not close it
            // again (`Drop`). `close` may be called in a child of a process with threads.
            unsafe { libc::close(descriptor) };
        }
    }
}

/// Returns the position of a description; -1 if there is no such description. May be called in a child of a process with threads.
#[allow(clippy::useless_conversion)] // Types vary by target.
fn mark_of(descriptor: RawFd) -> i64 {
    // SAFETY: the call takes numbers, writes to no memory and leaves the position unchanged.
    unsafe { libc::lseek(descriptor, 0, libc::SEEK_CUR) }.into()
}

impl LockFile {
    /// Uses `file` for locks, and makes forked children close it. `_no_fork` must be acquired before the file is opened, so that
    /// no child inherits it unlisted.
    pub fn new(file: File, _no_fork: &ForkDelay) -> io::Result<Self> {
        static REGISTERED: AtomicBool = AtomicBool::new(false);
        // SAFETY: the handler uses atomics, and calls lseek and close.
        unsafe { fork::call_in_children(&REGISTERED, close_listed) };
        let descriptor = file.as_raw_fd();
        // The mark is below 2 GiB, so every file system accepts it as a position.
        let mark = (random() >> 34).cast_signed() | 1 << 30;
        (&file).seek(SeekFrom::Start(mark.cast_unsigned()))?;
        // Relaxed: a child has everything that its parent stored before the fork, and forks are delayed until this returns.
        let take = |place: &Listed| {
            place.descriptor.compare_exchange(-1, descriptor, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let listed = LISTED.iter().position(take).ok_or_else(|| {
            io::Error::other(format!("this process has {} shared files open, and may have no more", LISTED.len()))
        })?;
        LISTED[listed].mark.store(mark, Ordering::Relaxed);
        Ok(Self { file: ManuallyDrop::new(file), mark, listed, generation: ForkGeneration::now() })
    }

    /// Returns whether the descriptor still refers to this description.
    pub fn is_open(&self) -> bool {
        mark_of(self.file().as_raw_fd()) == self.mark
    }

    /// Returns the metadata of the file; `None` if the descriptor refers to another description.
    pub(crate) fn metadata(&self) -> Option<Metadata> {
        self.file().metadata().ok().filter(|_| self.is_open())
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Runs `act` while the file as a whole is locked. Returns `None` without running it if another description keeps the file
    /// locked for `patience`, for example in a stopped process.
    pub(crate) fn locked<R>(&self, patience: Duration, act: impl FnOnce() -> R) -> io::Result<Option<R>> {
        let deadline = Instant::now() + patience;
        while !self.set(WRITE, FIRST)? {
            if Instant::now() >= deadline {
                return Ok(None);
            }
            std::thread::sleep(PAUSE);
        }
        let result = act();
        let _ = self.set(NONE, FIRST);
        Ok(Some(result))
    }

    /// Tries to lock slot `index`, and returns whether that succeeded: it does not if another description has the slot locked.
    /// The locks of one description do not exclude each other.
    pub fn try_lock_slot(&self, index: usize) -> io::Result<bool> {
        self.set(WRITE, byte_of(index))
    }

    pub fn unlock_slot(&self, index: usize) {
        let _ = self.set(NONE, byte_of(index));
    }

    /// Returns whether another description has slot `index` locked.
    pub fn is_slot_locked(&self, index: usize) -> io::Result<bool> {
        self.is_locked(byte_of(index), 1)
    }

    /// Returns whether another description has any slot locked.
    pub(crate) fn has_member(&self) -> io::Result<bool> {
        self.is_locked(byte_of(0), SLOTS_MAX)
    }

    fn unlock_all(&self) {
        // A length of zero means all bytes from the start on.
        let _ = self.control(true, NONE, 0, 0);
    }

    fn set(&self, kind: libc::c_int, at: i64) -> io::Result<bool> {
        match self.control(true, kind, at, 1) {
            Ok(_) => Ok(true),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn is_locked(&self, start: i64, bytes: i64) -> io::Result<bool> {
        Ok(libc::c_int::from(self.control(false, WRITE, start, bytes)?.l_type) != NONE)
    }

    /// Sets or removes a lock if `is_set`. Otherwise returns the lock that would prevent it, with the type `NONE` if nothing
    /// would.
    #[cfg(target_os = "linux")]
    #[allow(clippy::cast_possible_truncation, clippy::useless_conversion)] // Small constants; types vary by target.
    fn control(&self, is_set: bool, kind: libc::c_int, start: i64, bytes: i64) -> io::Result<libc::flock> {
        // SAFETY: `flock` consists of numbers, for which zero is a valid value; `l_pid` must be zero.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind as libc::c_short;
        lock.l_whence = libc::SEEK_SET as libc::c_short;
        lock.l_start = start.try_into().map_err(io::Error::other)?;
        lock.l_len = bytes.try_into().map_err(io::Error::other)?;
        let command = if is_set { libc::F_OFD_SETLK } else { libc::F_OFD_GETLK };
        loop {
            // SAFETY: the call reads and writes only `lock`, and fails for a closed descriptor.
            if unsafe { libc::fcntl(self.file().as_raw_fd(), command, &raw mut lock) } == 0 {
                return Ok(lock);
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn control(&self, _is_set: bool, _kind: libc::c_int, _start: i64, _bytes: i64) -> io::Result<libc::flock> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        if self.generation.is_stale() {
            // The locks belong to the parent, and `close_listed` has closed the descriptor.
            return;
        }
        // Relaxed, as in `new`.
        LISTED[self.listed].descriptor.store(-1, Ordering::Relaxed);
        if self.is_open() {
            // Unlocks explicitly. Otherwise a process with a copy of the description would keep the locks, such as a child that
            // was created without the fork handlers and has not called `exec` yet.
            self.unlock_all();
            // SAFETY: the field is not used any more.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

fn byte_of(slot: usize) -> i64 {
    FIRST + 1 + i64::try_from(slot).unwrap_or(SLOTS_MAX).min(SLOTS_MAX - 1)
}

/// Returns a random number, which distinguishes a description or a segment from all others.
pub(crate) fn random() -> u64 {
    // The keys of the hash are random numbers from the system. A forked child has its parent's keys, but another process number.
    RandomState::new().hash_one((std::process::id(), Instant::now()))
}
