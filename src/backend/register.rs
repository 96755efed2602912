//! Anonymous memory that the CUDA driver pins: huge pages, touched by many threads, then registered in one call.
//!
//! ```text
//!   mmap ──▶ MADV_HUGEPAGE ──▶ touched by N threads ──▶ cuMemHostRegister, once       17 to 27 GB/s
//!                                                       (cuMemHostAlloc:              about 2 GB/s)
//! ```
//!
//! A copy must not cross two registrations, so each region is one registration, and the source has separate regions. A
//! registration of 8 MiB blocks the enqueues of all other threads for 0.7 to 0.8 ms, so a pool with copies in flight requests
//! no more than 8 MiB per call, unless a single buffer needs more. `cuMemHostUnregister` waits for all work on the
//! device and meanwhile blocks all enqueues ([`Source::blocks_on_release`]).
#![allow(unsafe_code)] // Calls the driver.

use std::ptr::NonNull;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::huge_pages::HugeTlb;
use super::mapping;
use super::options::PinOptions;
use super::populate::one_of_several;
use super::source::{BuiltInSource, PinnedBy, Region, RegionIds, Source};
use crate::driver::calls;
use crate::driver::device::Device;
use crate::driver::vmm::attribute;
use crate::error::{Retry, SourceError};
use pinpool_os::sync::{Condvar, Mutex};

/// Flags of a registration: any context may copy from the memory, and the device has an address for the memory.
const FLAGS: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

/// Length of a slice of a reserve: while one slice is registered, other threads touch the next slice. In a C loop of the same steps
/// on an H100 machine, a reserve of 1 GiB reached 34 GB/s with slices of 64 MiB, 29 to 31 GB/s with 256 MiB, and 25 to 27 GB/s with
/// 512 MiB. Long slices are slower, because no registration runs while the first slice is touched, and no thread touches memory while
/// the last slice is registered. A reserve of 4 GiB reached 35 GB/s with slices of 128 MiB. No buffer in a reserve is longer than a
/// slice.
const SLICE_BYTES: u64 = 128 << 20;

/// Shortest time between two registrations, so that other threads' enqueues can run between them. Without this pause an enqueue
/// waits for several registrations, 5 to 9 ms.
const PAUSE: Duration = Duration::from_micros(50);

/// Anonymous memory registered with the CUDA driver, readable by all devices.
#[derive(Debug)]
pub struct RegisterSource {
    device: Arc<Device>,
    /// Requested NUMA node of the pages.
    node: Option<u32>,
    ids: RegionIds,
    threads: usize,
    hugetlb: HugeTlb,
    registering: Mutex<Registering>,
    registered: Condvar,
}

/// The state of the registrations, which the driver performs for one thread at a time.
#[derive(Debug, Default)]
struct Registering {
    is_running: bool,
    last_end: Option<Instant>,
}

impl RegisterSource {
    /// Finds the driver and the device number `ordinal`; creates nothing on it. Pages are placed on the NUMA node
    /// `node`, or on the device's node, if the machine has several.
    ///
    /// # Errors
    ///
    /// There is no driver, no such device, the driver refuses to start, or it cannot register memory here.
    pub fn new(ordinal: u32, node: Option<u32>) -> Result<Self, SourceError> {
        Self::for_pool(&PinOptions::new(ordinal, node))
    }

    /// Creates the source as [`new`](Self::new) does, for a pool with these options.
    pub(super) fn for_pool(options: &PinOptions<'_>) -> Result<Self, SourceError> {
        let device = Device::find(options.device)?;
        if device.attribute(attribute::HOST_REGISTER_SUPPORTED).is_none_or(|value| value == 0) {
            return Err(SourceError::new("cuDeviceGetAttribute", "the device does not support cuMemHostRegister"));
        }
        let node = options.node.or_else(|| device.numa_node(options.root));
        Ok(Self::on_device(device, node, options))
    }

    pub(super) fn on_device(device: Arc<Device>, node: Option<u32>, options: &PinOptions<'_>) -> Self {
        Self {
            device,
            node: node.filter(|&node| one_of_several(options.root, node)),
            ids: Default::default(),
            threads: thread::available_parallelism().map_or(1, usize::from),
            hugetlb: options.hugetlb,
            registering: Default::default(),
            registered: Default::default(),
        }
    }

