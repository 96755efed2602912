//! The trainer's side: makes the memory, pins it once, receives.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use super::counts::Counts;
use super::layout::{Entry, Geometry, SlabFile, View, WHAT, io_failed};
use super::lend::Lender;
use super::state::{State, Use};
use super::ticket::Ticket;
use super::worker::{LOOK_EVERY, TRAINER, is_alive, locks_of, recover};
use crate::error::{ErrorKind, Result};
use crate::memory_file::{MemoryFile, SharedMemory};
use pinpool::{PinnedBuf, Pool};
use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::process::Ordering;
use pinpool_shm::file::LockFile;

/// Buffers that worker processes fill and this process copies to a device from: one memory, pinned once, here.
///
/// A received buffer is a [`PinnedBuf`]: it is copied, fenced and waited for as every buffer, and when it is dropped and its copies
/// are over, the workers have it again. Its bytes were written by another process that keeps to the protocol by attaching with [`SlabWorker`](super::SlabWorker).
///
/// When it is dropped, the next call of each worker fails; received buffers stay usable. The memory is gone with the
/// last process that has it.
#[derive(Debug)]
pub struct SharedSlabs {
    lender: Lender,
    file: MemoryFile,
    geometry: Geometry,
    owners: LockFile,
    generation: ForkGeneration,
}

impl SharedSlabs {
    /// Makes `buffers` buffers of `buffer_bytes` under the limit of `pool`, pinned as its memory is. In hugetlb pages if enough of them are set
    /// aside.
    ///
    /// # Errors
    ///
    /// - [`is_limit`](crate::Error::is_limit): they do not fit under the limit,
    /// - [`is_shared`](crate::Error::is_shared): the kernel or the driver refused, or the numbers are out of range,
    /// - [`is_forked`](crate::Error::is_forked): the pool was made in a parent of this process.
    pub fn new(pool: &Pool, buffer_bytes: usize, buffers: usize) -> Result<Self> {
        Self::with_hugetlb(pool, buffer_bytes, buffers, None)
    }

    /// Makes buffers as [`new`](Self::new) does; `Some(true)` asks for hugetlb pages or an error, `Some(false)` never takes
    /// these.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new).
    pub fn with_hugetlb(pool: &Pool, buffer_bytes: usize, buffers: usize, hugetlb: Option<bool>) -> Result<Self> {
        let (file, slab) = SlabFile::new(buffer_bytes, buffers, hugetlb)?;
        let owners = locks_of(&file)?;
        if !owners.try_lock_slot(TRAINER).map_err(io_failed(WHAT, "a lock of the file"))? {
            return Err(
                ErrorKind::Shared { what: WHAT, why: "another process has locked the new file".to_owned() }.into()
            );
        }
        let SlabFile { memory, geometry } = slab;
        let release = move |memory: &SharedMemory, offset| free(View { memory, geometry: &geometry }, offset);
        let lender = Lender::new(pool, memory, Box::new(release))?;
        Ok(Self { lender, file, geometry, owners, generation: ForkGeneration::now() })
    }

