//! Pool handles, and the end of destroyed pools.
//!
//! ```text
//!   Free ──open──▶ Opening ──▶ Open ──destroy──▶ Destroyed ──the last call has ended──▶ Ending ──▶ Ended ──no buffer in use──▶ Free
//! ```
//!
//! A handle consists of the number of a slot and the generation of the slot's pool. The generation increases with each pool
//! of the slot and is part of the slot's `state`. Slots are created when needed and never freed, so any handle can be looked
//! up at any time. A request costs two atomic operations on a counter that few threads share. A return costs none, since a
//! slot with a buffer in use is not reused.
//!
//! - **slots-I1**: `pool` is written in two phases only. In the phase Opening, the thread that claimed the slot writes it. In the
//!   phase Ending, the thread that began this phase writes it, after it had seen no counted call. A call reads `pool` only if
//!   it was counted first and saw Open afterwards.
//! - **slots-I2**: a slot becomes Free only if its table is empty, and once it is Destroyed, only calls that were counted and
//!   saw Open before insert buffers. A thread that changes the state passes the generation for which it read the counters and
//!   the table, since the slot may contain a later pool by then.
//! - **slots-I3**: a forked child uses no slot of its parent, since a thread of the parent may have held one of its locks.

use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crossbeam_utils::CachePadded;
use pinpool::{Partition, Pool};
use pinpool_os::fork::ForkGeneration;

use crate::buffers_in_use::{BuffersInUse, LookupError};
use crate::call::Failure;
use crate::slot_state::{Phase, SlotState};
use crate::status::pp_status;

/// A pool. An opaque handle; do not dereference it. Any thread may use it at any time.
#[derive(Debug)]
pub struct pp_pool {
    _private: [u8; 0],
}

/// Number of low bits of a handle that contain the number of its slot.
const NUMBER_BITS: u32 = 12;
const POOLS_MAX: usize = 1 << NUMBER_BITS;
/// Number of call counters in a slot; the threads are distributed over them.
const COUNTERS: usize = 32;

static SLOTS: [AtomicPtr<Slot>; POOLS_MAX] = [const { AtomicPtr::new(ptr::null_mut()) }; POOLS_MAX];

/// The object that a handle names.
#[derive(Debug)]
pub(crate) enum PoolOrPartition {
    Pool(Pool),
    Partition(Partition),
}

/// A slot, which contains at most one pool or partition at a time.
pub(crate) struct Slot {
    state: SlotState,
    /// The fork generation in which the slot was created (slots-I3).
    fork_generation: u32,
    pool: UnsafeCell<Option<PoolOrPartition>>,
    calls: [CachePadded<AtomicUsize>; COUNTERS],
    buffers: BuffersInUse,
}

// SAFETY: the pool is `Send` and `Sync`, and only one thread at a time writes to its cell (slots-I1).
unsafe impl Sync for Slot {}

/// A counted call on an open pool. The pool does not end before the `CallGuard` is dropped.
pub(crate) struct CallGuard {
    slot: &'static Slot,
    counter: &'static AtomicUsize,
}

impl CallGuard {
    #[inline]
    pub(crate) fn pool_or_partition(&self) -> Result<&PoolOrPartition, Failure> {
        // SAFETY: slots-I1: this call is counted and has seen Open.
        let opened = unsafe { &*self.slot.pool.get() };
        opened.as_ref().ok_or_else(|| Failure::new(pp_status::PP_INTERNAL, "an open handle without a pool"))
    }

    /// Returns the pool or partition, for requests.
    #[inline]
    pub(crate) fn pool_for_requests(&self) -> Result<&Pool, Failure> {
        self.pool_or_partition().map(|opened| match opened {
            PoolOrPartition::Pool(pool) => pool,
            PoolOrPartition::Partition(partition) => partition.as_pool(),
        })
    }

    /// Returns the pool, or fails if the handle names a partition.
    pub(crate) fn pool(&self) -> Result<&Pool, Failure> {
        match self.pool_or_partition()? {
            PoolOrPartition::Pool(pool) => Ok(pool),
            PoolOrPartition::Partition(partition) => {
                let why = format!("`{}` is a partition: call this with the handle of its pool", partition.name());
                Err(Failure::new(pp_status::PP_INVALID_ARGUMENT, why))
            }
        }
    }

