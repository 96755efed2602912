//! Handles of pools, and when a pool that is closed ends.
//!
//! ```text
//!   Free ──open──▶ Opening ──▶ Open ──close──▶ Closed ──the last call is over──▶ Ending ──▶ Ended ──no buffer is out──▶ Free
//! ```
//!
//! A handle is the number of a slot and the slot's generation, which rises with each pool. Slots are made as they are needed
//! and never freed, so that every handle can be looked up at any time. A get costs two exchanges on a counter that few
//! threads share; a put needs none, since a slot with a buffer out is not given away.
//!
//! - **slots-I1**: `pool` is written only in Opening, by the thread that claimed the slot, and in Ending, by the thread that
//!   ended it when no call was counted. A call reads it while it is counted and has seen Open since.
//! - **slots-I2**: a slot becomes Free only with an empty table, and nothing is inserted after Closed but by counted calls.

use std::cell::UnsafeCell;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicUsize, Ordering};

use crossbeam::utils::CachePadded;
use pinpool::{ForkGeneration, Pool};

use crate::call::Failure;
use crate::pool::pp_pool;
use crate::status::pp_status;
use crate::table::{Table, Unknown};

/// Bits of a handle that are the slot's number.
const NUMBER_BITS: u32 = 12;
const POOLS_MAX: usize = 1 << NUMBER_BITS;
/// Threads take turns at these.
const COUNTERS: usize = 32;

const FREE: u8 = 0;
const OPENING: u8 = 1;
const OPEN: u8 = 2;
const CLOSED: u8 = 3;
const ENDING: u8 = 4;
const ENDED: u8 = 5;

static SLOTS: [AtomicPtr<Slot>; POOLS_MAX] = [const { AtomicPtr::new(ptr::null_mut()) }; POOLS_MAX];

/// A place for a pool.
pub(crate) struct Slot {
    state: AtomicU8,
    generation: AtomicUsize,
    /// When the pool was opened, in forks.
    forks: AtomicU32,
    pool: UnsafeCell<Option<Pool>>,
    calls: [CachePadded<AtomicUsize>; COUNTERS],
    table: Table,
}

// SAFETY: the pool is shared and can be sent; its cell is written to by one thread at a time (slots-I1).
unsafe impl Sync for Slot {}

impl fmt::Debug for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("state", &self.state).field("generation", &self.generation).finish_non_exhaustive()
    }
}

/// A call that uses an open pool, which does not end before this is dropped.
#[derive(Debug)]
pub(crate) struct Call {
    slot: &'static Slot,
    counter: &'static AtomicUsize,
}

impl Call {
    #[inline]
    pub(crate) fn pool(&self) -> Result<&Pool, Failure> {
        // SAFETY: slots-I1: this call is counted and has seen Open.
        let pool = unsafe { &*self.slot.pool.get() };
        pool.as_ref().ok_or_else(|| Failure::new(pp_status::PP_INTERNAL, "an open handle without a pool"))
    }

    pub(crate) fn table(&self) -> &'static Table {
        &self.slot.table
    }
}

impl Drop for Call {
    #[inline]
    fn drop(&mut self) {
        self.slot.leave(self.counter);
    }
}

/// The counter of this thread.
#[inline]
fn counter_number() -> usize {
    thread_local! {
        static NUMBER: usize = {
            static NEXT: AtomicUsize = AtomicUsize::new(0);
            NEXT.fetch_add(1, Ordering::Relaxed) % COUNTERS
        };
    }
    NUMBER.try_with(|number| *number).unwrap_or_default()
}

fn forks() -> u32 {
    ForkGeneration::now().number()
}

/// The slot and the generation that a handle names.
#[inline]
fn resolve(handle: *const pp_pool) -> Result<(&'static Slot, usize), Failure> {
    let (number, generation) = (handle.addr() % POOLS_MAX, handle.addr() >> NUMBER_BITS);
    if handle.is_null() {
        return Err(Failure::argument("the argument `pool` is NULL"));
    }
    // SAFETY: null, or a slot that is never freed; it was published by the store that this load sees.
    let slot = unsafe { SLOTS[number].load(Ordering::Acquire).as_ref() }.ok_or_else(|| unknown(handle))?;
    if slot.generation.load(Ordering::SeqCst) != generation {
        return Err(unknown(handle));
    }
    if slot.forks.load(Ordering::Relaxed) != forks() {
        let why = "the pool belongs to the process that forked this one, which inherits neither memory nor devices: open a \
                   new pool after the fork";
        return Err(Failure::new(pp_status::PP_FORKED, why));
    }
    Ok((slot, generation))
}

#[cold]
fn unknown(handle: *const pp_pool) -> Failure {
    let text = format!("pool {handle:p}: closed already, or no handle of a pool; pp_pool_open gives one");
    Failure::new(pp_status::PP_UNKNOWN_POOL, text)
}

/// Begins a call on an open pool.
#[inline]
pub(crate) fn enter(handle: *const pp_pool) -> Result<Call, Failure> {
    let (slot, generation) = resolve(handle)?;
    let counter = &*slot.calls[counter_number()];
    counter.fetch_add(1, Ordering::SeqCst);
    // From here on the drop takes the count back.
    let call = Call { slot, counter };
    let is_open = slot.state.load(Ordering::SeqCst) == OPEN && slot.generation.load(Ordering::SeqCst) == generation;
    if is_open { Ok(call) } else { Err(unknown(handle)) }
}

/// The buffers of a pool that is open, or closed with buffers out; end with `settle`.
#[inline]
pub(crate) fn buffers_of(handle: *const pp_pool) -> Result<Buffers, Failure> {
    let (slot, _) = resolve(handle)?;
    match slot.state.load(Ordering::SeqCst) {
        FREE | OPENING => Err(unknown(handle)),
        _ => Ok(Buffers(slot)),
    }
}

