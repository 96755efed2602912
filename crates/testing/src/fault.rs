//! Scripted failures around any source, for tests of code that uses one.
#![allow(unsafe_code)] // Implements the unsafe `Source` and `VirtualMemory` by forwarding each call.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use pinpool::PinnedBy;
use pinpool::source::{PAGE_BYTES, Region, Source, SourceError};
use pinpool::unstable::backend::{AddressRange, BuiltInSource, RemapError, Subrange, VirtualMemory};
use pinpool_os::sync::unmodeled::{Condvar, Mutex, MutexGuard};

/// A source that fails and waits as scripted, and otherwise forwards every call to the wrapped source.
///
/// ```
/// use std::sync::Arc;
/// use pinpool::{Backend, source::HeapSource};
/// use pinpool_testing::{FaultSource, SourceCall};
///
/// let faulty = Arc::new(FaultSource::around(Arc::new(HeapSource::new())));
/// let builder = pinpool::Pool::builder().without_env().preset(pinpool::Preset::TensorFlow);
/// let pool = builder.backend(Backend::Source(faulty.clone())).build()?;
/// faulty.fail(SourceCall::Acquire, 0);
/// assert!(pool.get(100).unwrap_err().is_backend());
/// assert!(pool.get(100).is_ok());
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug)]
pub struct FaultSource {
    inner: Arc<dyn Source>,
    script: Arc<FaultScript>,
    pin_threads: AtomicUsize,
    deadlines: Mutex<Vec<Instant>>,
}

/// A kind of source call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum SourceCall {
    /// Acquires a region, or commits granules.
    Acquire = 0,
    /// Releases a region, or decommits granules.
    Release = 1,
    /// Remaps granules.
    Remap = 2,
    /// Reserves an address range.
    Reserve = 3,
    /// Ends a reservation.
    Unreserve = 4,
    /// Queries whether a device reset has ended the memory. The maintenance thread makes this call.
    DeviceLost = 5,
}

#[derive(Debug, Default)]
struct FaultScript {
    plans: Mutex<[FaultPlan; 6]>,
    changed: Condvar,
}

/// The script for one kind of call.
#[derive(Debug, Default)]
struct FaultPlan {
    calls: u64,
    failing: BTreeSet<u64>,
    /// Remaps that fail after the old granules are decommitted.
    losing: BTreeSet<u64>,
    acts: BTreeMap<u64, fn()>,
    gates: usize,
    waiting: usize,
}

/// Holds every call of one kind until it is dropped.
#[derive(Debug)]
#[must_use = "the gate opens when it is dropped"]
pub struct CallGate {
    script: Arc<FaultScript>,
    call: SourceCall,
}

impl FaultSource {
    /// Wraps `inner`. Without a script every call is forwarded.
    pub fn around(inner: Arc<dyn Source>) -> Self {
        Self { inner, script: Arc::default(), pin_threads: AtomicUsize::new(0), deadlines: Mutex::default() }
    }

    /// Fails call number `index` of this kind, counted from 0 over the life of this source, before it changes anything.
    pub fn fail(&self, call: SourceCall, index: u64) {
        self.script.with(call, |plan| plan.failing.insert(index));
    }

    /// Calls `act`, which may panic, in call number `index` of this kind, before it changes anything.
    pub fn act(&self, call: SourceCall, index: u64, act: fn()) {
        self.script.with(call, |plan| plan.acts.insert(index, act));
    }

    /// Fails remap number `index` halfway: the old granules are decommitted, the new granules are not committed.
    pub fn lose_remap(&self, index: u64) {
        self.script.with(SourceCall::Remap, |plan| plan.losing.insert(index));
    }

    /// Holds every call of this kind from now on, until the gate is dropped.
    pub fn hold(&self, call: SourceCall) -> CallGate {
        self.script.with(call, |plan| plan.gates += 1);
        CallGate { script: self.script.clone(), call }
    }

    /// Returns the number of calls of this kind so far, including failed calls.
    pub fn calls(&self, call: SourceCall) -> u64 {
        self.script.with(call, |plan| plan.calls)
    }

    /// Returns the number of threads that the last `acquire_bulk` could use.
    pub fn pin_threads(&self) -> usize {
        self.pin_threads.load(Ordering::Relaxed)
    }

    /// Returns the times until which the calls of `acquire_until` so far could wait for other threads.
    pub fn deadlines(&self) -> Vec<Instant> {
        self.deadlines.lock().clone()
    }

    /// Returns the virtual memory of the wrapped source.
    fn inner_memory(&self) -> Result<&dyn VirtualMemory, SourceError> {
        let error = || SourceError::new("fault", format!("`{}` has no virtual memory", self.name()));
        self.inner.virtual_memory().ok_or_else(error)
    }
}

impl FaultScript {
    fn with<R>(&self, call: SourceCall, change: impl FnOnce(&mut FaultPlan) -> R) -> R {
        change(&mut self.plans.lock()[call as usize])
    }

    fn wait_while(&self, call: SourceCall, holds: impl Fn(&FaultPlan) -> bool) -> MutexGuard<'_, [FaultPlan; 6]> {
        let mut plans = self.plans.lock();
        while holds(&plans[call as usize]) {
            plans = self.changed.wait(plans);
        }
        plans
    }

    /// Counts a call and waits for its gates; then fails if the script contains the call.
    fn enter(&self, call: SourceCall) -> Result<(), RemapError> {
        let (index, act) = self.with(call, |plan| {
            plan.waiting += 1;
            plan.calls += 1;
            (plan.calls - 1, plan.acts.remove(&(plan.calls - 1)))
        });
        self.changed.notify_all();
        self.wait_while(call, |plan| plan.gates > 0)[call as usize].waiting -= 1;
        act.into_iter().for_each(|act| act());
        let error = || SourceError::new("fault", format!("{call:?} {index} fails by script"));
        if self.with(call, |plan| plan.failing.remove(&index)) {
            return Err(RemapError::Kept(error()));
        }
        if self.with(call, |plan| plan.losing.remove(&index)) { Err(RemapError::Lost(error())) } else { Ok(()) }
    }
}

