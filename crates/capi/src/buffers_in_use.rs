//! The buffers in use, by address.
//!
//! The table is sharded by address, so that threads with different buffers rarely share a lock. A lock is held for one
//! look-up; buffers are dropped and fences are created without it.
//!
//! While a call records work on a buffer, another call that needs the buffer waits. If a return failed instead, its stream would
//! be lost, and the memory could be reused during a copy.

use std::collections::HashMap;
use std::collections::hash_map::{Entry, OccupiedEntry};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_utils::CachePadded;
use pinpool::{PinnedBuf, PinnedBy};
use pinpool_os::sync::unmodeled::{Condvar, Mutex};

use crate::asan;

const SHARDS: usize = 64;

type Entries = HashMap<usize, InUse, BuildHasherDefault<AddressHasher>>;

/// The entry of a buffer in use.
#[derive(Debug)]
struct InUse {
    /// `None` while a thread is adopting the buffer, recording work on it, or returning it after a stream or an event. Each of
    /// these calls may fail.
    buf: Option<PinnedBuf>,
    /// Whether a buffer that a thread has taken out of the entry stays with its user.
    stays_in_use: bool,
    /// Whether a thread waits for the buffer that another thread has taken out of the entry.
    is_awaited: bool,
    owner: MemoryOwner,
    /// Whether the driver pinned a buffer that a thread has taken out of the entry.
    is_pinned: Option<bool>,
}

impl InUse {
    fn new(buf: Option<PinnedBuf>, owner: MemoryOwner) -> Self {
        Self { buf, stays_in_use: false, is_awaited: false, owner, is_pinned: None }
    }
}

/// A part of the buffers in use, by their addresses.
#[derive(Debug, Default)]
struct Shard {
    entries: Mutex<Entries>,
    /// Notified when an awaited buffer is back in its entry, or its entry is removed.
    changed: Condvar,
}

/// The owner of a buffer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MemoryOwner {
    Pool,
    /// The program, which passed the memory to `pp_adopt`.
    Program,
}

/// What happens to a buffer after work on it was recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterRecording {
    /// The buffer returns to its pool.
    Return,
    /// The caller keeps the buffer.
    Keep,
}

/// The reason that a call cannot use the buffer at an address.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LookupError {
    /// Another thread is adopting the buffer or returning it.
    Busy,
    /// The address lies inside a buffer, which has this start and this length.
    Inside(usize, usize),
    Nowhere,
}

/// Buffers by the address of their first byte.
#[derive(Debug)]
pub(crate) struct BuffersInUse {
    shards: Box<[CachePadded<Shard>]>,
    /// True if AddressSanitizer is informed of the buffers in use.
    has_sanitizer: AtomicBool,
}