/// The buffers that a pool has out.
#[derive(Debug)]
pub(crate) struct Buffers(&'static Slot);

impl Buffers {
    pub(crate) fn table(&self) -> &'static Table {
        &self.0.table
    }

    /// The failure of a call with this address.
    #[cold]
    pub(crate) fn unknown(&self, address: usize, why: &Unknown) -> Failure {
        let why = match why {
            Unknown::Leaving => "another call is putting this buffer".to_owned(),
            Unknown::Inside(start, len) => {
                format!("inside the buffer at {start:#x} of {len} B; put that address, the buffer's first")
            }
            Unknown::Nowhere if self.is_in_another_pool(address) => "a buffer of another pool; put it there".to_owned(),
            Unknown::Nowhere => "not from this pool, or already put".to_owned(),
        };
        Failure::new(pp_status::PP_UNKNOWN_POINTER, format!("{address:#x}: {why}"))
    }

    fn is_in_another_pool(&self, address: usize) -> bool {
        let forks = forks();
        let others = all().filter(|other| !ptr::eq(*other, self.0) && other.forks.load(Ordering::Relaxed) == forks);
        let mut others = others.filter(|other| (OPEN..=ENDED).contains(&other.state.load(Ordering::SeqCst)));
        others.any(|other| other.table.inside(address) != Unknown::Nowhere)
    }
}

impl Drop for Buffers {
    #[inline]
    fn drop(&mut self) {
        // A put took its buffer out under a lock of the table before this, so either it sees Ended or the thread that ended
        // the pool saw the table without the buffer.
        if self.0.state.load(Ordering::SeqCst) == ENDED {
            self.0.free_if_empty();
        }
    }
}

/// Every slot there is.
fn all() -> impl Iterator<Item = &'static Slot> {
    // SAFETY: as in `resolve`.
    SLOTS.iter().filter_map(|slot| unsafe { slot.load(Ordering::Acquire).as_ref() })
}

/// Puts a pool into a free slot.
pub(crate) fn open(pool: Pool) -> Result<*mut pp_pool, Failure> {
    let Some((number, slot)) = (0..POOLS_MAX).find_map(|number| Some((number, claim(number)?))) else {
        let text = format!("{POOLS_MAX} pools are open or have buffers out: close one, and put its buffers");
        return Err(Failure::new(pp_status::PP_LIMIT, text));
    };
    // SAFETY: slots-I1: this thread claimed the slot.
    unsafe { *slot.pool.get() = Some(pool) };
    slot.forks.store(forks(), Ordering::Relaxed);
    let generation = slot.generation.fetch_add(1, Ordering::SeqCst) + 1;
    slot.state.store(OPEN, Ordering::SeqCst);
    Ok(ptr::without_provenance_mut(generation << NUMBER_BITS | number))
}

/// The slot of this number in the state Opening, if it was free.
fn claim(number: usize) -> Option<&'static Slot> {
    let place = &SLOTS[number];
    if place.load(Ordering::Acquire).is_null() {
        let fresh = Box::into_raw(Box::new(Slot::new()));
        if place.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: made above, and given to nobody.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
    // SAFETY: as in `resolve`.
    let slot = unsafe { place.load(Ordering::Acquire).as_ref() }?;
    slot.state.compare_exchange(FREE, OPENING, Ordering::SeqCst, Ordering::SeqCst).ok().map(|_| slot)
}

/// Closes a pool: calls that run go on, later ones are refused.
pub(crate) fn close(handle: *const pp_pool) -> Result<(), Failure> {
    let (slot, _) = resolve(handle)?;
    let closed = slot.state.compare_exchange(OPEN, CLOSED, Ordering::SeqCst, Ordering::SeqCst);
    closed.map_err(|_| unknown(handle))?;
    slot.end_if_unused();
    Ok(())
}

impl Slot {
    fn new() -> Self {
        Self {
            state: AtomicU8::new(FREE),
            generation: AtomicUsize::new(0),
            forks: AtomicU32::new(0),
            pool: UnsafeCell::new(None),
            calls: [const { CachePadded::new(AtomicUsize::new(0)) }; COUNTERS],
            table: Table::new(),
        }
    }

    #[inline]
    fn leave(&self, counter: &AtomicUsize) {
        counter.fetch_sub(1, Ordering::SeqCst);
        // Either this sees Closed, or the thread that closes sees the count without this call.
        if self.state.load(Ordering::SeqCst) == CLOSED {
            self.end_if_unused();
        }
    }

    /// Drops the pool of a closed slot once no call uses it.
    #[cold]
    fn end_if_unused(&self) {
        if self.calls.iter().any(|calls| calls.load(Ordering::SeqCst) > 0) {
            return;
        }
        // Of several threads here one makes the change. A call that is counted from now on sees that the pool is not open.
        if self.state.compare_exchange(CLOSED, ENDING, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return;
        }
        // SAFETY: slots-I1: no call is counted that has seen Open, and this thread made the change.
        let pool = unsafe { (*self.pool.get()).take() };
        self.state.store(ENDED, Ordering::SeqCst);
        // After the change, so that a callback of the end that comes here finds the slot in order.
        drop(pool);
        self.free_if_empty();
    }

    #[cold]
    fn free_if_empty(&self) {
        if self.table.is_empty() {
            self.table.shrink();
            let _other_thread = self.state.compare_exchange(ENDED, FREE, Ordering::SeqCst, Ordering::SeqCst);
        }
    }
}
