//! The buffers in use, by address.
//!
//! The table is sharded by address, so that threads with different buffers rarely share a lock. A lock is held for one
//! look-up; buffers are dropped and fences are created without it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crossbeam_utils::CachePadded;
use pinpool::{PinnedBuf, PinnedBy};

use crate::asan;

const SHARDS: usize = 64;

type Shard = HashMap<usize, InUse, ByAddress>;

/// The entry of a buffer in use.
#[derive(Debug)]
struct InUse {
    /// `None` while a thread is adopting the buffer, recording work on it, or returning it after a stream or an event. Each of
    /// these calls may fail.
    buf: Option<PinnedBuf>,
    /// Whether a buffer that a thread has taken out of the entry stays with its user.
    is_recording: bool,
    owner: Owner,
    /// Whether the driver pinned a buffer that a thread has taken out of the entry.
    is_pinned: Option<bool>,
}

impl InUse {
    /// Returns the result of a call that needs the buffer while another call has taken it.
    fn without_buffer(&self) -> Found<PinnedBuf> {
        if self.is_recording { Ok(None) } else { Err(LookupError::Busy) }
    }
}

/// The owner of a buffer's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    Pool,
    /// The program, which passed the memory to `pp_adopt`.
    Program,
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

/// What a look-up finds: `None` while another call records work on the buffer.
pub(crate) type Found<T> = Result<Option<T>, LookupError>;

/// Buffers by the address of their first byte.
#[derive(Debug)]
pub(crate) struct Table {
    shards: Box<[CachePadded<Mutex<Shard>>]>,
    /// True if AddressSanitizer is informed of the buffers in use.
    uses_sanitizer: AtomicBool,
}

impl Table {
    pub(crate) fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| CachePadded::default()).collect(), uses_sanitizer: AtomicBool::new(false) }
    }

    /// Prepares for a new pool. A pool that zeroes returned buffers writes to them, so the sanitizer cannot be used.
    pub(crate) fn begin(&self, zeroes: bool) {
        self.uses_sanitizer.store(asan::is_present() && !zeroes, Ordering::Relaxed);
    }

    /// Returns whether AddressSanitizer is informed of a buffer of this owner.
    #[inline]
    fn marks(&self, owner: Owner) -> bool {
        owner == Owner::Pool && self.uses_sanitizer.load(Ordering::Relaxed)
    }

    #[inline]
    fn shard(&self, address: usize) -> &Mutex<Shard> {
        // These bits of the hash differ from the bits that the map uses.
        &self.shards[(mixed(address as u64) >> 40) as usize % SHARDS]
    }

    /// Adds a buffer of the pool and returns its address.
    #[inline]
    pub(crate) fn insert(&self, mut buf: PinnedBuf) -> *mut u8 {
        if self.marks(Owner::Pool) {
            asan::unpoison(&buf);
        }
        let start = buf.as_mut_ptr();
        let entry = InUse { buf: Some(buf), is_recording: false, owner: Owner::Pool, is_pinned: None };
        let replaced = locked(self.shard(start.addr())).insert(start.addr(), entry);
        // Two buffers in use never share an address.
        debug_assert!(replaced.is_none(), "{replaced:?}");
        start
    }

    /// Removes the buffer at this address.
    #[inline]
    pub(crate) fn remove(&self, address: usize) -> Found<PinnedBuf> {
        let mut shard = locked(self.shard(address));
        let Entry::Occupied(mut entry) = shard.entry(address) else {
            drop(shard);
            return Err(self.inside(address));
        };
        let Some(buf) = entry.get_mut().buf.take() else { return entry.get().without_buffer() };
        if self.marks(entry.remove().owner) {
            asan::poison(&buf);
        }
        Ok(Some(buf))
    }

    /// Reserves the entry for memory that is being adopted. Returns whether no buffer in use begins at this address.
    /// Afterwards the caller calls `put_back` if the adoption succeeds, or `remove_entry` if it fails.
    pub(crate) fn reserve_entry(&self, address: usize) -> bool {
        let mut shard = locked(self.shard(address));
        let Entry::Vacant(entry) = shard.entry(address) else { return false };
        entry.insert(InUse { buf: None, is_recording: false, owner: Owner::Program, is_pinned: None });
        true
    }

    /// Takes the buffer at this address and leaves its entry. Afterwards the caller calls `remove_entry` or `put_back`. Until then
    /// AddressSanitizer reports accesses if this `is_return`.
    pub(crate) fn take(&self, address: usize, is_return: bool) -> Found<PinnedBuf> {
        let mut shard = locked(self.shard(address));
        let Some(entry) = shard.get_mut(&address) else {
            drop(shard);
            return Err(self.inside(address));
        };
        let Some(buf) = entry.buf.take() else { return entry.without_buffer() };
        (entry.is_recording, entry.is_pinned) = (!is_return, Some(is_pinned(&buf)));
        if is_return && self.marks(entry.owner) {
            asan::poison(&buf);
        }
        Ok(Some(buf))
    }

    /// Removes the entry that `take` or `reserve_entry` left.
    pub(crate) fn remove_entry(&self, address: usize) {
        locked(self.shard(address)).remove(&address);
    }

    /// Puts the buffer into the entry that `take` or `reserve_entry` left: it is in use.
    pub(crate) fn put_back(&self, buf: PinnedBuf) {
        let address = buf.as_ptr().addr();
        let mut shard = locked(self.shard(address));
        if let Some(entry) = shard.get_mut(&address) {
            if self.marks(entry.owner) {
                asan::unpoison(&buf);
            }
            entry.buf = Some(buf);
        }
    }

    /// Returns whether the driver pinned the buffer at this address, also while another call uses the buffer.
    pub(crate) fn is_pinned(&self, address: usize) -> Result<bool, LookupError> {
        let shard = locked(self.shard(address));
        let found = shard.get(&address).and_then(|entry| entry.buf.as_ref().map(is_pinned).or(entry.is_pinned));
        drop(shard);
        found.ok_or_else(|| self.inside(address))
    }

    /// Returns whether no buffer is in use.
    pub(crate) fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| locked(shard).is_empty())
    }

    /// Frees the unused memory of the maps.
    pub(crate) fn shrink(&self) {
        self.shards.iter().for_each(|shard| locked(shard).shrink_to_fit());
    }

    /// Returns the buffer that contains an address at which no buffer begins. Searches all buffers, so only error texts use it.
    #[cold]
    pub(crate) fn inside(&self, address: usize) -> LookupError {
        let holds = |(&start, entry): (&usize, &InUse)| {
            let len = entry.buf.as_ref()?.len();
            (start <= address && address - start < len).then_some(LookupError::Inside(start, len))
        };
        let found = self.shards.iter().find_map(|shard| locked(shard).iter().find_map(holds));
        found.unwrap_or(LookupError::Nowhere)
    }
}

