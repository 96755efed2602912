//! Copies a batch from a pinned buffer to a candle tensor.
//!
//! On a GPU, the pool copies on candle's stream. The call returns immediately, the buffer returns to the pool when the copy
//! ends, and work that candle enqueues later on that stream sees the values without any synchronization. candle and pinpool use
//! the same version of cudarc; otherwise `pinpool::copy::cuda::RawStream` takes the handle of the stream.

use candle_core::{Device, Result, Tensor};
use pinpool::{PinnedBuf, Pool};

/// Returns a tensor with the contents of `batch` and `rows` rows.
#[cfg(feature = "cuda")]
fn on_gpu(batch: PinnedBuf, rows: usize, device: &Device) -> Result<Tensor> {
    use candle_core::op::BackpropOp;
    use candle_core::{CudaStorage, Storage};

    let cuda = device.as_cuda_device()?;
    let values = batch.len() / size_of::<f32>();
    let mut on_device = cuda.alloc_zeros::<f32>(values)?;
    batch.copy_to(&cuda.cuda_stream(), &mut on_device).map_err(candle_core::Error::wrap)?;
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(on_device, cuda.clone()));
    Ok(Tensor::from_storage(storage, (rows, values / rows), BackpropOp::none(), false))
}

/// Without CUDA, candle has no GPU to copy to.
#[cfg(not(feature = "cuda"))]
fn on_gpu(_: PinnedBuf, _: usize, _: &Device) -> Result<Tensor> {
    candle_core::bail!("built without the feature cuda")
}

fn tensor(batch: PinnedBuf, rows: usize, device: &Device) -> std::result::Result<Tensor, Box<dyn std::error::Error>> {
    if device.is_cuda() {
        return Ok(on_gpu(batch, rows, device)?);
    }
    // The CPU copies before this returns, so nothing needs tracking.
    let values = batch.wait_slice_as::<f32>()?;
    Ok(Tensor::from_slice(values, (rows, values.len() / rows), device)?)
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let device = Device::cuda_if_available(0)?;
    let pool = Pool::builder().build()?;

    let mut batch = pool.get(1000 * size_of::<f32>())?;
    batch.wait_slice_as_mut::<f32>()?.fill(0.5);
    let tensor = tensor(batch, 10, &device)?;

    println!("sum {}", tensor.sum_all()?.to_scalar::<f32>()?);
    Ok(())
}
