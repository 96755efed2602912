//! A batch from a pinned buffer to a tensor of candle.
//!
//! candle copies from a plain slice, so the pool cannot see its copy. On a GPU that copy may still run when
//! `from_raw_buffer` returns. The buffer therefore stays with the caller until the device has been synchronized: dropped
//! before, it could be handed out and overwritten under the copy.

use candle_core::{DType, Device, Tensor};
use pinpool::Pool;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::cuda_if_available(0)?;
    let pool = Pool::from_env()?;

    let mut batch = pool.get(1000 * size_of::<f32>())?;
    batch.cast_slice_mut::<f32>()?.fill(0.5);

    // The name says that nobody follows a copy from this slice.
    let tensor = Tensor::from_raw_buffer(batch.as_slice_untracked()?, DType::F32, &[10, 100], &device)?;
    device.synchronize()?; // first the end of candle's copy,
    drop(batch); // then the put

    println!("sum {}", tensor.sum_all()?.to_scalar::<f32>()?);
    Ok(())
}
