//! The worker's side: attaches to the memory, fills buffers and sends them.
#![allow(unsafe_code)] // Makes slices of memory that other processes can change.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::counts::BufferCounts;
use super::layout::{SharedFile, View, io_failed};
use super::state::{BufferState, StateWord, Usage};
use super::ticket::Ticket;
use crate::error::{ErrorKind, Result};
use crate::memory_file::MemoryFile;
use pinpool_os::fork::{self, ForkGeneration};
use pinpool_os::sync::unmodeled::{AtomicUsize, Ordering};
use pinpool_shared_limit::file::LockFile;

/// Time between two checks of a waiting process for dead processes.
pub(super) const CHECK_EVERY: Duration = Duration::from_millis(20);
/// The trainer's slot among the file's locks.
pub(super) const TRAINER: usize = 0;

/// Returns the slot among the file's locks for the worker in `slot`.
fn lock_of(slot: u16) -> usize {
    usize::from(slot) + 1
}

/// Opens the file again for its locks, through an open file description that no other process shares.
pub(super) fn locks_of(file: &MemoryFile) -> Result<LockFile> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    let no_fork = fork::delay_forks();
    let opened = std::fs::OpenOptions::new().read(true).write(true).open(path);
    let locks = opened.and_then(|file| LockFile::new(file, &no_fork));
    locks.map_err(io_failed("a description of the file (/proc/self/fd)"))
}

/// Returns whether the worker in `slot`, which is not the caller, is alive, or true if the kernel cannot tell.
pub(super) fn is_alive(lock_file: &LockFile, slot: u16) -> bool {
    lock_file.is_slot_locked(lock_of(slot)).unwrap_or(true)
}

/// Frees the buffers that dead workers were filling, and returns their number.
pub(super) fn recover(view: View<'_>, lock_file: &LockFile, own: Option<u16>) -> Result<usize> {
    let (mut alive, mut freed) = (own, 0);
    for (_, entry) in view.buffer_headers() {
        // The state is read before the lock is queried: see `StateWord::recover`.
        let Some(seen @ BufferState { usage: Usage::Filling(slot), .. }) = entry.state.read() else { continue };
        if Some(slot) == own || Some(slot) == alive {
            continue;
        }
        if is_alive(lock_file, slot) {
            alive = Some(slot);
        } else if entry.state.recover(seen, slot) {
            freed += 1;
            view.header()?.freed_event().notify(1);
        }
    }
    Ok(freed)
}

/// A process that fills shared buffers, attached to the memory of a [`SharedPool`](super::SharedPool). Cheap to clone. It pins
/// nothing and needs no device.
///
/// When its process has exited or was killed, the buffers that it was filling are freed as soon as another worker needs one, or
/// by [`SharedPool::recover`](super::SharedPool::recover).
#[derive(Debug, Clone)]
pub struct SharedWorker {
    attached: Arc<Attached>,
}

#[derive(Debug)]
struct Attached {
    file: SharedFile,
    lock_file: LockFile,
    slot: u16,
    /// The index at which the next search for a free buffer begins.
    next: AtomicUsize,
    generation: ForkGeneration,
}

impl SharedWorker {
    /// Attaches to the memory behind `descriptor`: the [descriptor](super::SharedPool::descriptor) of a shared pool, inherited
    /// or passed.
    ///
    /// # Errors
    ///
    /// - [`is_backend`](crate::Error::is_backend): the file does not contain shared buffers, has another version, or is truncated;
    ///   it cannot be mapped; or all worker slots are taken,
    /// - [`is_trainer_unavailable`](crate::Error::is_trainer_unavailable): the trainer has exited, or refuses its workers.
    ///
    /// # Safety
    ///
    /// If the file contains shared buffers, every process that has it, this process included, must change it only through this
    /// crate.
    pub unsafe fn attach(descriptor: OwnedFd) -> Result<Self> {
        let file = MemoryFile::from_descriptor(descriptor)?;
        let attached = SharedFile::attach(&file)?;
        let lock_file = locks_of(&file)?;
        let slot = take_slot(attached.view(), &lock_file)?;
        let next = AtomicUsize::new(usize::from(slot));
        let attached = Attached { file: attached, lock_file, slot, next, generation: ForkGeneration::now() };
        attached.check_trainer()?;
        Ok(Self { attached: Arc::new(attached) })
    }

