#![allow(clippy::print_stdout)] // An example that shows something.
//! Many small tensors in one buffer: one get, one copy, one completion.

use std::thread;

use pinpool::Pool;
use pinpool::copy::sink::{SinkMem, SinkStream};

const TENSORS: usize = 1000;
const TENSOR_BYTES: usize = 300;
/// Where each tensor starts on the device: kernels read vectors of 16 bytes.
const ALIGN: usize = 16;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = Pool::from_env()?;
    let bytes = TENSORS * TENSOR_BYTES.next_multiple_of(ALIGN);
    let (stream, mut device) = (SinkStream::new()?, SinkMem::new(bytes));

    let batch = pool.batch(bytes)?;
    // Slices of a batch buffer are taken through a shared reference, so threads fill them at once.
    let ranges: Vec<_> = thread::scope(|scope| {
        let fill = |first: usize| {
            let batch = &batch;
            scope.spawn(move || {
                let tensors = (first..TENSORS).step_by(2);
                tensors
                    .filter_map(|tensor| {
                        let mut slice = batch.take(TENSOR_BYTES, ALIGN)?;
                        slice.fill(u8::try_from(tensor % 251).unwrap_or(0));
                        Some((tensor, slice.range()))
                    })
                    .collect::<Vec<_>>()
            })
        };
        [fill(0), fill(1)].into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect()
    });
    batch.copy_to(&stream, &mut device)?.wait()?;

    let arrived = device.read();
    let correct = ranges
        .iter()
        .filter(|(tensor, range)| arrived[range.clone()].iter().all(|&byte| usize::from(byte) == tensor % 251));
    println!("{} of {TENSORS} tensors arrived in one copy", correct.count());
    Ok(())
}