impl BuffersInUse {
    pub(crate) fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| CachePadded::default()).collect(), has_sanitizer: AtomicBool::default() }
    }

    /// Prepares for a new pool. A pool that zeroes returned buffers writes to them, so the sanitizer cannot be used.
    pub(crate) fn prepare(&self, zeroes: bool) {
        self.has_sanitizer.store(asan::is_present() && !zeroes, Ordering::Relaxed);
    }

    /// Returns whether AddressSanitizer is informed of a buffer of this owner.
    #[inline]
    fn is_poisonable(&self, owner: MemoryOwner) -> bool {
        owner == MemoryOwner::Pool && self.has_sanitizer.load(Ordering::Relaxed)
    }

    #[inline]
    fn shard(&self, address: usize) -> &Shard {
        // These bits of the hash differ from the bits that the map uses.
        &self.shards[(mixed(address as u64) >> 40) as usize % SHARDS]
    }

    /// Adds a buffer of the pool and returns its address.
    #[inline]
    pub(crate) fn insert(&self, mut buf: PinnedBuf) -> *mut u8 {
        if self.is_poisonable(MemoryOwner::Pool) {
            asan::unpoison(&buf);
        }
        let start = buf.as_mut_ptr();
        let replaced =
            self.shard(start.addr()).entries.lock().insert(start.addr(), InUse::new(Some(buf), MemoryOwner::Pool));
        // Two buffers in use never share an address. If that is violated, the earlier buffer is leaked and not reused.
        std::mem::forget(replaced.map(|entry| entry.buf));
        start
    }

    /// Takes the buffer at this address out of its entry, and returns the result of `act`. Waits while another call records work
    /// on the buffer.
    #[inline]
    fn take_entry(
        &self,
        address: usize,
        act: impl FnOnce(OccupiedEntry<'_, usize, InUse>, &PinnedBuf),
    ) -> Result<PinnedBuf, LookupError> {
        let shard = self.shard(address);
        let mut entries = shard.entries.lock();
        loop {
            let Entry::Occupied(mut entry) = entries.entry(address) else {
                drop(entries);
                return Err(self.why_missing(address));
            };
            let in_use = entry.get_mut();
            if let Some(buf) = in_use.buf.take() {
                act(entry, &buf);
                return Ok(buf);
            }
            if !in_use.stays_in_use {
                return Err(LookupError::Busy);
            }
            in_use.is_awaited = true;
            entries = shard.changed.wait(entries);
        }
    }

    /// Removes the buffer at this address. Waits while another call records work on it.
    #[inline]
    pub(crate) fn remove(&self, address: usize) -> Result<PinnedBuf, LookupError> {
        self.take_entry(address, |entry, buf| {
            if self.is_poisonable(entry.remove().owner) {
                asan::poison(buf);
            }
        })
    }

    /// Reserves the entry for memory that is being adopted. Returns whether no buffer in use begins at this address.
    /// Afterwards the caller calls `put_back` if the adoption succeeds, or `remove_entry` if it fails.
    pub(crate) fn reserve_entry(&self, address: usize) -> bool {
        let mut entries = self.shard(address).entries.lock();
        let Entry::Vacant(entry) = entries.entry(address) else { return false };
        entry.insert(InUse::new(None, MemoryOwner::Program));
        true
    }

    /// Takes the buffer at this address and leaves its entry. Waits while another call records work on it. Afterwards the caller
    /// calls `remove_entry` or `put_back`. Until then AddressSanitizer reports accesses if the buffer returns.
    pub(crate) fn take(&self, address: usize, then: AfterRecording) -> Result<PinnedBuf, LookupError> {
        self.take_entry(address, |mut entry, buf| {
            let entry = entry.get_mut();
            (entry.stays_in_use, entry.is_pinned) = (then == AfterRecording::Keep, Some(is_pinned(buf)));
            if then == AfterRecording::Return && self.is_poisonable(entry.owner) {
                asan::poison(buf);
            }
        })
    }

    /// Removes the entry that `take` or `reserve_entry` left.
    pub(crate) fn remove_entry(&self, address: usize) {
        let shard = self.shard(address);
        if shard.entries.lock().remove(&address).is_some_and(|entry| entry.is_awaited) {
            shard.changed.notify_all();
        }
    }

    /// Puts the buffer into the entry that `take` or `reserve_entry` left: it is in use.
    pub(crate) fn put_back(&self, buf: PinnedBuf) {
        let address = buf.as_ptr().addr();
        let shard = self.shard(address);
        let mut entries = shard.entries.lock();
        // Without an entry, its user could not return the buffer, which may be in use. It is leaked and not reused.
        let Some(entry) = entries.get_mut(&address) else { return std::mem::forget(buf) };
        if self.is_poisonable(entry.owner) {
            asan::unpoison(&buf);
        }
        entry.buf = Some(buf);
        if std::mem::take(&mut entry.is_awaited) {
            shard.changed.notify_all();
        }
    }

    /// Returns whether the driver pinned the buffer at this address, also while another call uses the buffer.
    pub(crate) fn is_pinned(&self, address: usize) -> Result<bool, LookupError> {
        let entries = self.shard(address).entries.lock();
        let found = entries.get(&address).and_then(|entry| entry.buf.as_ref().map(is_pinned).or(entry.is_pinned));
        drop(entries);
        found.ok_or_else(|| self.why_missing(address))
    }

    /// Returns whether no buffer is in use.
    pub(crate) fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.entries.lock().is_empty())
    }

    /// Frees the unused memory of the maps.
    pub(crate) fn shrink(&self) {
        self.shards.iter().for_each(|shard| shard.entries.lock().shrink_to_fit());
    }

    /// Returns the reason that no buffer begins at this address. Searches all buffers, so only error texts use it.
    #[cold]
    pub(crate) fn why_missing(&self, address: usize) -> LookupError {
        let holds = |(&start, entry): (&usize, &InUse)| {
            let len = entry.buf.as_ref()?.len();
            (start <= address && address - start < len).then_some(LookupError::Inside(start, len))
        };
        let found = self.shards.iter().find_map(|shard| shard.entries.lock().iter().find_map(holds));
        found.unwrap_or(LookupError::Nowhere)
    }
}

