//! A cudarc context object in addition to the user's, for the same driver context. cudarc records an event only if the context
//! object of its *stream* manages several streams and holds no error. Both are true of this object, whatever the user's object
//! does.
//!
//! This object is created and used through cudarc, because lending a slice to cudarc requires cudarc objects. So its calls return
//! cudarc's error type.
#![allow(unsafe_code)] // Makes an object for a context that other code owns.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdevice};
use cudarc::driver::{CudaContext, CudaStream};

use crate::driver::calls;
use crate::driver::code::FailedCall;
use pinpool_os::leaked;

/// The object. If the context is primary, the object holds a reference to it, so that no failure while the object is created can
/// destroy the user's context.
pub(super) struct OwnContext {
    /// Never dropped: that would destroy the user's context.
    pub(super) context: ManuallyDrop<Arc<CudaContext>>,
    /// A second stream, so that cudarc manages several streams. No work ever runs on it.
    _second_stream: Arc<CudaStream>,
}

impl OwnContext {
    /// Creates the object. Leaves the context current.
    ///
    /// # Safety
    ///
    /// The context must be alive, of this device and current.
    pub(super) unsafe fn new(device: CUdevice, handle: CUcontext) -> Result<Self, FailedCall> {
        // SAFETY: the caller's promise; the object is never dropped, except as below.
        let (context, is_primary) = unsafe { object_of(device, handle) }?;
        let context = ManuallyDrop::new(context);
        // cudarc waits for the whole device when it creates the first stream of a context that tracks events, so tracking is off
        // meanwhile.
        // SAFETY: no device memory is ever allocated through this object, so none lacks its events.
        unsafe { context.disable_event_tracking() };
        let stream = match context.new_stream() {
            Ok(stream) => stream,
            // A dropped object releases the primary context, which it retained. For any other context, the drop would destroy the
            // context.
            Err(error) if is_primary => {
                drop(ManuallyDrop::into_inner(context));
                return Err(error.into());
            }
            Err(error) => {
                leaked::leak(context);
                return Err(error.into());
            }
        };
        // SAFETY: as above.
        unsafe { context.enable_event_tracking() };
        Ok(Self { context, _second_stream: stream })
    }
}

/// Returns a cudarc context object for `handle`, and whether `handle` is the device's primary context. If it is, the object holds
/// a reference to the context.
///
/// # Safety
///
/// The context must be alive, of this device and current. Unless the context is primary, the object must never be dropped, because
/// that would destroy the context.
unsafe fn object_of(device: CUdevice, handle: CUcontext) -> Result<(Arc<CudaContext>, bool), FailedCall> {
    // A `CUdevice` is the ordinal, in every driver so far; it is never negative.
    let ordinal = usize::try_from(device).unwrap_or_default();
    // An error does not count as inactive. Otherwise the primary context would get an object that must never be dropped.
    let primary = if calls::is_primary_active(device)? { Some(CudaContext::new(ordinal)?) } else { None };
    if let Some(primary) = primary.filter(|primary| primary.cu_ctx() == handle) {
        return Ok((primary, true));
    }
    // SAFETY: the caller's promise. An error of this call would drop the object and destroy the context. But the call fails only
    // if the context cannot be made current (it is current already) or if the device has no attributes.
    let context = unsafe { CudaContext::from_raw_context(ordinal, device, handle) }?;
    Ok((context, false))
}