    pub(crate) fn buffers(&self) -> &'static BuffersInUse {
        &self.slot.buffers
    }
}

impl Drop for CallGuard {
    #[inline]
    fn drop(&mut self) {
        self.slot.leave(self.counter);
    }
}

/// Returns the index of the counter that this thread uses.
#[inline]
fn counter_index() -> usize {
    thread_local! {
        static INDEX: usize = {
            static NEXT: AtomicUsize = AtomicUsize::new(0);
            // Relaxed: the index only distributes the threads.
            NEXT.fetch_add(1, Ordering::Relaxed) % COUNTERS
        };
    }
    INDEX.try_with(|index| *index).unwrap_or_default()
}

/// Returns the slot and the generation that a handle names. Fails if no slot has this generation, or in a forked child.
#[inline]
fn resolve(handle: *const pp_pool) -> Result<(&'static Slot, usize), Failure> {
    let (number, generation) = (handle.addr() % POOLS_MAX, handle.addr() >> NUMBER_BITS);
    if handle.is_null() {
        return Err(Failure::argument("the argument `pool` is NULL"));
    }
    // SAFETY: the pointer is null, or points to a slot that is never freed and that was published by the exchange in `slot`.
    let slot = unsafe { SLOTS[number].load(Ordering::Acquire).as_ref() }.ok_or_else(|| unknown_pool(handle))?;
    if slot.state.generation() != generation {
        return Err(unknown_pool(handle));
    }
    if slot.fork_generation != ForkGeneration::now().number() {
        let why = "the pool belongs to the process that forked this one, which inherits neither memory nor devices: open a \
                   new pool after the fork";
        return Err(Failure::new(pp_status::PP_FORKED, why));
    }
    Ok((slot, generation))
}

#[cold]
fn unknown_pool(handle: *const pp_pool) -> Failure {
    let why = "the pool is already destroyed, or this is not a handle of pp_pool_open or pp_partition_open";
    Failure::new(pp_status::PP_UNKNOWN_POOL, format!("pool {handle:p}: {why}"))
}

/// Begins a call on a pool. Fails if the pool is not open.
#[inline]
pub(crate) fn enter(handle: *const pp_pool) -> Result<CallGuard, Failure> {
    let (slot, generation) = resolve(handle)?;
    let counter = &*slot.calls[counter_index()];
    counter.fetch_add(1, Ordering::SeqCst);
    // Dropping the `CallGuard` decrements the counter.
    let call = CallGuard { slot, counter };
    if slot.state.is_in(generation, Phase::Open) { Ok(call) } else { Err(unknown_pool(handle)) }
}

/// Begins a call on the buffers of a pool that is open, or destroyed with buffers in use: a return, a record or a query. Dropping
/// the result after the return of the last buffer frees the slot of a destroyed pool.
#[inline]
pub(crate) fn enter_for_buffers(handle: *const pp_pool) -> Result<BuffersGuard, Failure> {
    let (slot, generation) = resolve(handle)?;
    let is_free = slot.state.is_in(generation, Phase::Free);
    if is_free { Err(unknown_pool(handle)) } else { Ok(BuffersGuard { slot, generation }) }
}

/// Access to the buffers in use of a pool that is open or destroyed. Not counted: the buffer that the caller returns keeps the
/// slot (slots-I2). For a handle without buffers the check is best effort.
pub(crate) struct BuffersGuard {
    slot: &'static Slot,
    generation: usize,
}

impl BuffersGuard {
    pub(crate) fn buffers(&self) -> &'static BuffersInUse {
        &self.slot.buffers
    }

    /// Returns the failure of a call that passed `address`, for which the table returned `why`.
    #[cold]
    pub(crate) fn refusal(&self, address: usize, why: &LookupError) -> Failure {
        let why = match why {
            LookupError::Busy => "another call is returning or adopting this buffer",
            LookupError::Inside(start, len) => &format!("inside the {len}B buffer at {start:#x}; pass {start:#x}"),
            LookupError::Nowhere if self.is_in_another_pool(address) => "another pool's buffer; return it there",
            LookupError::Nowhere => "no buffer of this pool begins here, or it was already returned",
        };
        Failure::new(pp_status::PP_UNKNOWN_POINTER, format!("{address:#x}: {why}"))
    }

    fn is_in_another_pool(&self, address: usize) -> bool {
        let fork_generation = ForkGeneration::now().number();
        // SAFETY: as in `resolve`.
        let slots = SLOTS.iter().filter_map(|slot| unsafe { slot.load(Ordering::Acquire).as_ref() });
        let mut others = slots.filter(|other| !ptr::eq(*other, self.slot) && other.fork_generation == fork_generation);
        others.any(|other| other.buffers.why_missing(address) != LookupError::Nowhere)
    }
}