fn is_pinned(buf: &PinnedBuf) -> bool {
    buf.pinned_by() == Some(PinnedBy::Driver)
}

/// Hashes an address by one multiplication.
#[derive(Debug, Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.0 = mixed(self.0 ^ u64::from(byte)));
    }

    fn write_usize(&mut self, address: usize) {
        self.0 = mixed(address as u64);
    }
}

/// Distributes page-aligned addresses over all bits (Fibonacci hashing).
#[inline]
fn mixed(address: u64) -> u64 {
    let product = address.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    product ^ (product >> 32)
}

#[cfg(test)]
mod tests {
    use pinpool::{Backend, Pool};

    use super::AfterRecording::{Keep, Return};
    use super::*;

    #[test]
    fn a_buffer_is_removed_once() {
        let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
        let all = BuffersInUse::new();
        let address = all.insert(pool.get(5000).unwrap()).addr();
        assert_eq!(all.remove(address + 4999).unwrap_err(), LookupError::Inside(address, 5000));
        assert_eq!(all.remove(address + 5000).unwrap_err(), LookupError::Nowhere);
        let buf = all.take(address, Return).unwrap();
        for second in [all.remove(address), all.take(address, Return), all.take(address, Keep)] {
            assert_eq!(second.unwrap_err(), LookupError::Busy);
        }
        assert_eq!((all.is_empty(), all.is_pinned(address)), (false, Ok(false)), "a query does not fail meanwhile");
        all.put_back(buf);
        assert_eq!((all.is_pinned(address), all.why_missing(address)), (Ok(false), LookupError::Inside(address, 5000)));
        assert!(all.reserve_entry(1) && all.is_pinned(1) == Err(LookupError::Nowhere), "not adopted yet");
        all.remove_entry(1);
        drop(all.remove(address).unwrap());
        for (uses_take, succeeds) in [(false, true), (true, true), (false, false), (true, false)] {
            let address = all.insert(pool.get(5000).unwrap()).addr();
            let buf = all.take(address, Keep).unwrap();
            assert_eq!((all.is_empty(), all.is_pinned(address)), (false, Ok(false)), "a query does not wait");
            let take = || all.take(address, Return).map(|_buf| all.remove_entry(address));
            let call = || if uses_take { take() } else { all.remove(address).map(drop) };
            let results = std::thread::scope(|scope| {
                // Both wait for the recording. If it succeeds, one gets the buffer.
                let calls = [(); 2].map(|()| scope.spawn(call));
                while !all.shard(address).entries.lock()[&address].is_awaited {
                    std::thread::yield_now();
                }
                succeeds.then_some(buf).map_or_else(|| all.remove_entry(address), |buf| all.put_back(buf));
                calls.map(|call| call.join().unwrap())
            });
            let is_busy = uses_take && succeeds && results.contains(&Err(LookupError::Busy));
            assert!(is_busy || results.contains(&Err(LookupError::Nowhere)), "{results:?}");
            assert!(results.contains(&Ok(())) == succeeds && all.is_empty(), "{results:?}");
        }
    }

    #[test]
    fn a_buffer_without_an_entry_is_leaked_and_not_reused() {
        static RELEASED: AtomicBool = AtomicBool::new(false);
        let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
        let (all, mut memory) = (BuffersInUse::new(), [0_u8; 64]);
        let address = memory.as_ptr().addr();
        for _ in 0..2 {
            let release = || RELEASED.store(true, Ordering::Relaxed);
            // SAFETY: nothing accesses the memory.
            let adopted = unsafe { pool.adopt(std::ptr::NonNull::from(&mut memory[..]), None, release) };
            assert_eq!(all.insert(adopted.unwrap()).addr(), address);
        }
        let buf = all.take(address, Return).unwrap();
        all.remove_entry(address);
        all.put_back(buf);
        assert!(!RELEASED.load(Ordering::Relaxed), "a program may still use the memory");
    }

    #[test]
    fn pages_spread_over_the_shards() {
        let all = BuffersInUse::new();
        let pages = (0..4096_usize).map(|page| 0x7F00_0000_0000 + (page << 12));
        for shard in &all.shards {
            let hits = pages.clone().filter(|&page| std::ptr::eq(all.shard(page), &**shard)).count();
            assert!((16..=192).contains(&hits), "{hits}");
        }
    }
}
