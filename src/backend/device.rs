//! One device of the CUDA driver, for the sources that pin through it.
//!
//! The device's primary context is retained when memory is first asked for, not before: making a source creates no
//! context. It stays retained for the life of the process, since memory of a pool may outlive the pool, when a copy from
//! it never ends. A thread's own current context is left as it was found.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::{CStr, c_char, c_int};
use std::path::Path;
use std::sync::OnceLock;

use cudarc::driver::{DriverError, result, sys};

use super::SourceError;
use crate::driver::{self, Current};
use crate::host;

/// Room for an id on the PCI bus: domain, bus, device, function.
const PCI_ID_BYTES: usize = 32;

/// What to do when the driver cannot pin more.
pub(super) const SHORT_OF_MEMORY: &str =
    "the host is short of memory that can be pinned: lower PINPOOL_MAX_BYTES, or raise its cgroup's limit";

/// A device that the driver sees.
#[derive(Debug)]
pub(super) struct Device {
    handle: sys::CUdevice,
    context: OnceLock<Context>,
}

#[derive(Debug, Clone, Copy)]
struct Context(sys::CUcontext);

// SAFETY: a context handle may be used from any thread (CUDA driver API, context management).
unsafe impl Send for Context {}
// SAFETY: as above; the handle itself is never written to.
unsafe impl Sync for Context {}

impl Device {
    /// Looks for a driver and the device number `ordinal`; creates nothing on it.
    pub(super) fn find(ordinal: u32) -> Result<Self, SourceError> {
        if !driver::is_present() {
            return Err(SourceError::new("dlopen", "no CUDA driver (libcuda.so.1) on this machine"));
        }
        result::init().map_err(|error| driver_said("cuInit", error))?;
        let devices = count()?;
        let ordinal = i32::try_from(ordinal).ok().filter(|&ordinal| ordinal < devices).ok_or_else(|| {
            SourceError::new("cuDeviceGet", format!("no device {ordinal}, the driver sees {devices}"))
                .with_remedy("set PINPOOL_DEVICE, or look at CUDA_VISIBLE_DEVICES")
        })?;
        let handle = result::device::get(ordinal).map_err(|error| driver_said("cuDeviceGet", error))?;
        Ok(Self { handle, context: OnceLock::new() })
    }

    /// Makes the device's context current on this thread for as long as the answer lives.
    pub(super) fn bind(&self) -> Result<Current, SourceError> {
        let context = match self.context.get() {
            Some(&context) => context,
            // A failure is not remembered: a device short of memory now may have some later. Threads that come here at
            // once retain more than once, which only counts, since the context is never released.
            None => {
                // SAFETY: the handle came from the driver in `find`.
                let retained = unsafe { result::primary_ctx::retain(self.handle) };
                let retained = retained.map_err(|error| driver_said("cuDevicePrimaryCtxRetain", error))?;
                *self.context.get_or_init(|| Context(retained))
            }
        };
        // SAFETY: the context is retained and never released.
        unsafe { Current::enter(context.0) }.map_err(|error| driver_said("cuCtxSetCurrent", error))
    }

    /// An attribute by its number in the driver's header; `None` where the driver does not know it.
    pub(super) fn attribute(&self, number: c_int) -> Option<c_int> {
        attribute_of(self.handle, number)
    }

    /// The memory node that the device is nearest to; `None` where there is only one, or nobody says.
    pub(super) fn numa_node(&self) -> Option<u32> {
        let mut room: [c_char; PCI_ID_BYTES] = [0; PCI_ID_BYTES];
        let room_bytes = c_int::try_from(PCI_ID_BYTES).ok()?;
        // SAFETY: room for as many bytes as said; the driver ends them with a 0.
        unsafe { sys::cuDeviceGetPCIBusId(room.as_mut_ptr(), room_bytes, self.handle) }.result().ok()?;
        // SAFETY: ended with a 0 by the driver, within the room.
        let id = unsafe { CStr::from_ptr(room.as_ptr()) };
        host::numa_node_of_pci(Path::new("/"), id.to_str().ok()?)
    }
}

/// Ordinals of all devices that have an attribute.
pub(super) fn all_with(attribute: c_int) -> Result<Vec<c_int>, SourceError> {
    let has_it = |ordinal: &c_int| {
        result::device::get(*ordinal)
            .is_ok_and(|handle| attribute_of(handle, attribute).is_some_and(|value| value != 0))
    };
    Ok((0..count()?).filter(has_it).collect())
}

fn count() -> Result<c_int, SourceError> {
    result::device::get_count().map_err(|error| driver_said("cuDeviceGetCount", error))
}

/// Past cudarc, whose enumeration of attributes depends on the CUDA version of the build.
fn attribute_of(device: sys::CUdevice, number: c_int) -> Option<c_int> {
    type GetAttribute = unsafe extern "C" fn(*mut c_int, c_int, sys::CUdevice) -> c_int;
    let found = driver::symbol(c"cuDeviceGetAttribute")?;
    // SAFETY: the driver exports this name with these arguments, and is never unloaded.
    let get = unsafe { std::mem::transmute::<*mut std::ffi::c_void, GetAttribute>(found.as_ptr()) };
    let mut value = 0;
    // SAFETY: room for one number; an attribute or a device that the driver does not know is refused.
    (unsafe { get(&raw mut value, number, device) } == 0).then_some(value)
}

/// As [`driver_said`], of a call that pins.
pub(super) fn pinning_said(call: &'static str, error: DriverError) -> SourceError {
    let said = driver_said(call, error);
    match error.0 {
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => said.with_remedy(SHORT_OF_MEMORY),
        _ => said,
    }
}

pub(super) fn driver_said(call: &'static str, error: DriverError) -> SourceError {
    SourceError::new(call, driver::words(error)).with_code(driver::code(error))
}
