//! Device memory that another framework allocated.
#![allow(unsafe_code)] // Vouches for an address.

use std::sync::Arc;

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, DeviceSlice, SyncOnDrop, sys};

/// Device memory of another framework, for copies from and to it. Owns nothing and orders nothing: that is left to its
/// owner.
///
/// ```no_run
/// use cudarc::driver::{CudaContext, sys::CUstream};
/// use pinpool::{Pool, copy::cuda::RawMem};
///
/// /// A framework's stream, and 4096 bytes of its memory.
/// fn send(pool: &Pool, stream: CUstream, address: u64) -> Result<(), Box<dyn std::error::Error>> {
///     let context = CudaContext::new(0)?;
///     // SAFETY: the framework keeps the stream alive until the copy is over.
///     let stream = unsafe { context.wrap_borrowed_stream(stream) };
///     // SAFETY: and the memory.
///     let mut memory = unsafe { RawMem::from_raw(address, 4096, stream.clone()) };
///     pool.get(4096)?.copy_to(&stream, &mut memory)?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct RawMem {
    address: sys::CUdeviceptr,
    len: usize,
    stream: Arc<CudaStream>,
}

impl RawMem {
    /// `len` bytes at `address` of the device of `stream`.
    ///
    /// # Safety
    ///
    /// The bytes are allocated until every copy made through this is over, and whoever else uses them does so in order
    /// with those copies.
    pub unsafe fn from_raw(address: u64, len: usize, stream: Arc<CudaStream>) -> Self {
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
