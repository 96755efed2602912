//! Many small tensors in one buffer: one request, several writers, one copy.

#![allow(clippy::print_stdout)] // The example prints its result.

use std::thread;

use pinpool::Pool;
use pinpool_testing::{SinkMemory, SinkStream};

const TENSORS: usize = 1000;
const TENSOR_BYTES: usize = 300;
/// Tensors start at multiples of 16 on the device: kernels read vectors of 16 bytes.
const STRIDE: usize = TENSOR_BYTES.next_multiple_of(16);

/// The value of each byte of a tensor.
fn byte(tensor: usize) -> u8 {
    u8::try_from(tensor % 251).unwrap_or(0)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = Pool::builder().build()?;
    let bytes = TENSORS * STRIDE;
    let (stream, mut device) = (SinkStream::new()?, SinkMemory::new(bytes));

    let mut batch = pool.get(bytes)?;
    let mut tensors: Vec<_> = batch.wait_slice_mut()?.chunks_exact_mut(STRIDE).enumerate().collect();
    thread::scope(|scope| {
        for part in tensors.chunks_mut(TENSORS / 2) {
            scope.spawn(|| part.iter_mut().for_each(|(tensor, bytes)| bytes[..TENSOR_BYTES].fill(byte(*tensor))));
        }
    });
    batch.copy_to(&stream, &mut device)?.wait()?;

    let arrived = device.read().chunks_exact(STRIDE).enumerate();
    let correct = arrived.filter(|(tensor, bytes)| bytes[..TENSOR_BYTES].iter().all(|&found| found == byte(*tensor)));
    println!("{} of {TENSORS} tensors arrived in one copy", correct.count());
    Ok(())
}