impl CallGate {
    /// Waits until `threads` calls wait at the gate.
    pub fn wait_for(&self, threads: usize) {
        drop(self.script.wait_while(self.call, |plan| plan.waiting < threads));
    }
}

impl Drop for CallGate {
    fn drop(&mut self) {
        self.script.with(self.call, |plan| plan.gates -= 1);
        self.script.changed.notify_all();
    }
}

// SAFETY: every region comes from the wrapped source and returns to it; a scripted release failure leaves the memory
// unchanged (source-C1).
#[deny(clippy::missing_trait_methods)]
unsafe impl Source for FaultSource {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn pinned_by(&self) -> Option<PinnedBy> {
        self.inner.pinned_by()
    }

    fn held_bytes(&self, len_bytes: usize) -> usize {
        self.inner.held_bytes(len_bytes)
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        self.script.enter(SourceCall::Acquire)?;
        self.inner.acquire(len_bytes)
    }

    unsafe fn release(&self, region: &Region) -> Result<(), SourceError> {
        self.script.enter(SourceCall::Release)?;
        // SAFETY: the caller's promise, forwarded: all regions of this source come from the wrapped source.
        unsafe { self.inner.release(region) }
    }

    fn blocks_on_release(&self) -> bool {
        self.inner.blocks_on_release()
    }

    fn numa_node(&self) -> Option<u32> {
        self.inner.numa_node()
    }

    fn built_in(&self) -> Option<&dyn BuiltInSource> {
        Some(self)
    }
}

#[deny(clippy::missing_trait_methods)]
impl BuiltInSource for FaultSource {
    fn held_bytes_in_bulk(&self, len_bytes: usize) -> usize {
        self.inner.held_bytes_in_bulk(len_bytes)
    }

    fn acquire_until(&self, len_bytes: usize, until: Instant) -> Result<Region, SourceError> {
        self.deadlines.lock().push(until);
        self.script.enter(SourceCall::Acquire)?;
        self.inner.acquire_until(len_bytes, until)
    }

    fn acquire_bulk(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        self.pin_threads.store(threads, Ordering::Relaxed);
        self.script.enter(SourceCall::Acquire)?;
        self.inner.acquire_bulk(len_bytes, threads, progress)
    }

    fn reserve_slice_bytes(&self) -> Option<u64> {
        self.inner.reserve_slice_bytes()
    }

    fn device_lost(&self) -> Option<SourceError> {
        self.script.enter(SourceCall::DeviceLost).map_or_else(|error| Some(error.into()), |()| self.inner.device_lost())
    }

    fn while_mapped(&self, write: &mut dyn FnMut()) {
        self.inner.while_mapped(write);
    }

    fn findings(&self) -> Vec<pinpool::unstable::Finding> {
        self.inner.findings()
    }

    fn virtual_memory(&self) -> Option<&dyn VirtualMemory> {
        self.inner.virtual_memory().map(|_| self as &dyn VirtualMemory)
    }
}

// SAFETY: every range comes from the wrapped source and returns to it, and every call about its granules is forwarded or
// fails before it changes anything; a lost remap has decommitted its granules.
#[deny(clippy::missing_trait_methods)]
unsafe impl VirtualMemory for FaultSource {
    fn granule_bytes(&self) -> usize {
        self.inner.virtual_memory().map_or(PAGE_BYTES, VirtualMemory::granule_bytes)
    }

    fn reserve_addresses(&self, len_bytes: usize) -> Result<AddressRange, SourceError> {
        self.script.enter(SourceCall::Reserve)?;
        self.inner_memory()?.reserve_addresses(len_bytes)
    }

    unsafe fn commit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        self.script.enter(SourceCall::Acquire)?;
        // SAFETY: the caller's promise, forwarded: all ranges of this source come from the wrapped source.
        unsafe { self.inner_memory()?.commit(range, offset, bytes) }
    }

    unsafe fn decommit(&self, range: &AddressRange, offset: usize, bytes: usize) -> Result<(), SourceError> {
        self.script.enter(SourceCall::Release)?;
        // SAFETY: as above.
        unsafe { self.inner_memory()?.decommit(range, offset, bytes) }
    }

    unsafe fn remap(&self, range: &AddressRange, from: &[Subrange], to: usize) -> Result<(), RemapError> {
        let inner = self.inner_memory().map_err(RemapError::Kept)?;
        match self.script.enter(SourceCall::Remap) {
            // SAFETY: as above.
            Ok(()) => unsafe { inner.remap(range, from, to) },
            Err(RemapError::Kept(error)) => Err(RemapError::Kept(error)),
            Err(RemapError::Lost(error)) => {
                for piece in from {
                    // SAFETY: as above.
                    unsafe { inner.decommit(range, piece.offset, piece.bytes) }.map_err(RemapError::Kept)?;
                }
                Err(RemapError::Lost(error))
            }
        }
    }

    fn has_old_places(&self) -> bool {
        self.inner.virtual_memory().is_some_and(VirtualMemory::has_old_places)
    }

    fn unmap_old_places(&self) -> Result<(), SourceError> {
        self.inner_memory()?.unmap_old_places()
    }

    unsafe fn release_addresses(&self, range: AddressRange) -> Result<(), SourceError> {
        self.script.enter(SourceCall::Unreserve)?;
        // SAFETY: as above.
        unsafe { self.inner_memory()?.release_addresses(range) }
    }
}
