//! Locks on bytes of a file by open file description, and the descriptors that a child of `fork` closes.
//!
//! The bytes that are locked lie behind any end of a file, in the same place in all versions of all layouts, so that any
//! version sees whether another is attached.

use std::fs::{File, Metadata};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicI64};
use std::time::{Duration, Instant};

use pinpool_os::fork::{self, ForkGeneration, HeldOff};
use pinpool_os::sync::process::{AtomicBool, Ordering};

/// The byte of the file as a whole; that of slot `i` is `1 + i` behind it, and `SLOTS_MAX` behind that the byte that tells
/// that the slot's words are those of its present owner.
const FIRST: i64 = 1 << 40;
/// Bytes for slots, as many as any layout may ever have.
const SLOTS_MAX: i64 = 1 << 20;
/// Kinds of locks, whose type differs between systems.
const READ: libc::c_int = libc::F_RDLCK as libc::c_int;
const WRITE: libc::c_int = libc::F_WRLCK as libc::c_int;
const NONE: libc::c_int = libc::F_UNLCK as libc::c_int;
/// Between two tries for the lock of the file.
const PAUSE: Duration = Duration::from_micros(200);

/// A description that is used for locks alone. Dropping it ends its locks.
///
/// Other code of the process may close the descriptor, and its number be another one's by then, even of the same file. So the
/// description has a mark that no other has: its position, at which nothing is read or written.
#[derive(Debug)]
pub struct LockFile {
    /// `None` only while it is dropped.
    file: Option<File>,
    mark: i64,
    listed: usize,
    generation: ForkGeneration,
}

/// A descriptor that a child of `fork` closes, if it leads to the description with this mark still.
struct Listed {
    /// -1 where there is none.
    descriptor: AtomicI32,
    mark: AtomicI64,
}

static LISTED: [Listed; 1024] = [const { Listed { descriptor: AtomicI32::new(-1), mark: AtomicI64::new(0) } }; 1024];

extern "C" fn close_listed() {
    for place in &LISTED {
        // Relaxed, here and below: the child has one thread.
        let descriptor = place.descriptor.swap(-1, Ordering::Relaxed);
        if descriptor >= 0 && mark_of(descriptor) == place.mark.load(Ordering::Relaxed) {
            // SAFETY: the child's copy of a descriptor that a `LockFile` owns. In a child a `LockFile` does not close it
            // again (`Drop`). `close` may be called in a child of a process with threads.
            unsafe { libc::close(descriptor) };
        }
    }
}

/// The position of a description; -1 where there is none. May be called in a child of a process with threads.
#[allow(clippy::useless_conversion)] // Types vary by target.
fn mark_of(descriptor: RawFd) -> i64 {
    // SAFETY: a call with numbers, which changes nothing.
    unsafe { libc::lseek(descriptor, 0, libc::SEEK_CUR) }.into()
}

