#![allow(clippy::print_stdout)] // An example that shows something.
//! Buffers of the pool in a program of cudarc, tracked: on a machine with a GPU, or over a libcuda that represents one.

use pinpool::Pool;
use pinpool::cudarc::driver::CudaContext;

const NUMBERS: usize = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // cudarc panics if there is no driver, so it is looked for first.
    if !pinpool::cuda_is_present() {
        println!("skipped: no CUDA driver here");
        return Ok(());
    }
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let pool = Pool::from_env()?;

    // The pool's way: the buffer is given up, and returns to the pool when the copy ends.
    let mut device = stream.alloc_zeros::<f32>(NUMBERS)?;
    let mut batch = pool.get(NUMBERS * size_of::<f32>())?;
    batch.wait_cast_mut::<f32>()?.fill(1.5);
    batch.copy_to(&stream, &mut device)?;

    // cudarc's way: its copy records an event on the buffer, which the drop of the buffer respects.
    let mut batch = pool.get(NUMBERS * size_of::<f32>())?;
    batch.wait_cast_mut::<f32>()?.fill(2.5);
    stream.memcpy_htod(&batch.elements::<f32>()?, &mut device)?;
    drop(batch);

    // Back again: the bytes can be read when the copy has ended.
    let mut results = pool.get(NUMBERS * size_of::<f32>())?;
    stream.memcpy_dtoh(&device, &mut results.elements_mut::<f32>()?)?;
    results.wait()?;
    let sum: f32 = results.wait_cast::<f32>()?.iter().sum();
    println!("sum {sum}, {} copies in flight", pool.stats().copies.in_flight);
    Ok(())
}