    fn acquire_by(
        &self,
        len_bytes: usize,
        threads: usize,
        until: Option<Instant>,
        progress: &dyn Fn(usize),
    ) -> Result<Region, SourceError> {
        let _entered = self.device.enter()?;
        let id = self.ids.next();
        let (touch, prepare) = ((threads, self.node), |region: &Region| mapping::inherit(region, false));
        let (region, _) = self.hugetlb.acquire(len_bytes, id, touch, progress, prepare)?;
        let registered = self.register(&region, until);
        // SAFETY: mapped above, no reference into it was made, and not registered if this is an error.
        unsafe { mapping::keep_if(registered, region) }
    }

    /// Registers the memory of `region`, which did not come from this source and consists of whole pages.
    ///
    /// # Safety
    ///
    /// The pages must stay mapped until [`unregister`](Self::unregister) has returned without an error.
    pub(super) unsafe fn register_other(&self, region: &Region) -> Result<(), SourceError> {
        let _entered = self.device.enter()?;
        self.register(region, None)
    }

    /// Unregisters the memory at `start` when all device work is done. After an error the device may still access the pages.
    ///
    /// # Safety
    ///
    /// The memory at `start` must be registered by this source, and no device may use it.
    pub(super) unsafe fn unregister(&self, start: NonNull<u8>) -> Result<(), SourceError> {
        let _entered = self.device.enter()?;
        // SAFETY: the caller's promise.
        Ok(unsafe { calls::host_unregister(start.as_ptr().cast()) }?)
    }

    fn register(&self, region: &Region, until: Option<Instant>) -> Result<(), SourceError> {
        let bytes = mapping::mapped_bytes(region.len_bytes())?;
        let mut state = self.registering.lock();
        while state.is_running {
            if until.is_some_and(|until| Instant::now() >= until) {
                let what = "another thread is registering memory, and the driver registers for one at a time";
                let remedy = "wait longer (PINPOOL_WAIT), or register memory before it is needed (PINPOOL_RESERVE)";
                let refused = SourceError::new("cuMemHostRegister", what).with_remedy(remedy);
                return Err(refused.with_retry(Retry::Soon));
            }
            state = match until {
                Some(until) => self.registered.wait_until(state, until).0,
                None => self.registered.wait(state),
            };
        }
        state.is_running = true;
        let pause = state.last_end.and_then(|last_end| PAUSE.checked_sub(last_end.elapsed()));
        drop(state);
        if let Some(pause) = pause {
            thread::sleep(pause);
        }
        // SAFETY: whole pages, mapped by this source or as the caller of `register_other` promises; a context is current.
        let registered = unsafe { calls::host_register(region.start().as_ptr().cast(), bytes, FLAGS) };
        *self.registering.lock() = Registering { is_running: false, last_end: Some(Instant::now()) };
        self.registered.notify_one();
        Ok(registered?)
    }
}

// SAFETY: source-C1: an anonymous mapping, unmapped only after the driver released it. source-C2: fresh pages are zero
// (`populate`). source-C3 holds for every mapping. source-C4: `RegionIds`. source-C5: whole pages, as mapped.
unsafe impl Source for RegisterSource {
    fn name(&self) -> &'static str {
        "register"
    }

    fn pinned_by(&self) -> Option<PinnedBy> {
        Some(PinnedBy::Driver)
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        self.acquire_by(len_bytes, self.threads, None, &|_| {})
    }

    unsafe fn release(&self, region: &Region) -> Result<(), SourceError> {
        // After an error the device may still access the pages, so they stay mapped.
        // SAFETY: the caller's promise: registered by `acquire`, and unused by every device.
        unsafe { self.unregister(region.start()) }?;
        // SAFETY: it came from `acquire`, is unused, and the driver released it above.
        unsafe { mapping::unmap(region) }
    }

    fn blocks_on_release(&self) -> bool {
        true
    }

    fn numa_node(&self) -> Option<u32> {
        self.node
    }

    fn built_in(&self) -> Option<&dyn BuiltInSource> {
        Some(self)
    }
}

impl BuiltInSource for RegisterSource {
    fn acquire_until(&self, len_bytes: usize, until: Instant) -> Result<Region, SourceError> {
        self.acquire_by(len_bytes, self.threads, Some(until), &|_| {})
    }

    fn acquire_bulk(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        self.acquire_by(len_bytes, threads, None, progress)
    }

    fn reserve_slice_bytes(&self) -> Option<u64> {
        Some(SLICE_BYTES.max(self.hugetlb.page_bytes().unwrap_or(0)))
    }

    fn device_lost(&self) -> Option<SourceError> {
        self.device.loss()
    }
}