    /// Attaches through `/proc` to the memory with the number `descriptor` in process `pid`. Both processes must belong to one
    /// user.
    ///
    /// # Errors
    ///
    /// The errors of [`attach`](Self::attach); [`is_backend`](crate::Error::is_backend) also if the descriptor cannot be
    /// opened.
    ///
    /// # Safety
    ///
    /// The same as for [`attach`](Self::attach).
    pub unsafe fn attach_to_process(pid: u32, descriptor: RawFd) -> Result<Self> {
        let path = format!("/proc/{pid}/fd/{descriptor}");
        let opened = std::fs::OpenOptions::new().read(true).write(true).open(&path);
        let file = opened.map_err(|error| {
            let remedy =
                "pass the descriptor over a Unix socket, or allow this user to trace the process (ptrace scope)";
            ErrorKind::Backend(format!("{path}: {error}; {remedy}"))
        })?;
        // SAFETY: the caller promises it.
        unsafe { Self::attach(file.into()) }
    }

    /// Returns the size of each buffer in bytes.
    pub fn buffer_bytes(&self) -> usize {
        self.attached.file.geometry.buffer_bytes
    }

    /// Returns the number of buffers.
    pub fn buffer_count(&self) -> usize {
        self.attached.file.geometry.buffers
    }

    /// Requests a free buffer for `len` bytes and waits up to `timeout`. Meanwhile buffers that dead workers were filling are
    /// freed. The bytes of the buffer have arbitrary values.
    ///
    /// # Errors
    ///
    /// - [`is_invalid_request`](crate::Error::is_invalid_request): `len` exceeds [`buffer_bytes`](Self::buffer_bytes),
    /// - [`is_limit`](crate::Error::is_limit): no buffer was free in time,
    /// - [`is_trainer_unavailable`](crate::Error::is_trainer_unavailable): no buffer is free, and the trainer has exited or refuses its workers,
    /// - [`is_forked`](crate::Error::is_forked): the worker was attached before this process was forked: attach again.
    pub fn get(&self, len: usize, timeout: Duration) -> Result<SharedBuf> {
        self.get_since(Instant::now(), len, timeout)
    }

    /// Requests a buffer as [`get`](Self::get) does. An error reports the time since `since`, when an earlier wait of this
    /// request began.
    #[doc(hidden)]
    pub fn get_since(&self, since: Instant, len: usize, timeout: Duration) -> Result<SharedBuf> {
        let attached = &self.attached;
        attached.check_process()?;
        let view = attached.file.view();
        let buffer_bytes = view.geometry.buffer_bytes;
        if len > buffer_bytes {
            return Err(ErrorKind::TooLong { len, buffer_bytes }.into());
        }
        let begun = Instant::now();
        let found = attached.take().map_or_else(
            || {
                let slice = CHECK_EVERY.min(timeout);
                view.header()?.freed_event().wait(slice, || begun.elapsed() >= timeout, || attached.find())
            },
            |taken| Ok(Some(taken)),
        )?;
        let Some((index, state)) = found else {
            let counts = BufferCounts::read(view);
            return Err(ErrorKind::NoBuffer {
                waited: since.elapsed(),
                buffers: view.geometry.buffers,
                filling: counts.filling,
                sent: counts.sent,
                received: counts.received,
            }
            .into());
        };
        Ok(SharedBuf { attached: attached.clone(), index, state, len })
    }
}

/// Locks a slot that no living worker has, and frees the buffers that the slot's last worker was filling.
fn take_slot(view: View<'_>, lock_file: &LockFile) -> Result<u16> {
    // The slot in a sent buffer identifies the sender, so the slot is not reused until the buffer is received.
    let has_sent = |slot: u16| {
        view.buffer_headers().any(|(_, entry)| entry.state.read().is_some_and(|state| state.usage == Usage::Sent(slot)))
    };
    for slot in 0..view.geometry.slots {
        let taken = lock_file.try_lock_slot(lock_of(slot)).map_err(io_failed("a lock of the file"))?;
        if taken && has_sent(slot) {
            lock_file.unlock_slot(lock_of(slot));
        } else if taken {
            let is_freed = |state: &StateWord| state.read().is_some_and(|seen| state.recover(seen, slot));
            let count = view.buffer_headers().filter(|(_, header)| is_freed(&header.state)).count();
            let header = view.header()?;
            header.use_slot(slot);
            header.freed_event().notify(i32::try_from(count).unwrap_or(i32::MAX));
            return Ok(slot);
        }
    }
    let why = format!("all {} slots for workers are taken: end workers or create more buffers", view.geometry.slots);
    Err(ErrorKind::Backend(why).into())
}

impl Attached {
    fn check_process(&self) -> Result<()> {
        if self.generation.is_stale() {
            return Err(ErrorKind::Forked(std::process::id()).into());
        }
        Ok(())
    }

