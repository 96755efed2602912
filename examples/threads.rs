//! Several threads fill buffers of one pool and pass them to the copying thread.

#![allow(clippy::print_stdout)] // The example prints its result.

use std::sync::mpsc::sync_channel;
use std::thread;

use pinpool::{PinnedBuf, Pool};
use pinpool_testing::{SinkMemory, SinkStream};

const THREADS: u8 = 4;
const BATCHES: usize = 100;
const BATCH_BYTES: usize = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = Pool::builder().build()?;
    // With a GPU: cudarc's stream and slice.
    let (stream, mut device) = (SinkStream::new()?, SinkMemory::new(BATCH_BYTES));
    // The channel limits the number of filled batches, and thereby the memory in use.
    let (filled, to_copy) = sync_channel::<pinpool::Result<PinnedBuf>>(8);

    for thread in 0..THREADS {
        let (pool, filled) = (pool.clone(), filled.clone());
        thread::spawn(move || {
            for _ in 0..BATCHES {
                let fill = || {
                    let mut buf = pool.get(BATCH_BYTES)?;
                    buf.wait_slice_mut()?.fill(thread);
                    Ok(buf)
                };
                if filled.send(fill()).is_err() {
                    return;
                }
            }
        });
    }
    drop(filled);

    for batch in to_copy {
        batch?.copy_to(&stream, &mut device)?; // the buffer returns to the pool when the copy ends
    }
    stream.synchronize()?;
    let stats = pool.stats();
    println!(
        "{} batches from {} bytes of memory, {} misses",
        stats.requests.served, stats.memory.peak_held_bytes, stats.requests.misses
    );
    Ok(())
}
