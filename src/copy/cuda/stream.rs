//! Streams as the driver and cudarc know them: names, captures, and errors that others left behind.
//!
//! | name | made of | when another stream may have it |
//! | --- | --- | --- |
//! | [`number`] | its handle, an address | once it is destroyed, also while its work is still running |
//! | [`id`] | `cuStreamGetId` and the context | never, as long as the process runs |
//!
//! Statistics show the number. Code that reuses memory because two copies are on the same stream compares ids, and treats
//! an unknown id as another stream: drivers before CUDA 12.0 have none. The function is found by name, since the bindings
//! may be older than the driver.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use crate::driver;
use crate::in_flight::StreamId;
use pinpool_os::sync::process::{AtomicU64, Ordering};

/// Handles that stand for a stream of the calling context or thread, instead of naming one.
const LEGACY_DEFAULT: usize = 1;
const PER_THREAD: usize = 2;
/// Set in the numbers of per-thread streams; no address has it.
const PER_THREAD_BIT: u64 = 1 << 63;

pub(super) const CAPTURING: &str = "the stream is capturing a graph, and each launch would use the buffer again after it \
                                    was recycled; copy before the capture begins or after it ends, or on a stream that \
                                    does not take part in it";

/// The type of `cuStreamGetId` in the driver's header.
type GetId = unsafe extern "C" fn(sys::CUstream, *mut u64) -> c_int;

/// The stream's number in statistics and log lines. Handles and contexts are addresses, far above the numbers of host
/// sinks, which count from one.
pub(super) fn number(stream: &CudaStream) -> u64 {
    std::thread_local! {
        static THREAD: u64 = {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            // Relaxed: the only requirement is that no number is given out twice.
            NEXT.fetch_add(1, Ordering::Relaxed)
        };
    }
    match stream.cu_stream().addr() {
        // One in each context.
        0 | LEGACY_DEFAULT => stream.context().cu_ctx().addr() as u64,
        // One in each context and thread.
        PER_THREAD => PER_THREAD_BIT | THREAD.with(|thread| thread << 8) | (stream.context().ordinal() as u64 & 0xFF),
        handle => handle as u64,
    }
}

/// The stream's identity. Queried each time, since a handle may be another stream's by now. `family` stands for
/// the context. The context is current, and the stream does not capture: the driver would refuse.
pub(super) fn id(stream: &CudaStream, family: usize) -> Option<StreamId> {
    static GET_ID: OnceLock<Option<GetId>> = OnceLock::new();
    let get_id = (*GET_ID.get_or_init(|| {
        let found = driver::symbol(c"cuStreamGetId")?;
        // SAFETY: the driver's function of this name has this type.
        Some(unsafe { std::mem::transmute::<NonNull<c_void>, GetId>(found) })
    }))?;
    let mut id = 0;
    // What the driver refuses once it may do the next time.
    let is_known = (0..2).any(|_| {
        // SAFETY: a live stream, and memory for a number.
        unsafe { get_id(stream.cu_stream(), &raw mut id) == 0 }
    });
    is_known.then(|| StreamId::of_driver(family, id))
}

pub(super) fn is_capturing(stream: &CudaStream) -> Result<bool, DriverError> {
    // SAFETY: the stream is alive.
    let status = unsafe { result::stream::is_capturing(stream.cu_stream()) }?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// An error that earlier calls left in the context object, kept aside until this is dropped.
///
/// cudarc keeps one error per context object for calls that cannot return one, and the next call of its safe layer returns
/// it, in any part of the program. Left there, it would make device memory skip its wait for earlier work, and the record
/// of ours.
pub(super) struct SetAside<'a> {
    context: &'a CudaContext,
    error: Result<(), DriverError>,
}

impl<'a> SetAside<'a> {
    pub(super) fn take(context: &'a CudaContext) -> Self {
        Self { context, error: context.check_err() }
    }
}

impl Drop for SetAside<'_> {
    fn drop(&mut self) {
        if self.error.is_err() {
            self.context.record_err(self.error);
        }
    }
}

/// The text of an error of the driver.
pub(super) fn failed(call: &str, error: DriverError) -> String {
    format!("{call} failed: {} (code {})", driver::error_name(error), driver::error_code(error))
}
