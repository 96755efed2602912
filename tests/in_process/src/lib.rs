//! A pool in the process of another program, as a shared library: `with_torch.py` loads it next to PyTorch.
#![allow(unsafe_code, clippy::print_stderr)] // Exports one function, which can report errors only on stderr.

use std::error::Error;
use std::panic::catch_unwind;

use pinpool::Pool;
use pinpool::cudarc::driver::CudaContext;

const LONGEST: usize = 12 << 20;
/// Buffers that are held at once, so that the pool grows and, on `vmm`, remaps granules.
const HELD: usize = 6;

/// Copies buffers of varied sizes to the device and back, on its own stream in the context that all libraries of the
/// process share. Returns how many bytes came back wrong; -1 after an error or a panic, with its text on stderr.
#[unsafe(no_mangle)]
pub extern "C" fn pinpool_rounds(rounds: u32) -> i64 {
    match catch_unwind(|| round_trips(rounds)) {
        Ok(Ok(wrong)) => wrong,
        Ok(Err(error)) => {
            eprintln!("pinpool: {error}");
            -1
        }
        Err(_) => -1,
    }
}

fn round_trips(rounds: u32) -> Result<i64, Box<dyn Error>> {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let mut device = stream.alloc_zeros::<u8>(LONGEST)?;
    let pool = Pool::builder().build()?;
    let (mut wrong, mut held) = (0, Vec::new());
    for round in 0..rounds as usize {
        let len = 1 + (round * 2_654_435_761) % LONGEST;
        let byte = u8::try_from(round % 251)?;
        let mut buf = pool.get(len)?;
        buf.wait_slice_mut()?.fill(byte);
        buf.copy_to(&stream, &mut device)?;
        let back = pool.get(len)?.copy_from(&stream, &device)?.wait()?;
        let bytes = back.wait_slice()?;
        wrong += i64::try_from(bytes.iter().filter(|&&arrived| arrived != byte).count())?;
        held.push(back);
        if held.len() > HELD {
            held.swap_remove(round % HELD);
        }
    }
    drop(held);
    stream.synchronize()?;
    pool.maintain();
    pool.stats().unstable_validate()?;
    Ok(wrong)
}
