//! The pool in an asynchronous runtime: two tasks on one worker thread. One task fills buffers; the other copies them to a device
//! and awaits each copy. Neither blocks the thread, since `main` has started the pool: a task is woken when its request is
//! served or its copy completes.

#![allow(clippy::print_stdout)] // The example prints its result.

use pinpool::{PinnedBuf, Pool};
use pinpool_testing::{SinkMemory, SinkStream};
use tokio::sync::mpsc::{Receiver, Sender, channel};

const BATCHES: u8 = 20;
const BATCH_BYTES: usize = 1 << 20;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

async fn fill(pool: Pool, filled: Sender<PinnedBuf>) -> Result<()> {
    for batch in 0..BATCHES {
        let mut buf = pool.get_async(BATCH_BYTES).await?;
        buf.wait_slice_mut()?.fill(batch);
        if filled.send(buf).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// Copies each batch to the device and back, and returns the first byte of each.
async fn copy(pool: Pool, mut to_copy: Receiver<PinnedBuf>) -> Result<Vec<u8>> {
    let (stream, mut device) = (SinkStream::new()?, SinkMemory::new(BATCH_BYTES));
    let mut first_bytes = Vec::new();
    while let Some(buf) = to_copy.recv().await {
        // The buffer returns to the pool when the copy has completed.
        buf.copy_to(&stream, &mut device)?.await?;
        let back = pool.get_async(BATCH_BYTES).await?.copy_from(&stream, &device)?.await?;
        first_bytes.push(back.wait_slice()?[0]);
    }
    Ok(first_bytes)
}

#[tokio::main(flavor = "multi_thread", worker_threads = 1)]
async fn main() -> Result<()> {
    let pool = Pool::builder().build()?;
    // Starts the driver, if there is one, on a thread that may block.
    let to_start = pool.clone();
    tokio::task::spawn_blocking(move || to_start.start()).await?;
    let (filled, to_copy) = channel(4);
    let filling = tokio::spawn(fill(pool.clone(), filled));
    let copying = tokio::spawn(copy(pool.clone(), to_copy));
    filling.await??;
    let arrived = copying.await??;
    assert_eq!(arrived, (0..BATCHES).collect::<Vec<_>>());
    println!("{} batches copied, {} hits", arrived.len(), pool.stats().requests.hits);
    Ok(())
}
