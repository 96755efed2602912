//! The GPU to which batches are copied, if there is one.

use pinpool_loader::Destination;

/// Opens the GPU with this ordinal and this number of streams. An error says why it is not available.
#[cfg(feature = "cuda")]
pub fn open(ordinal: u32, lanes: usize) -> Result<Box<dyn Destination>, String> {
    Ok(Box::new(pinpool_loader::CudaDestination::new(ordinal, lanes).map_err(|why| why.to_string())?))
}

#[cfg(not(feature = "cuda"))]
pub fn open(_: u32, _: usize) -> Result<Box<dyn Destination>, String> {
    Err("built without the `cuda` feature".to_owned())
}
