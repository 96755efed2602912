//! The trainer's side: creates the memory, pins it once, and receives buffers.
#![allow(unsafe_code)] // `descriptor` has a condition.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::counts::BufferCounts;
use super::layout::{BufferHeader, Geometry, SharedFile, View, io_failed};
use super::lend::Lender;
use super::state::{BufferState, Usage};
use super::ticket::Ticket;
use super::worker::{CHECK_EVERY, TRAINER, is_alive, locks_of, recover};
use crate::error::{ErrorKind, Result};
use crate::memory_file::{MemoryFile, SharedMemory};
use pinpool::{HugeTlb, PinnedBuf, PinnedBy, Pool};
use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::unmodeled::Ordering;
use pinpool_shared_limit::file::LockFile;

/// Buffers that worker processes fill and this process copies to a device. This process pins their memory once.
///
/// A received buffer is a [`PinnedBuf`]. Once it is dropped and its copies have completed, workers can fill it again.
///
/// After `SharedPool` is dropped, a worker's next `send`, or `get` without a free buffer, fails, and received buffers remain
/// valid. The drop, or the return of the last received buffer, unpins the memory: if a driver pinned it, this waits for all
/// work of the device. The memory is freed with the last process that maps it.
///
/// # Trust
///
/// Every process with the [descriptor](Self::descriptor) can write to the memory at any time, even while another process reads
/// the bytes as a slice. So pass the descriptor only to processes that use the memory through this crate.
#[derive(Debug)]
pub struct SharedPool {
    lender: Lender,
    file: MemoryFile,
    geometry: Geometry,
    lock_file: LockFile,
    generation: ForkGeneration,
}

impl SharedPool {
    /// Creates `buffer_count` buffers of `buffer_bytes` within the limit of `pool`, pinned with its backend. Uses 2 MiB hugetlb pages
    /// for 2 MiB or more if enough of them are reserved. Calls the driver or the kernel, so it may take seconds. Waits for room
    /// only if a shared limit has none.
    ///
    /// # Errors
    ///
    /// - [`is_limit`](crate::Error::is_limit): they do not fit within the limit,
    /// - [`is_invalid_request`](crate::Error::is_invalid_request): the numbers are out of range,
    /// - [`is_backend`](crate::Error::is_backend): the kernel or the driver refused,
    /// - [`is_forked`](crate::Error::is_forked): the pool was created before this process was forked,
    /// - [`is_closed`](crate::Error::is_closed): the pool was [closed](Pool::close).
    pub fn new(pool: &Pool, buffer_bytes: usize, buffer_count: usize) -> Result<Self> {
        Self::with_hugetlb(pool, buffer_bytes, buffer_count, HugeTlb::Auto)
    }

    /// Creates buffers as [`new`](Self::new) does, but with these huge pages (`new` passes [`HugeTlb::Auto`]). [`HugeTlb::Off`]
    /// never uses hugetlb pages, and [`HugeTlb::Pages2MiB`] requires them.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new), also for [`HugeTlb::Pages1GiB`].
    pub fn with_hugetlb(pool: &Pool, buffer_bytes: usize, buffer_count: usize, hugetlb: HugeTlb) -> Result<Self> {
        let (file, layout) = SharedFile::new(buffer_bytes, buffer_count, hugetlb)?;
        let lock_file = locks_of(&file)?;
        if !lock_file.try_lock_slot(TRAINER).map_err(io_failed("a lock of the file"))? {
            return Err(ErrorKind::Backend("another process has locked the new file".to_owned()).into());
        }
        let SharedFile { memory, geometry } = layout;
        let release = move |memory: &SharedMemory, offset| free(View { memory, geometry: &geometry }, offset);
        let lender = Lender::new(pool, memory, Box::new(release))?;
        Ok(Self { lender, file, geometry, lock_file, generation: ForkGeneration::now() })
    }