    fn view(&self) -> Result<View<'_>> {
        // In a child of fork a driver's memory is not mapped.
        if self.generation.is_stale() {
            return Err(ErrorKind::Forked { what: WHAT, child: std::process::id() }.into());
        }
        Ok(View { memory: self.lender.memory(), geometry: &self.geometry })
    }

    /// The buffer of `ticket`. The worker's bytes are as it wrote them, in place.
    ///
    /// # Errors
    ///
    /// [`is_ticket`](crate::Error::is_ticket): it was received before, was not sent, or is of other shared buffers;
    /// [`is_forked`](crate::Error::is_forked): this is a child of the process that made this.
    pub fn receive(&self, ticket: &Ticket) -> Result<PinnedBuf> {
        let view = self.view()?;
        if ticket.id != view.geometry.id {
            return Err(
                ticket.error("it is of other shared buffers: receive it with those that its worker is attached to")
            );
        }
        let Some(entry) = view.entry(ticket.index()) else {
            return Err(ticket.error(format!("there are {} buffers", view.geometry.buffers)));
        };
        let sent = entry.state.read().ok_or_else(|| ticket.error("the state of the buffer is damaged"))?;
        let is_current = sent.generation == ticket.generation;
        match sent.usage {
            Use::Sent(_) if is_current && entry.len.load(Ordering::Relaxed) == ticket.len => {}
            Use::Sent(_) if is_current => return Err(ticket.error("its length is not what the worker sent")),
            Use::Filling(_) if is_current => return Err(ticket.error("its worker is still filling the buffer")),
            Use::Held if is_current => return Err(ticket.error("it was received before, and the buffer is in use")),
            Use::Free if is_current => return Err(ticket.error("it was received before, and its buffer was returned")),
            _ => {
                let now = sent.generation;
                return Err(
                    ticket.error(format!("the buffer is in use {now} by now: it was received before, or taken back"))
                );
            }
        }
        self.hold(view, ticket.index(), entry, sent)?.ok_or_else(|| ticket.error("another thread has just received it"))
    }

    /// `None` if another thread was faster.
    fn hold(&self, view: View<'_>, index: usize, entry: &Entry, sent: State) -> Result<Option<PinnedBuf>> {
        let len =
            usize::try_from(entry.len.load(Ordering::Relaxed)).unwrap_or(usize::MAX).min(view.geometry.buffer_bytes);
        if !entry.state.step(sent, Use::Held) {
            return Ok(None);
        }
        let lent = self.lender.lend(view.geometry.offset(index), len);
        if lent.is_err() {
            entry.state.change(State { usage: Use::Held, ..sent }, sent);
        }
        lent.map(Some)
    }

    /// The buffer that was sent first of those not received, with its ticket; waits for one at most `timeout`, then `None`. Needs no message from
    /// the worker.
    ///
    /// # Errors
    ///
    /// The errors of [`receive`](Self::receive).
    pub fn next(&self, timeout: Duration) -> Result<Option<(Ticket, PinnedBuf)>> {
        let (view, begun) = (self.view()?, Instant::now());
        let slice = LOOK_EVERY.min(timeout);
        view.header()?.sent().wait(slice, || begun.elapsed() >= timeout, || self.oldest(|_| true))
    }

    /// The next buffer sent by a worker that has since died; its ticket may have been lost with the worker. `None` if there is
    /// none. Its bytes are complete. To be called when no more tickets of that worker can come.
    ///
    /// # Errors
    ///
    /// The errors of [`receive`](Self::receive).
    pub fn next_of_dead(&self) -> Result<Option<(Ticket, PinnedBuf)>> {
        self.oldest(|slot| !is_alive(&self.owners, slot))
    }

    fn oldest(&self, is_wanted: impl Fn(u16) -> bool) -> Result<Option<(Ticket, PinnedBuf)>> {
        let view = self.view()?;
        loop {
            let sent = view.entries().filter_map(|(index, entry)| match entry.state.read() {
                Some(sent @ State { usage: Use::Sent(slot), .. }) if is_wanted(slot) => {
                    Some((entry.order.load(Ordering::Relaxed), index, entry, sent))
                }
                _ => None,
            });
            let Some((_, index, entry, sent)) = sent.min_by_key(|&(order, ..)| order) else { return Ok(None) };
            let tag = entry.tag.load(Ordering::Relaxed);
            if let Some(buf) = self.hold(view, index, entry, sent)? {
                let (number, len) = (u32::try_from(index).unwrap_or(u32::MAX), buf.len() as u64);
                let generation = sent.generation;
                return Ok(Some((Ticket { id: view.geometry.id, index: number, generation, len, tag }, buf)));
            }
        }
    }

    /// Frees what dead workers were filling; returns how many buffers that were. Workers that wait for a buffer do it too.
    ///
    /// # Errors
    ///
    /// [`is_shared`](crate::Error::is_shared): the memory is not mapped in this process.
    pub fn recover(&self) -> Result<usize> {
        recover(self.view()?, &self.owners, None)
    }

    /// Whether a worker that finds no free buffer fails at once ([`is_peer`](crate::Error::is_peer)) instead of waiting: a
    /// trainer that joins its workers sets this first.
    ///
    /// # Errors
    ///
    /// [`is_shared`](crate::Error::is_shared): the memory is not mapped in this process.
    pub fn refuse_waits(&self, is_refusing: bool) -> Result<()> {
        self.view()?.header()?.set_refusing(is_refusing);
        Ok(())
    }

    /// Number of workers that are attached and alive.
    pub fn workers(&self) -> usize {
        let used = self.view().and_then(View::header).map_or(0, |header| header.slots_used());
        let slots = 0..u16::try_from(used).unwrap_or(u16::MAX).min(self.geometry.slots);
        slots.filter(|&slot| is_alive(&self.owners, slot)).count()
    }

    /// How many buffers are in each state.
    pub fn counts(&self) -> Counts {
        self.view().map_or_else(|_| Counts::default(), Counts::of)
    }

    /// Bytes that each buffer holds.
    pub fn buffer_bytes(&self) -> usize {
        self.geometry.buffer_bytes
    }

    /// Number of buffers.
    pub fn buffers(&self) -> usize {
        self.geometry.buffers
    }

    /// What pins the memory: `register`, `mlock` or `none`.
    pub fn pinned_by(&self) -> &'static str {
        self.lender.locked_by()
    }

    /// Whether the memory is in hugetlb pages.
    pub fn is_hugetlb(&self) -> bool {
        self.lender.memory().is_hugetlb()
    }

    /// The pool that received buffers are of: as memory that it has [adopted](Pool::adopt). Those in use and in flight are
    /// [held](Counts::held).
    pub fn pool(&self) -> Pool {
        self.lender.pool().clone()
    }
}

/// The memory's descriptor, for workers that inherit it or get it by their own way.
impl AsFd for SharedSlabs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for SharedSlabs {
    fn drop(&mut self) {
        // In a child of fork it is the parent's.
        if let Ok(header) = self.view().and_then(View::header) {
            header.close();
        }
    }
}

/// A received buffer at `offset` is used no more.
fn free(view: View<'_>, offset: usize) {
    let entry = view.geometry.index(offset).and_then(|index| view.entry(index));
    let held = entry.and_then(|entry| Some((entry, entry.state.read()?)));
    if let Some((entry, state @ State { usage: Use::Held, .. })) = held
        && entry.state.step(state, Use::Free)
        && let Ok(header) = view.header()
    {
        header.freed().notify(1);
    }
}