impl LockFile {
    /// From now on the child of a `fork` closes it. `_no_fork` is taken before the file is opened, so that no child has it unlisted.
    pub fn over(file: File, _no_fork: &HeldOff) -> io::Result<Self> {
        static REGISTERED: AtomicBool = AtomicBool::new(false);
        fork::call_in_children(&REGISTERED, close_listed);
        let descriptor = file.as_raw_fd();
        // Below 2 GiB, which each file system knows as a position.
        let mark = (super::random() >> 34).cast_signed() | 1 << 30;
        (&file).seek(SeekFrom::Start(mark.cast_unsigned()))?;
        // Relaxed: a child is forked with what its parent had stored, and not before this returns.
        let take = |place: &Listed| {
            place.descriptor.compare_exchange(-1, descriptor, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let listed = LISTED.iter().position(take).ok_or_else(|| {
            io::Error::other(format!("this process has {} shared files open, and may have no more", LISTED.len()))
        })?;
        LISTED[listed].mark.store(mark, Ordering::Relaxed);
        Ok(Self { file: Some(file), mark, listed, generation: ForkGeneration::now() })
    }

    /// Whether the descriptor leads to this description still.
    pub fn is_open(&self) -> bool {
        mark_of(self.file().as_raw_fd()) == self.mark
    }

    /// What the system says of the file; `None` if the descriptor leads elsewhere.
    pub(super) fn metadata(&self) -> Option<Metadata> {
        self.file().metadata().ok().filter(|_| self.is_open())
    }

    #[allow(clippy::expect_used)] // Taken by `drop` alone.
    pub(super) fn file(&self) -> &File {
        self.file.as_ref().expect("open until dropped")
    }

    /// Locks the file as a whole; false if another description has it locked until `deadline`.
    pub(super) fn lock_file_until(&self, deadline: Instant) -> io::Result<bool> {
        loop {
            if self.set(WRITE, FIRST)? {
                return Ok(true);
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(PAUSE);
        }
    }

    pub(super) fn unlock_file(&self) {
        let _ = self.set(NONE, FIRST);
    }

    /// Locks slot `index`; false if another description has it locked. The locks of one description do not exclude each other.
    pub fn try_lock_slot(&self, index: usize) -> io::Result<bool> {
        self.set(WRITE, byte_of(index))
    }

    pub fn unlock_slot(&self, index: usize) {
        let _ = self.set(NONE, byte_of(index));
    }

    /// Whether another description has slot `index` locked.
    pub fn is_slot_locked(&self, index: usize) -> io::Result<bool> {
        self.is_locked(byte_of(index), 1)
    }

    /// The words of slot `index`, which is locked, are this owner's from now on.
    pub(super) fn mark_slot(&self, index: usize) -> io::Result<bool> {
        self.set(WRITE, SLOTS_MAX + byte_of(index))
    }

    pub(super) fn unmark_slot(&self, index: usize) {
        let _ = self.set(NONE, SLOTS_MAX + byte_of(index));
    }

    /// Whether another description has slot `index` marked.
    pub(super) fn is_slot_marked(&self, index: usize) -> io::Result<bool> {
        self.is_locked(SLOTS_MAX + byte_of(index), 1)
    }

    /// Whether another description has any slot locked.
    pub(super) fn has_owner(&self) -> io::Result<bool> {
        self.is_locked(byte_of(0), SLOTS_MAX)
    }

    /// Locks byte `at`, which other descriptions may lock in the same way.
    pub(super) fn share(&self, at: i64) -> io::Result<bool> {
        self.set(READ, at)
    }

    pub(super) fn unlock_all(&self) {
        // Zero bytes: up to the end of all files.
        let _ = self.set_range(NONE, 0, 0);
    }

    fn set(&self, kind: libc::c_int, start: i64) -> io::Result<bool> {
        self.set_range(kind, start, 1)
    }

    #[cfg(target_os = "linux")]
    fn set_range(&self, kind: libc::c_int, start: i64, bytes: i64) -> io::Result<bool> {
        let mut lock = lock_of(kind, start, bytes)?;
        loop {
            // SAFETY: the descriptor is open, and the call only reads the lock.
            if unsafe { libc::fcntl(self.file().as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) } == 0 {
                return Ok(true);
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN | libc::EACCES) => return Ok(false),
                _ => return Err(error),
            }
        }
    }

    #[cfg(target_os = "linux")]
    pub(super) fn is_locked(&self, start: i64, bytes: i64) -> io::Result<bool> {
        let mut lock = lock_of(WRITE, start, bytes)?;
        // SAFETY: the descriptor is open, and the call writes to the lock alone.
        if unsafe { libc::fcntl(self.file().as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } == 0 {
            Ok(libc::c_int::from(lock.l_type) != NONE)
        } else {
            Err(io::Error::last_os_error())
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn set_range(&self, _kind: i32, _start: i64, _bytes: i64) -> io::Result<bool> {
        Err(io::ErrorKind::Unsupported.into())
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn is_locked(&self, _start: i64, _bytes: i64) -> io::Result<bool> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        // A process that has a copy of the description without knowing, such as a child that was made without the handlers of `fork`
        // and has not called `exec` yet, would keep the locks. In a child of `fork` they are the parent's.
        let is_own = !self.generation.is_stale() && self.is_open();
        if is_own {
            self.unlock_all();
        }
        let Some(file) = self.file.take() else { return };
        if !self.generation.is_stale() {
            // Relaxed, as in `over`.
            LISTED[self.listed].descriptor.store(-1, Ordering::Relaxed);
        }
        if !is_own {
            std::mem::forget(file);
        }
    }
}

fn byte_of(slot: usize) -> i64 {
    FIRST + 1 + i64::try_from(slot).unwrap_or(SLOTS_MAX).min(SLOTS_MAX - 1)
}

#[cfg(target_os = "linux")]
#[allow(clippy::cast_possible_truncation, clippy::useless_conversion)] // Small constants; types vary by target.
fn lock_of(kind: libc::c_int, start: i64, bytes: i64) -> io::Result<libc::flock> {
    // SAFETY: a record of numbers, for which zeros are values; `l_pid` must be zero.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start.try_into().map_err(io::Error::other)?;
    lock.l_len = bytes.try_into().map_err(io::Error::other)?;
    Ok(lock)
}
