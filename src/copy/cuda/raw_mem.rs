//! Device memory by its address, with a stream of cudarc or by its handle.
#![allow(unsafe_code)] // Calls the driver.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop, sys};

use super::handle::stream_of;
use super::raw_stream::RawStream;
use super::{copy_behind, let_reach, refused};
use crate::copy::{CopyFailure, CopySource, CopyTarget};
use crate::driver::calls;
use crate::driver::code::Code;
use crate::error::Error;
use crate::in_flight::{FenceKind, SharedFence};

/// Device memory of another framework, for copies from and to it. Owns nothing and orders nothing: its owner does.
///
/// ```no_run
/// use pinpool::{Pool, copy::cuda::{RawMem, RawStream}};
///
/// /// A framework's stream, and 4096 bytes of its memory.
/// fn send(pool: &Pool, stream: *mut std::ffi::c_void, address: u64) -> pinpool::Result<()> {
///     // SAFETY: the framework keeps the stream alive until the copy is over.
///     let stream = unsafe { RawStream::new(stream) };
///     // SAFETY: and the memory.
///     let mut memory = unsafe { RawMem::from_raw(address, 4096, stream) };
///     pool.get(4096)?.copy_to(&stream, &mut memory)?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct RawMem<S = Arc<CudaStream>> {
    address: sys::CUdeviceptr,
    len: usize,
    stream: S,
}

impl<S> RawMem<S> {
    /// `len` bytes at `address` of the device of `stream`, which is a stream of cudarc or a [`RawStream`]; copies go on such
    /// streams.
    ///
    /// # Safety
    ///
    /// The bytes stay allocated until every copy made through this is over, and all other uses of them are ordered with
    /// those copies.
    pub unsafe fn from_raw(address: u64, len: usize, stream: S) -> Self {
        Self { address, len, stream }
    }
}

impl DeviceSlice<u8> for RawMem {
    fn len(&self) -> usize {
        self.len
    }

    fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl DevicePtr<u8> for RawMem {
    fn device_ptr<'a>(&'a self, _stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Record(None))
    }
}

impl DevicePtrMut<u8> for RawMem {
    fn device_ptr_mut<'a>(&'a mut self, _stream: &'a CudaStream) -> (sys::CUdeviceptr, SyncOnDrop<'a>) {
        (self.address, SyncOnDrop::Record(None))
    }
}

// SAFETY: as for streams of cudarc (`copy_behind`).
unsafe impl CopyTarget<RawStream> for RawMem<RawStream> {
    fn capacity_bytes(&self) -> usize {
        self.len
    }

    unsafe fn enqueue(
        &mut self,
        stream: &RawStream,
        source: *const u8,
        len: usize,
        kind: FenceKind,
    ) -> Result<SharedFence, CopyFailure> {
        let copy = |stream| {
            // SAFETY: the caller promises the source, `from_raw` the target; `len` bytes fit (`CopyTarget::enqueue`).
            let copied = unsafe { calls::copy_to_device(self.address, source.cast(), len, stream) };
            copied.map_err(|error| ("cuMemcpyHtoDAsync", error))
        };
        copy_on(*stream, source, len, kind, copy)
    }
}

// SAFETY: as for `CopyTarget`, in the other direction.
unsafe impl CopySource<RawStream> for RawMem<RawStream> {
    fn available_bytes(&self) -> usize {
        self.len
    }

    unsafe fn fetch(&self, stream: &RawStream, target: *mut u8, len: usize) -> Result<SharedFence, CopyFailure> {
        let copy = |stream| {
            // SAFETY: the caller promises the target, `from_raw` the source; it has `len` bytes (`CopySource::fetch`).
            let copied = unsafe { calls::copy_to_host(target.cast(), self.address, len, stream) };
            copied.map_err(|error| ("cuMemcpyDtoHAsync", error))
        };
        copy_on(*stream, target, len, FenceKind::Timeline, copy)
    }
}

/// Enqueues a copy from or to `start`, with a fence behind it.
fn copy_on(
    raw: RawStream,
    start: *const u8,
    len: usize,
    kind: FenceKind,
    copy: impl FnOnce(sys::CUstream) -> Result<(), (&'static str, Code)>,
) -> Result<SharedFence, CopyFailure> {
    let _entered = raw.enter().map_err(CopyFailure::Refused)?;
    // SAFETY: alive (`RawStream::new`).
    let (stream, context) = unsafe { stream_of(raw.handle()) }.map_err(CopyFailure::Refused)?;
    if !stream.green().is_null() {
        let why = "the default stream of a green context takes no copies: pass another stream of that context";
        return Err(CopyFailure::Refused(Error::copy(len, why)));
    }
    let_reach(context.device(), start, len).map_err(CopyFailure::Refused)?;
    let _current = context.enter().map_err(|error| refused(len, "cuCtxSetCurrent", error))?;
    copy_behind((stream, context), len, kind, false, || (0, (), Ok(())), |_| copy(raw.handle()))
}
