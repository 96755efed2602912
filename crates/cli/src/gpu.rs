//! The GPU that batches are copied to, where there is one.

use pinpool_loader::Destination;

/// The GPU of this ordinal with as many streams, or why there is none.
#[cfg(feature = "cuda")]
pub fn open(ordinal: u32, lanes: usize) -> Result<Box<dyn Destination>, String> {
    let device = pinpool_loader::CudaDestination::new(ordinal, lanes);
    Ok(Box::new(device.map_err(|why| why.to_string())?))
}

#[cfg(not(feature = "cuda"))]
pub fn open(_: u32, _: usize) -> Result<Box<dyn Destination>, String> {
    Err("built without the `cuda` feature".to_owned())
}
