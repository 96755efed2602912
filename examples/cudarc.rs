//! Tracked pool buffers in a cudarc program, on a machine with a GPU or with a mock libcuda.

#![allow(clippy::print_stdout)] // The example prints its result.

use pinpool::Pool;
use pinpool::cudarc::driver::CudaContext;

const NUMBERS: usize = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // cudarc panics without a driver, so check for one first.
    if let Err(error) = pinpool::check_cuda_device(0) {
        println!("skipped: {error}");
        return Ok(());
    }
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let pool = Pool::builder().build()?;

    // A copy through the pool takes the buffer, which returns to the pool when the copy has completed.
    let mut device = stream.alloc_zeros::<f32>(NUMBERS)?;
    let mut batch = pool.get(NUMBERS * size_of::<f32>())?;
    batch.wait_slice_as_mut::<f32>()?.fill(1.5);
    batch.copy_to(&stream, &mut device)?;

    // A copy through cudarc leaves a fence in the buffer; the drop returns immediately, and the pool
    // reuses the memory only after that fence.
    let mut batch = pool.get(NUMBERS * size_of::<f32>())?;
    batch.wait_slice_as_mut::<f32>()?.fill(2.5);
    stream.memcpy_htod(&batch.view_as::<f32>()?, &mut device)?;
    drop(batch);

    // A copy from the device. `wait_slice_as` waits until it has completed.
    let mut results = pool.get(NUMBERS * size_of::<f32>())?;
    stream.memcpy_dtoh(&device, &mut results.view_as_mut::<f32>()?)?;
    let sum: f32 = results.wait_slice_as::<f32>()?.iter().sum();
    println!("sum {sum}, {} copies in flight", pool.stats().copies.in_flight);
    Ok(())
}
