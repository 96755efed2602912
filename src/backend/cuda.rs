//! Memory that the CUDA driver page-locks: `cuMemHostAlloc`, portable (every context may copy from it) and cached.
//!
//! Not write-combined: that gains nothing for copies, and reading it back on the host is ruinous. The driver is looked
//! for at run time, and the device's primary context is retained at the first acquire, not before: making a pool creates
//! no context.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::OnceLock;

use cudarc::driver::{DriverError, result, sys};

use super::pages::Numbering;
use super::{Region, Source, SourceError};

/// Memory page-locked by the CUDA driver for one device, readable by all.
#[derive(Debug)]
pub(crate) struct CudaSource {
    device: sys::CUdevice,
    context: OnceLock<Result<Context, SourceError>>,
    numbering: Numbering,
}

/// The device's primary context, retained for the life of the process: memory of a pool may outlive the pool, when a
/// copy from it never ends.
#[derive(Debug, Clone, Copy)]
struct Context(sys::CUcontext);

// SAFETY: a context handle may be used from any thread (CUDA driver API, context management).
unsafe impl Send for Context {}
// SAFETY: as above; the handle itself is never written to.
unsafe impl Sync for Context {}

impl CudaSource {
    /// Looks for a driver and the device number `ordinal`; creates nothing on it.
    pub(crate) fn probe(ordinal: u32) -> Result<Self, SourceError> {
        if !driver_is_present() {
            return Err(SourceError::new("dlopen", "no CUDA driver (libcuda.so.1) on this machine"));
        }
        result::init().map_err(|error| driver_said("cuInit", error))?;
        let devices = result::device::get_count().map_err(|error| driver_said("cuDeviceGetCount", error))?;
        let ordinal = i32::try_from(ordinal).ok().filter(|&ordinal| ordinal < devices).ok_or_else(|| {
            SourceError::new("cuDeviceGet", format!("no device {ordinal}, the driver sees {devices}"))
                .with_remedy("set PINPOOL_DEVICE, or look at CUDA_VISIBLE_DEVICES")
        })?;
        let device = result::device::get(ordinal).map_err(|error| driver_said("cuDeviceGet", error))?;
        Ok(Self { device, context: OnceLock::new(), numbering: Numbering::default() })
    }

    /// Makes the device's context current on this thread.
    fn bind(&self) -> Result<(), SourceError> {
        let retained = self.context.get_or_init(|| {
            // SAFETY: `device` came from the driver in `probe`.
            unsafe { result::primary_ctx::retain(self.device) }
                .map(Context)
                .map_err(|error| driver_said("cuDevicePrimaryCtxRetain", error))
        });
        let context = retained.clone()?;
        // SAFETY: the context is retained and never released.
        unsafe { result::ctx::set_current(context.0) }.map_err(|error| driver_said("cuCtxSetCurrent", error))
    }
}

// SAFETY: C1: `cuMemHostAlloc` maps page-locked memory at a fixed address until `cuMemFreeHost`, and a failed free leaves
// it. C2: zeroed below. C3: checked below. C4: `Numbering`.
unsafe impl Source for CudaSource {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn is_pinned(&self) -> bool {
        true
    }

    fn acquire(&self, len_bytes: usize) -> Result<Region, SourceError> {
        self.bind()?;
        // Whole pages, so that no two regions share one, as the granularity that is counted says.
        let held_bytes = self.held_bytes(len_bytes);
        // SAFETY: a context is current on this thread (`bind`).
        let start = unsafe { result::malloc_host(held_bytes, sys::CU_MEMHOSTALLOC_PORTABLE) }.map_err(|error| {
            driver_said("cuMemHostAlloc", error).with_remedy(
                "the host is short of memory that can be pinned: lower PINPOOL_MAX_BYTES or PINPOOL_POOL_SIZE_LIMIT",
            )
        })?;
        let start = NonNull::new(start.cast::<u8>())
            .filter(|start| start.as_ptr().addr().is_multiple_of(super::PAGE_BYTES))
            .ok_or_else(|| SourceError::new("cuMemHostAlloc", "the driver returned no page-aligned address"))?;
        // SAFETY: the driver just gave these bytes to us alone.
        unsafe { start.write_bytes(0, len_bytes) };
        Ok(Region::new(start, len_bytes, self.numbering.next()))
    }

    unsafe fn release(&self, region: Region) -> Result<(), SourceError> {
        self.bind()?;
        // SAFETY: the caller's promise: allocated by `acquire`, not freed, and read by no device.
        unsafe { result::free_host(region.start().as_ptr().cast()) }
            .map_err(|error| driver_said("cuMemFreeHost", error))
    }

    fn needs_gpu(&self) -> bool {
        true
    }

    fn release_waits(&self) -> bool {
        true
    }
}

/// Never panics, unlike cudarc's first call without a driver; unlike its own check it exists under every linking feature.
fn driver_is_present() -> bool {
    [c"libcuda.so", c"libcuda.so.1"].into_iter().any(is_loadable)
}

fn is_loadable(library: &CStr) -> bool {
    // SAFETY: loading the driver runs its initialisers, as the first CUDA call of any program does.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return false;
    }
    // SAFETY: the handle was just opened.
    unsafe { libc::dlclose(handle) };
    true
}

/// The driver's error by its number and name, without the text that cudarc would fetch from a library that may be gone.
fn driver_said(call: &'static str, error: DriverError) -> SourceError {
    SourceError::new(call, format!("{:?}", error.0)).with_code(i64::from(error.0 as u32))
}
