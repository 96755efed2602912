//! Copies a file through a pinned buffer to the host sink. With a GPU, use cudarc's stream and slice, as in `cudarc.rs`.

#![allow(clippy::print_stdout)] // The example prints its result.

use std::fs::File;
use std::io::Read;

use pinpool::Pool;
use pinpool_testing::{SinkMemory, SinkStream};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = Pool::builder().build()?;
    let mut file = File::open(std::env::args().nth(1).unwrap_or_else(|| "Cargo.toml".into()))?;
    let len = usize::try_from(file.metadata()?.len())?;
    let (stream, mut device) = (SinkStream::new()?, SinkMemory::new(len)); // on a GPU: cudarc's stream and slice

    let mut buf = pool.get(len)?; // reuses pinned memory, or pins more
    file.read_exact(buf.wait_slice_mut()?)?;
    let copy = buf.copy_to(&stream, &mut device)?; // the buffer belongs to the copy until it completes
    copy.wait()?;

    println!(
        "{} bytes arrived; {} pinned, hit rate {}",
        device.read().len(),
        pool.stats().memory.held_bytes,
        pool.stats().requests.hit_rate()
    );
    Ok(())
}