impl Drop for BuffersGuard {
    #[inline]
    fn drop(&mut self) {
        // The call removed its buffer from the table, under a lock of the table, before this check. So either this check sees
        // Ended, or the thread that ended the pool saw the table without the buffer.
        if self.slot.state.is_in(self.generation, Phase::Ended) {
            self.slot.free_if_empty(self.generation);
        }
    }
}

/// Stores a pool or a partition in a free slot and returns its handle. `zero` says whether the pool clears returned buffers.
pub(crate) fn open(opened: PoolOrPartition, zero: bool) -> Result<*mut pp_pool, Failure> {
    let fork_generation = ForkGeneration::now().number();
    let claimed = (0..POOLS_MAX).find_map(|number| {
        let slot = slot(number).filter(|slot| slot.fork_generation == fork_generation)?;
        Some((number, slot, slot.state.claim()?))
    });
    let Some((number, slot, generation)) = claimed else {
        let why = "pools and partitions are open or have buffers in use: destroy one, and return its buffers";
        return Err(Failure::new(pp_status::PP_TOO_MANY_POOLS, format!("{POOLS_MAX} {why}")));
    };
    slot.open(generation, opened, zero);
    Ok(ptr::without_provenance_mut(generation << NUMBER_BITS | number))
}

/// Returns the slot with this number, and creates it if necessary.
fn slot(number: usize) -> Option<&'static Slot> {
    let entry = &SLOTS[number];
    if entry.load(Ordering::Acquire).is_null() {
        let fresh = Box::into_raw(Box::new(Slot::new()));
        if entry.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: `fresh` was created above and is not shared, since the exchange failed.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
    // SAFETY: as in `resolve`.
    unsafe { entry.load(Ordering::Acquire).as_ref() }
}

/// Destroys a pool: running calls continue, and later calls are refused.
pub(crate) fn destroy(handle: *const pp_pool) -> Result<(), Failure> {
    let (slot, generation) = resolve(handle)?;
    if !slot.state.change(generation, Phase::Open, Phase::Destroyed) {
        return Err(unknown_pool(handle));
    }
    slot.end_if_unused(generation);
    Ok(())
}

impl Slot {
    fn new() -> Self {
        Self {
            state: SlotState::default(),
            fork_generation: ForkGeneration::now().number(),
            pool: UnsafeCell::new(None),
            calls: [const { CachePadded::new(AtomicUsize::new(0)) }; COUNTERS],
            buffers: BuffersInUse::new(),
        }
    }

    /// Stores `opened` under the generation that this thread claimed.
    fn open(&self, generation: usize, opened: PoolOrPartition, zero: bool) {
        self.buffers.prepare(zero);
        // SAFETY: slots-I1: this thread claimed the slot.
        unsafe { *self.pool.get() = Some(opened) };
        self.state.change(generation, Phase::Opening, Phase::Open);
    }

    #[inline]
    fn leave(&self, counter: &AtomicUsize) {
        counter.fetch_sub(1, Ordering::SeqCst);
        // Either this load sees Destroyed, or the destroying thread reads the counters after this decrement. A refused call may
        // have been counted while the slot already contained a later pool, so this checks the generation that the slot has now.
        if let Some(generation) = self.state.generation_in(Phase::Destroyed) {
            self.end_if_unused(generation);
        }
    }

    /// Drops the pool of a destroyed slot if no call uses it.
    #[cold]
    fn end_if_unused(&self, generation: usize) {
        self.end_if(generation, || self.calls.iter().all(|calls| calls.load(Ordering::SeqCst) == 0));
    }