    fn view(&self) -> Result<View<'_>> {
        // A forked child does not map memory that a driver pinned.
        if self.generation.is_stale() {
            return Err(ErrorKind::Forked(std::process::id()).into());
        }
        Ok(View { memory: self.lender.memory(), geometry: &self.geometry })
    }

    /// Receives the buffer of `ticket`, with the worker's bytes in place.
    ///
    /// # Errors
    ///
    /// - [`is_invalid_ticket`](crate::Error::is_invalid_ticket): it was received before, was not sent, or belongs to other shared buffers,
    /// - [`is_forked`](crate::Error::is_forked): the buffers were created before this process was forked,
    /// - [`is_closed`](crate::Error::is_closed): the pool was [closed](Pool::close); the buffer stays sent.
    pub fn receive(&self, ticket: &Ticket) -> Result<PinnedBuf> {
        let view = self.view()?;
        if ticket.id != view.geometry.id {
            let why = "it belongs to other shared buffers: receive it with the `SharedPool` of its worker";
            return Err(ticket.error(why));
        }
        let Some(entry) = view.buffer_header(ticket.index()) else {
            return Err(ticket.error(format!("there are {} buffers", view.geometry.buffers)));
        };
        let sent = entry.state.read().ok_or_else(|| ticket.error("the state of the buffer is damaged"))?;
        if sent.generation != ticket.generation {
            let now = sent.generation;
            return Err(ticket.error(format!("the buffer has generation {now}: received before, or its worker died")));
        }
        let why = match sent.usage {
            Usage::Sent(_) if entry.len.load(Ordering::Relaxed) == ticket.len => "",
            Usage::Sent(_) => "its length is not what the worker sent",
            Usage::Filling(_) => "its worker is still filling the buffer",
            Usage::Received => "it was received before, and the buffer is in use",
            Usage::Free => "it was received before, and its buffer was returned",
        };
        if !why.is_empty() {
            return Err(ticket.error(why));
        }
        self.hold(view, ticket.index(), entry, sent)?.ok_or_else(|| ticket.error("another thread has just received it"))
    }

    /// Receives the buffer with the state `sent`; `None` if another thread was faster.
    fn hold(&self, view: View<'_>, index: usize, entry: &BufferHeader, sent: BufferState) -> Result<Option<PinnedBuf>> {
        let len =
            usize::try_from(entry.len.load(Ordering::Relaxed)).unwrap_or(usize::MAX).min(view.geometry.buffer_bytes);
        if !entry.state.step(sent, Usage::Received) {
            return Ok(None);
        }
        let lent = self.lender.lend(view.geometry.offset(index), len);
        if lent.is_err() {
            entry.state.change(BufferState { usage: Usage::Received, ..sent }, sent);
        }
        lent.map(Some)
    }

    /// Receives the oldest sent buffer, with its ticket. Waits up to `timeout` for one, then returns `None`. Needs no message
    /// from the worker.
    ///
    /// # Errors
    ///
    /// The errors of [`receive`](Self::receive).
    pub fn receive_next(&self, timeout: Duration) -> Result<Option<(Ticket, PinnedBuf)>> {
        let (view, begun) = (self.view()?, Instant::now());
        let slice = CHECK_EVERY.min(timeout);
        view.header()?.sent_event().wait(slice, || begun.elapsed() >= timeout, || self.receive_oldest(|_| true))
    }

    /// Receives the oldest buffer that a dead worker sent and that was not received, without its ticket; `None` if there is none.
    /// The bytes are complete. Call it only when no more tickets of that worker can arrive.
    ///
    /// # Errors
    ///
    /// The errors of [`receive`](Self::receive).
    pub fn receive_from_dead_worker(&self) -> Result<Option<(Ticket, PinnedBuf)>> {
        self.receive_oldest(|slot| !is_alive(&self.lock_file, slot))
    }

    fn receive_oldest(&self, is_wanted: impl Fn(u16) -> bool) -> Result<Option<(Ticket, PinnedBuf)>> {
        let view = self.view()?;
        loop {
            let sent = view.buffer_headers().filter_map(|(index, entry)| match entry.state.read() {
                Some(sent @ BufferState { usage: Usage::Sent(slot), .. }) if is_wanted(slot) => {
                    Some((entry.order.load(Ordering::Relaxed), index, entry, sent))
                }
                _ => None,
            });
            let Some((_, index, entry, sent)) = sent.min_by_key(|&(order, ..)| order) else { return Ok(None) };
            let user_data = entry.user_data.load(Ordering::Relaxed);
            if let Some(buf) = self.hold(view, index, entry, sent)? {
                let (index, len) = (u32::try_from(index).unwrap_or(u32::MAX), buf.len() as u64);
                let generation = sent.generation;
                return Ok(Some((Ticket { id: view.geometry.id, index, generation, len, user_data }, buf)));
            }
        }
    }

    /// Frees the buffers that dead workers were filling, and returns their number. Workers that wait for a buffer do this too.
    ///
    /// # Errors
    ///
    /// [`is_forked`](crate::Error::is_forked): this process was forked after the buffers were created.
    pub fn recover(&self) -> Result<usize> {
        recover(self.view()?, &self.lock_file, None)
    }

    /// Sets whether workers are accepted (the default). If not, they are refused
    /// ([`is_trainer_unavailable`](crate::Error::is_trainer_unavailable)): `get` fails instead of waiting for a buffer, `send`
    /// fails and frees its buffer, and no worker can attach. A trainer should refuse its workers before it joins them.
    ///
    /// # Errors
    ///
    /// [`is_forked`](crate::Error::is_forked): this process was forked after the buffers were created.
    pub fn set_accepting_workers(&self, is_accepting: bool) -> Result<()> {
        self.view()?.header()?.set_accepting_workers(is_accepting);
        Ok(())
    }

    /// Returns the number of workers that are attached and alive; 0 in a forked child.
    pub fn worker_count(&self) -> usize {
        let used = self.view().and_then(View::header).map_or(0, |header| header.slots_used());
        let slots = 0..u16::try_from(used).unwrap_or(u16::MAX).min(self.geometry.slots);
        slots.filter(|&slot| is_alive(&self.lock_file, slot)).count()
    }

    /// Returns the number of buffers in each state; all 0 in a forked child.
    pub fn counts(&self) -> BufferCounts {
        self.view().map_or_else(|_| BufferCounts::default(), BufferCounts::read)
    }

    /// Returns the bytes that each buffer holds.
    pub fn buffer_bytes(&self) -> usize {
        self.geometry.buffer_bytes
    }

    /// Returns the number of buffers.
    pub fn buffer_count(&self) -> usize {
        self.geometry.buffers
    }

    /// Returns the component that pinned the memory; `None` if the pool's memory is not pinned.
    pub fn pinned_by(&self) -> Option<PinnedBy> {
        self.lender.pinned_by()
    }

    /// Returns whether the memory is in hugetlb pages.
    pub fn is_hugetlb(&self) -> bool {
        self.lender.memory().is_hugetlb()
    }

    /// Returns the memory's descriptor, for workers that inherit it or receive it over a Unix socket.
    ///
    /// # Safety
    ///
    /// Every process that gets the descriptor, this process included, must change the memory only through this crate.
    pub unsafe fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Returns the pool of received buffers, which are [adopted](Pool::adopt) memory. [`BufferCounts::received`] counts the buffers
    /// in use and in flight.
    pub fn pool(&self) -> Pool {
        self.lender.pool().clone()
    }
}

impl Drop for SharedPool {
    fn drop(&mut self) {
        // Fails in a forked child: the buffers belong to the parent.
        if let Ok(header) = self.view().and_then(View::header) {
            header.close();
        }
    }
}

/// Frees the received buffer at `offset`.
fn free(view: View<'_>, offset: usize) {
    let entry = view.geometry.index(offset).and_then(|index| view.buffer_header(index));
    let held = entry.and_then(|entry| Some((entry, entry.state.read()?)));
    if let Some((entry, state @ BufferState { usage: Usage::Received, .. })) = held
        && entry.state.step(state, Usage::Free)
        && let Ok(header) = view.header()
    {
        header.freed_event().notify(1);
    }
}
