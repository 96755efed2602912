//! Streams as the driver and cudarc know them: handles, ids, captures, and errors that others left behind.
//!
//! Once a stream is destroyed, its handle may belong to another stream, even while work of the first is still running. An
//! [id](id_number) never belongs to another stream. So code that reuses memory because two copies are on the same stream compares
//! ids, and treats an unknown id as another stream: drivers before CUDA 12.0 have no ids.
#![allow(unsafe_code)] // Calls the driver.

use std::thread;

use cudarc::driver::{CudaContext, DriverError, sys};

use crate::driver::code::FailedCall;
use crate::driver::{Handle, calls};
use crate::in_flight::WorkId;

/// The handle of the per-thread default stream, the largest handle of a default stream.
const PER_THREAD: usize = 2;
/// The handle of the legacy default stream, which null denotes as well.
const LEGACY: usize = 1;

/// Returns whether this is the handle of a default stream: null, legacy (1) or per-thread (2).
pub(super) fn is_default(handle: usize) -> bool {
    handle <= PER_THREAD
}

/// Returns the identity of a stream or event handle on this thread, with the current context. If no context is current, it is
/// unknown which default stream is meant. The identity then contains the thread, which can repeat the call with the context.
pub(crate) fn work_id(handle: usize) -> WorkId {
    if !is_default(handle) {
        return WorkId { handle, context: 0, thread: None };
    }
    let context = calls::current_context().map_or(0, |context| context.addr());
    let thread = (handle == PER_THREAD || context == 0).then(|| thread::current().id());
    WorkId { handle: handle.max(LEGACY), context, thread }
}

/// A stream that pinpool created. It does not synchronize with the legacy default stream.
pub(super) type OwnStream = Handle<sys::CUstream_st>;

impl OwnStream {
    /// Creates a stream in the current context.
    pub(super) fn new() -> Result<Self, FailedCall> {
        calls::stream_create(calls::CU_STREAM_NON_BLOCKING).map(Self)
    }
}

/// Returns the number of the stream's identity, which is unique for the life of the process. The driver is queried each time,
/// since the handle may belong to another stream by now. The stream is not a default stream, or its context is current.
pub(super) fn id_number(stream: sys::CUstream) -> Result<u64, FailedCall> {
    let mut id = 0;
    // SAFETY: a live stream, and memory for a number.
    unsafe { calls::stream_id(stream, &raw mut id) }.map(|()| id)
}

/// An error that earlier calls left in the context object. It is set aside until this value is dropped, and then restored.
///
/// cudarc keeps one error per context object for calls that cannot return one, and the next call to its safe layer
/// returns it, in any part of the program. If the error stayed in the object, device memory would not wait for its
/// earlier work, and would not record the use by this copy.
pub(super) struct SavedError<'a> {
    context: &'a CudaContext,
    error: Result<(), DriverError>,
}

impl<'a> SavedError<'a> {
    pub(super) fn take(context: &'a CudaContext) -> Self {
        Self { context, error: context.check_err() }
    }
}

impl Drop for SavedError<'_> {
    fn drop(&mut self) {
        if self.error.is_err() {
            self.context.record_err(self.error);
        }
    }
}