fn is_pinned(buf: &PinnedBuf) -> bool {
    buf.pinned_by() == Some(PinnedBy::Driver)
}

/// Locks a shard. Ignores poisoning, since a shard is valid at every point at which a thread may panic.
fn locked(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hashes an address by one multiplication.
#[derive(Debug, Default, Clone, Copy)]
struct ByAddress;

#[derive(Debug)]
struct AddressHasher(u64);

impl BuildHasher for ByAddress {
    type Hasher = AddressHasher;

    fn build_hasher(&self) -> AddressHasher {
        AddressHasher(0)
    }
}

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

    use super::*;

    #[test]
    fn a_buffer_leaves_once_and_what_lies_inside_is_named() {
        let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
        let table = Table::new();
        let address = table.insert(pool.get(5000).unwrap()).addr();
        assert_eq!(table.remove(address + 4999).unwrap_err(), LookupError::Inside(address, 5000));
        assert_eq!(table.remove(address + 5000).unwrap_err(), LookupError::Nowhere);
        for is_return in [false, true] {
            let buf = table.take(address, is_return).unwrap().unwrap();
            for second in [table.remove(address), table.take(address, true), table.take(address, false)] {
                assert!(matches!(second, Err(LookupError::Busy)) == is_return && !matches!(second, Ok(Some(_))));
            }
            assert!(!table.is_empty());
            assert_eq!(table.is_pinned(address), Ok(false), "a query does not fail during a call");
            table.put_back(buf);
        }
        assert_eq!((table.is_pinned(address), table.inside(address)), (Ok(false), LookupError::Inside(address, 5000)));
        assert!(table.reserve_entry(1) && table.is_pinned(1) == Err(LookupError::Nowhere), "not adopted yet");
        table.remove_entry(1);
        drop(table.remove(address).unwrap());
        assert_eq!(table.remove(address).unwrap_err(), LookupError::Nowhere);
        assert!(table.is_empty());
    }

    #[test]
    fn pages_spread_over_the_shards() {
        let table = Table::new();
        let pages = (0..4096_usize).map(|page| 0x7F00_0000_0000 + (page << 12));
        let mut hits = [0_u32; SHARDS];
        for page in pages {
            let shard = table.shard(page);
            let at = table.shards.iter().position(|each| std::ptr::eq(&**each, shard)).unwrap();
            hits[at] += 1;
        }
        assert!(hits.iter().all(|hits| (16..=192).contains(hits)), "{hits:?}");
    }
}