    /// Fails if no trainer can receive a buffer.
    fn check_trainer(&self) -> Result<()> {
        let why = match self.file.view().header()?.refusal() {
            Some(why) => why,
            None if self.lock_file.is_slot_locked(TRAINER).unwrap_or(true) => return Ok(()),
            None => "the trainer has exited: end this worker",
        };
        Err(ErrorKind::TrainerUnavailable(why.to_owned()).into())
    }

    fn take(&self) -> Option<(usize, BufferState)> {
        let view = self.file.view();
        let (count, first) = (view.geometry.buffers, self.next.load(Ordering::Relaxed));
        let mut order = (0..count).map(|step| (first + step) % count);
        let taken = order.find_map(|index| Some((index, view.buffer_header(index)?.state.take(self.slot)?)));
        if let Some((index, _)) = taken {
            self.next.store(index + 1, Ordering::Relaxed);
        }
        taken
    }

    fn find(&self) -> Result<Option<(usize, BufferState)>> {
        if let Some(taken) = self.take() {
            return Ok(Some(taken));
        }
        self.check_trainer()?;
        recover(self.file.view(), &self.lock_file, Some(self.slot))?;
        Ok(self.take())
    }
}

/// A shared buffer that this worker fills. Dropping it without a [`send`](Self::send) frees it.
#[derive(Debug)]
pub struct SharedBuf {
    attached: Arc<Attached>,
    index: usize,
    state: BufferState,
    len: usize,
}

impl SharedBuf {
    /// Returns the requested length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of the buffer, starting at 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Shortens the buffer to its first `len` bytes. Has no effect if it is shorter.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Returns the page-aligned address of the first byte.
    pub fn as_ptr(&self) -> *const u8 {
        let file = &self.attached.file;
        file.memory.at(file.geometry.offset(self.index)).as_ptr()
    }

    /// Returns the page-aligned address of the first byte. In a forked child another process may be using this memory.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.as_ptr().cast_mut()
    }

    /// Returns the bytes.
    ///
    /// # Panics
    ///
    /// In a forked child, since its parent has the buffer. The slices of a pool's `PinnedBuf` return an error instead, since they may
    /// also wait for copies and fail.
    pub fn as_slice(&self) -> &[u8] {
        assert!(!self.attached.generation.is_stale(), "a forked child has no shared buffers: attach again");
        // SAFETY: the bytes are inside the mapping (memory-file-I1), and belong to this worker alone while it fills the buffer
        // (state-I1): it was attached by this process.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    /// Returns the bytes to fill.
    ///
    /// # Panics
    ///
    /// As [`as_slice`](Self::as_slice).
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        assert!(!self.attached.generation.is_stale(), "a forked child has no shared buffers: attach again");
        // SAFETY: as in `as_slice`; `&mut self` makes it the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }

    /// Sends the buffer to the trainer, with `user_data`. The ticket identifies the buffer. The trainer can also find the buffer
    /// without the ticket, even if this process dies.
    ///
    /// # Errors
    ///
    /// - [`is_trainer_unavailable`](crate::Error::is_trainer_unavailable): the trainer has exited or refuses its workers, and the buffer is freed,
    /// - [`is_forked`](crate::Error::is_forked): as for [`SharedWorker::get`],
    /// - [`is_backend`](crate::Error::is_backend): another process has changed the state of the buffer.
    pub fn send(self, user_data: u64) -> Result<Ticket> {
        let attached = &self.attached;
        attached.check_process()?;
        attached.check_trainer()?;
        let view = attached.file.view();
        let header = view.header()?;
        let lost = |why: &str| ErrorKind::Backend(why.to_owned());
        let entry = view.buffer_header(self.index).ok_or_else(|| lost("no such buffer"))?;
        entry.len.store(self.len as u64, Ordering::Relaxed);
        entry.user_data.store(user_data, Ordering::Relaxed);
        entry.order.store(header.next_send(), Ordering::Relaxed);
        if !entry.state.step(self.state, Usage::Sent(attached.slot)) {
            return Err(lost("the state of the buffer was changed by another process").into());
        }
        header.sent_event().notify(1);
        let index = u32::try_from(self.index).unwrap_or(u32::MAX);
        Ok(Ticket { id: view.geometry.id, index, generation: self.state.generation, len: self.len as u64, user_data })
    }
}

impl Drop for SharedBuf {
    fn drop(&mut self) {
        let attached = &self.attached;
        if attached.generation.is_stale() {
            return;
        }
        let view = attached.file.view();
        let Some(entry) = view.buffer_header(self.index) else { return };
        // The step fails if the buffer was sent.
        if entry.state.step(self.state, Usage::Free)
            && let Ok(header) = view.header()
        {
            header.freed_event().notify(1);
        }
    }
}
