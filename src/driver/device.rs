//! A device of the CUDA driver, for the sources that pin memory through the driver. This module assumes that a `CUdevice` equals its
//! ordinal, since drivers number devices from 0 in list order.
//!
//! The device's primary context is retained by the first [`enter`](Device::enter), not before: finding a device creates no
//! context. It stays retained until the process ends, since a copy that never completes keeps memory of a pool alive after
//! the pool. A thread's own current context is restored after each use.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::{CStr, c_char, c_int};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use super::code::{Code, FailedCall};
use super::{Context, CurrentContext, RelaxedCapture, calls, watchdog};
use crate::error::SourceError;
use pinpool_os::fork::PerProcess;
use pinpool_os::host;
use pinpool_os::sync::unmodeled::Mutex;

/// Buffer length for a PCI bus ID: domain, bus, device and function.
const PCI_ID_BYTES: usize = 32;

/// The devices that this process has found. Each keeps one reference to its primary context.
static DEVICES: PerProcess<Mutex<Vec<Arc<Device>>>> = PerProcess::new(Mutex::default);

/// A device that the driver lists.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: u32,
    handle: sys::CUdevice,
    /// The primary context.
    context: OnceLock<Context>,
}

impl Device {
    /// Returns the device with this ordinal: the object that an earlier call found, or a new object after a reset of the device,
    /// since the pools of the old object have lost their memory. Creates nothing on the device.
    pub(crate) fn find(ordinal: u32) -> Result<Arc<Self>, SourceError> {
        if !super::is_present() {
            return Err(SourceError::new("dlopen", "no CUDA driver (libcuda.so.1) on this machine"));
        }
        super::state::init().map_err(|(what, code)| SourceError::new("cuInit", what).with_code(code.number()))?;
        let devices = calls::device_count()?;
        let number = i32::try_from(ordinal).ok().filter(|&number| number < devices).ok_or_else(|| {
            SourceError::new("cuDeviceGet", format!("no device {ordinal}, the driver sees {devices}"))
                .with_remedy("set PINPOOL_DEVICE, or check CUDA_VISIBLE_DEVICES")
        })?;
        let handle = calls::device(number)?;
        // Concurrent threads may each add an object for the device; later calls find the last one.
        let known = DEVICES.get().lock().iter().rev().find(|device| device.ordinal == ordinal).cloned();
        let known = known.filter(|device| device.context.get().is_none_or(|context| context.check().is_ok()));
        Ok(known.unwrap_or_else(|| {
            let device = Arc::new(Self { ordinal, handle, context: OnceLock::new() });
            DEVICES.get().lock().push(device.clone());
            device
        }))
    }

    /// Sets the state that driver calls need, until the result is dropped: a relaxed capture mode, and the device's primary context
    /// as the current context of this thread. The first call retains the context.
    pub(crate) fn enter(&self) -> Result<(CurrentContext, RelaxedCapture), SourceError> {
        let relaxed = RelaxedCapture::enter();
        let context = match self.context.get() {
            Some(&context) => context,
            // A failure is not stored, because a device that is out of memory now may have free memory later.
            None => {
                let context = Context::new(calls::primary_retain(self.handle)?);
                // If the context is unusable or another thread has stored it first, this reference is not needed.
                if !context.is_ok_and(|context| self.context.set(context).is_ok()) {
                    // SAFETY: taken above, released once.
                    let _released = unsafe { calls::release_primary(self.handle) };
                }
                context?
            }
        };
        let refused = |error| match error {
            FailedCall { code: Code::CONTEXT_IS_DESTROYED, .. } => was_reset(),
            failed => failed.into(),
        };
        // SAFETY: the context is retained and never released.
        unsafe { context.enter() }.map(|current| (current, relaxed)).map_err(refused)
    }

    /// Returns the error with which every later call fails, if a reset of the device has ended the context, and the memory with it.
    /// Returns `None` if there was no reset, or if the driver does not answer.
    pub(crate) fn loss(&self) -> Option<SourceError> {
        let context = self.context.get()?;
        let has_ended =
            watchdog::query(|| matches!(context.check(), Err(FailedCall { code: Code::CONTEXT_IS_DESTROYED, .. })));
        has_ended.unwrap_or(false).then(was_reset)
    }

    /// Sets the state as [`enter`](Self::enter) does if the device already has a context; otherwise sets only the capture mode,
    /// and creates no context.
    pub(crate) fn enter_if_active(&self) -> Result<(CurrentContext, RelaxedCapture), SourceError> {
        if self.is_active() { self.enter() } else { Ok((CurrentContext::unchanged(), RelaxedCapture::enter())) }
    }

    /// Returns whether the device has a primary context in this process, so that entering it creates nothing.
    pub(crate) fn is_active(&self) -> bool {
        self.context.get().is_some() || calls::is_primary_active(self.handle).is_ok_and(|is_active| is_active)
    }

    /// Returns the attribute with this number in the driver's header; `None` if the driver does not know it.
    pub(crate) fn attribute(&self, number: c_int) -> Option<c_int> {
        calls::device_attribute(number, self.handle).ok()
    }

    /// Returns the NUMA node nearest to the device on the machine below `root`; `None` if there is only one node, or the nearest node
    /// is unknown.
    pub(crate) fn numa_node(&self, root: &Path) -> Option<u32> {
        let mut buffer: [c_char; PCI_ID_BYTES] = [0; PCI_ID_BYTES];
        let buffer_bytes = c_int::try_from(PCI_ID_BYTES).ok()?;
        // SAFETY: the buffer has the length passed; the driver writes a terminating 0.
        unsafe { calls::pci_bus_id(buffer.as_mut_ptr(), buffer_bytes, self.handle) }.ok()?;
        // SAFETY: terminated by the driver, within the buffer.
        host::numa_node_of_pci(root, unsafe { CStr::from_ptr(buffer.as_ptr()) }.to_str().ok()?)
    }
}

fn was_reset() -> SourceError {
    let what = "the device was reset since this pool pinned memory, and its context with that memory is gone";
    let error = SourceError::new("cuCtxGetId", what).with_code(Code::CONTEXT_IS_DESTROYED.number());
    error.with_remedy("build a new pool after a reset of the device")
}

/// Returns the device that this process uses, as far as the driver reports it: the device of the context that is current on
/// this thread, else `preferred` if it has a primary context, else the first device that has one. Loads and starts no driver, and
/// creates no context.
pub(crate) fn in_use(preferred: Option<u32>) -> Option<u32> {
    if !super::is_loaded() {
        return None;
    }
    // The driver refuses this call if it has not been started, or if no context is current.
    if let Ok(current) = calls::current_device() {
        return u32::try_from(current).ok();
    }
    let devices = calls::device_count().ok().and_then(|count| u32::try_from(count).ok())?;
    preferred.into_iter().chain(0..devices).find(|&device| calls::is_primary_active(device.cast_signed()) == Ok(true))
}
