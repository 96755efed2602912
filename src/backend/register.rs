//! Memory of our own that the CUDA driver page-locks: huge pages, touched by many threads, then registered in one call.
//!
//! ```text
//!   mmap ──▶ MADV_HUGEPAGE ──▶ touched by N threads ──▶ cuMemHostRegister, once       28 to 35 GB/s
//!                                                       (cuMemHostAlloc:             2.5 to 3 GB/s)
//! ```
//!
//! A copy must not span two registrations, so each region is one, and the source has walls. While it registers, the driver
//! holds up every other thread's enqueues: 0.5 ms for 8 MiB, which is why a pool that has copies in flight asks for no more
//! at once unless a single buffer needs it. `cuMemHostUnregister` waits for all work of the device and holds everybody up
//! meanwhile ([`Source::release_waits`]).
#![allow(unsafe_code)] // Calls the driver.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::device::{Device, driver_said, pinning_said};
use super::pages::{self, Numbering};
use super::placement::Placement;
use super::populate::populate;
use super::{Region, Source, SourceError};
use crate::driver::Relaxed;
use crate::driver::virtual_memory::attribute;
use crate::sync::Mutex;

/// Any context may copy from it, and the device sees it at an address.
const FLAGS: u32 = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;

/// Between two registrations: without it other threads' enqueues never come in between, and wait for 5 to 9 ms; with it for
/// 0.45 ms at most.
const PAUSE: Duration = Duration::from_micros(50);

/// Anonymous memory registered with the CUDA driver, readable by all devices.
#[derive(Debug)]
pub struct RegisterSource {
    device: Arc<Device>,
    placement: Option<Placement>,
    numbering: Numbering,
    threads: usize,
    /// When the last registration was over. Held while one is made: the driver makes one at a time, too.
    last: Mutex<Option<Instant>>,
}

impl RegisterSource {
    /// Looks for a driver and the device number `ordinal`; creates nothing on it. Pages are placed on the memory node
    /// `node`, else on the device's, where the machine has several.
    ///
    /// # Errors
    ///
    /// There is no driver, no such device, the driver refuses to start, or it registers no memory here.
    pub fn new(ordinal: u32, node: Option<u32>) -> Result<Self, SourceError> {
        let device = Device::find(ordinal)?;
        if device.attribute(attribute::REGISTERS_HOST_MEMORY).is_none_or(|value| value == 0) {
            return Err(SourceError::new("cuDeviceGetAttribute", "the device registers no host memory"));
        }
        let node = node.or_else(|| device.numa_node());
        Ok(Self::of(Arc::new(device), node))
    }

    pub(super) fn of(device: Arc<Device>, node: Option<u32>) -> Self {
        let placement = node.and_then(|node| Placement::on(Path::new("/"), node));
        let threads = thread::available_parallelism().map_or(1, usize::from);
        Self { device, placement, numbering: Numbering::default(), threads, last: Mutex::default() }
    }

    /// So many threads at once touch what is acquired; as many as there are cores, if nothing is said.
    pub(super) fn touched_by(self, threads: usize) -> Self {
        Self { threads, ..self }
    }

    fn register(&self, region: &Region) -> Result<(), SourceError> {
        let bytes = pages::mapped_bytes(region.len_bytes())?;
        let mut last = self.last.lock();
        if let Some(pause) = last.and_then(|last| PAUSE.checked_sub(last.elapsed())) {
            thread::sleep(pause);
        }
        // SAFETY: whole pages, mapped and ours; a context is current on this thread.
        let registered = unsafe { sys::cuMemHostRegister_v2(region.start().as_ptr().cast(), bytes, FLAGS) };
        *last = Some(Instant::now());
        registered.result().map_err(|error| pinning_said("cuMemHostRegister", error))
    }
}

// SAFETY: C1: an anonymous mapping, unmapped only after the driver gave it up. C2: fresh pages are zero (`populate`). C3: as
// for any mapping. C4: `Numbering`. C5: whole pages, as mapped.
unsafe impl Source for RegisterSource {
    fn name(&self) -> &'static str {
        "register"
    }

    fn is_pinned(&self) -> bool {
        true
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        self.acquire_fast(len_bytes, self.threads, &|_| {})
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        let _relaxed = Relaxed::enter();
        let _current = self.device.bind()?;
        // SAFETY: the caller's promise: registered by `acquire`, and read by no device.
        let unregistered = unsafe { sys::cuMemHostUnregister(region.start().as_ptr().cast()) };
        // On a refusal the device may still see the pages: they stay mapped.
        unregistered.result().map_err(|error| driver_said("cuMemHostUnregister", error))?;
        // SAFETY: of `map_huge`, unused, and no driver knows of it any more.
        unsafe { pages::unmap(region) }
    }

    fn acquire_fast(&self, len_bytes: usize, threads: usize, progress: &dyn Fn(usize)) -> Result<Region, SourceError> {
        let _relaxed = Relaxed::enter();
        let _current = self.device.bind()?;
        let region = pages::map_huge(len_bytes, self.numbering.next())?;
        let ready = pages::keep_from_children(&region)
            // SAFETY: mapped above, no reference into it was made.
            .and_then(|()| unsafe { populate(&region, threads, self.placement.as_ref(), progress) })
            .and_then(|()| self.register(&region));
        // SAFETY: as above, and not registered if that was refused.
        unsafe { pages::keep_if(ready, region) }
    }

    fn needs_gpu(&self) -> bool {
        true
    }

    fn release_waits(&self) -> bool {
        true
    }

    fn numa_node(&self) -> Option<u32> {
        self.placement.as_ref().map(Placement::node)
    }
}