    fn end_if(&self, generation: usize, is_unused: impl FnOnce() -> bool) {
        // If several threads try this change, only one succeeds. A call that is counted after the check sees that the pool is not
        // open.
        if !is_unused() || !self.state.change(generation, Phase::Destroyed, Phase::Ending) {
            return;
        }
        // SAFETY: slots-I1: no counted call has seen Open, and this thread changed the phase to Ending.
        let pool = unsafe { (*self.pool.get()).take() };
        self.state.change(generation, Phase::Ending, Phase::Ended);
        // The pool is dropped after the change, so that a callback that runs during the drop finds a consistent slot.
        drop(pool);
        self.free_if_empty(generation);
    }

    #[cold]
    fn free_if_empty(&self, generation: usize) {
        self.free_if(generation, || self.buffers.is_empty());
    }

    fn free_if(&self, generation: usize, is_empty: impl FnOnce() -> bool) {
        if is_empty() {
            self.buffers.shrink();
            // Another thread may have changed it.
            let _ = self.state.change(generation, Phase::Ended, Phase::Free);
        }
    }
}

#[cfg(test)]
mod tests {
    use pinpool::Backend;

    use super::*;

    /// Opens a pool in the slot and returns its generation.
    fn open_in(slot: &Slot) -> usize {
        let generation = slot.state.claim().unwrap();
        let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
        slot.open(generation, PoolOrPartition::Pool(pool), false);
        generation
    }

    fn destroy_in(slot: &Slot, generation: usize) {
        assert!(slot.state.change(generation, Phase::Open, Phase::Destroyed));
        slot.end_if_unused(generation);
    }

    /// Takes a buffer from the slot's pool and returns its address.
    fn take_address(slot: &Slot) -> usize {
        // SAFETY: slots-I1: no other thread uses this slot.
        let Some(PoolOrPartition::Pool(pool)) = (unsafe { &*slot.pool.get() }) else { panic!("a slot without a pool") };
        slot.buffers.insert(pool.get(4096).unwrap()).addr()
    }

    #[test]
    fn a_stale_empty_check_does_not_free_the_slot_of_a_later_pool() {
        let slot = Slot::new();
        let first = open_in(&slot);
        destroy_without_buffers(&slot, first);
        let address = std::cell::Cell::new(0);
        slot.free_if(first, || {
            // Another thread runs between the check and the change that depends on it.
            slot.free_if_empty(first);
            let second = open_in(&slot);
            address.set(take_address(&slot));
            destroy_in(&slot, second);
            true
        });
        assert!(slot.state.is_in(first + 1, Phase::Ended), "{:?}", slot.state);
        drop(slot.buffers.remove(address.get()).unwrap());
        slot.free_if_empty(first + 1);
        assert!(slot.state.is_in(first + 1, Phase::Free), "{:?}", slot.state);
    }

    /// Destroys the pool and removes its last buffer, so that the slot is Ended and not Free yet.
    fn destroy_without_buffers(slot: &Slot, generation: usize) {
        let address = take_address(slot);
        destroy_in(slot, generation);
        drop(slot.buffers.remove(address).unwrap());
        assert!(slot.state.is_in(generation, Phase::Ended));
    }

    #[test]
    fn a_stale_end_does_not_drop_a_later_pool_in_use() {
        let slot = Slot::new();
        let first = open_in(&slot);
        assert!(slot.state.change(first, Phase::Open, Phase::Destroyed));
        let counter = &slot.calls[0];
        slot.end_if(first, || {
            slot.end_if_unused(first);
            let second = open_in(&slot);
            counter.fetch_add(1, Ordering::SeqCst);
            destroy_in(&slot, second);
            true
        });
        assert!(slot.state.is_in(first + 1, Phase::Destroyed), "{:?}", slot.state);
        slot.leave(counter);
        assert!(slot.state.is_in(first + 1, Phase::Free), "{:?}", slot.state);
    }

    #[test]
    fn a_refused_call_ends_a_later_pool_that_is_destroyed_meanwhile() {
        let slot = Slot::new();
        let first = open_in(&slot);
        destroy_in(&slot, first);
        // A call with the first handle is counted, and refused only after the second pool was destroyed.
        let counter = &slot.calls[0];
        counter.fetch_add(1, Ordering::SeqCst);
        let second = open_in(&slot);
        destroy_in(&slot, second);
        assert!(slot.state.is_in(second, Phase::Destroyed), "{:?}", slot.state);
        slot.leave(counter);
        assert!(slot.state.is_in(second, Phase::Free), "{:?}", slot.state);
    }
}
