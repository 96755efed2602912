//! Copies a batch from a pinned buffer to CubeCL, and therefore to Burn: its `TensorData` takes the same `Bytes`.
//!
//! CubeCL copies from pinned bytes without an intermediate buffer and drops them when the device has read them, which returns the
//! buffer. Nothing is synchronized, and no buffer is reused during a copy.

use std::mem::MaybeUninit;

use cubecl::bytes::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use pinpool::{PinnedBuf, PinnedBy, Pool, bytemuck};

/// A buffer as foreign memory for CubeCL.
struct PinnedBytes(PinnedBuf);

impl AllocationController for PinnedBytes {
    /// Sufficient for all element types; buffers are page-aligned.
    fn alloc_align(&self) -> usize {
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        if self.0.pinned_by() == Some(PinnedBy::Driver) { AllocationProperty::Pinned } else { AllocationProperty::Other }
    }

    unsafe fn memory_mut(&mut self, _: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let bytes = self.0.wait_slice_mut().map_err(|error| AccessError::Read(error.to_string()))?;
        // SAFETY: both types have the same layout, and the caller writes initialized bytes only.
        Ok(unsafe { &mut *(std::ptr::from_mut::<[u8]>(bytes) as *mut [MaybeUninit<u8>]) })
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        // SAFETY: CubeCL keeps the buffer, unchanged, until the copies that it starts from the slice are complete.
        let bytes = unsafe { self.0.wait_slice_untracked() }.map_err(|error| AccessError::Read(error.to_string()))?;
        // SAFETY: both types have the same layout, and the bytes are initialized.
        Ok(unsafe { &*(std::ptr::from_ref(bytes) as *const [MaybeUninit<u8>]) })
    }
}

/// The buffer as CubeCL bytes.
fn bytes(batch: PinnedBuf) -> Bytes {
    let len = batch.len();
    // SAFETY: all bytes of a buffer are initialized.
    unsafe { Bytes::from_controller(Box::new(PinnedBytes(batch)), len) }
}

/// The bytes after a round trip to the device.
#[cfg(feature = "cuda")]
fn through_device(batch: Bytes) -> Result<Bytes, Box<dyn std::error::Error>> {
    let client = cubecl::Device::default().client();
    let tensor = client.create(batch);
    Ok(client.read_one(tensor)?)
}

/// Without a runtime, CubeCL has no device.
#[cfg(not(feature = "cuda"))]
fn through_device(batch: Bytes) -> Result<Bytes, Box<dyn std::error::Error>> {
    Ok(batch)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = Pool::builder().build()?;
    let mut batch = pool.get(1000 * size_of::<f32>())?;
    batch.wait_slice_as_mut::<f32>()?.fill(0.5);
    let back = through_device(bytes(batch))?;
    println!("sum {}", bytemuck::cast_slice::<u8, f32>(&back).iter().sum::<f32>());
    drop(back);
    println!("{} of {} buffers have returned", pool.stats().requests.returned, pool.stats().requests.served);
    Ok(())
}
