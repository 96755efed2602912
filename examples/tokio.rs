#![allow(clippy::print_stdout)] // An example that shows something.
//! The pool under an asynchronous runtime: a get that may pin memory or wait for room runs on tokio's blocking threads,
//! so that the threads which run tasks never wait.

use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::{PinnedBuf, Pool};

const BATCHES: u8 = 20;
const BATCH_BYTES: usize = 1 << 20;

/// A buffer without holding up the runtime: at once if one is idle, else from a blocking thread.
async fn get(pool: &Pool, len: usize) -> Result<PinnedBuf, Box<dyn std::error::Error + Send + Sync>> {
    if let Some(buf) = pool.try_get(len)? {
        return Ok(buf);
    }
    let pool = pool.clone();
    Ok(tokio::task::spawn_blocking(move || pool.get(len)).await??)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let pool = Pool::from_env()?;
    let (filled, mut to_copy) = tokio::sync::mpsc::channel(4);
    let producer = {
        let pool = pool.clone();
        tokio::spawn(async move {
            for batch in 0..BATCHES {
                let mut buf = get(&pool, BATCH_BYTES).await?;
                buf.as_mut_slice()?.fill(batch);
                if filled.send(buf).await.is_err() {
                    break;
                }
            }
            Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
        })
    };
    let (stream, mut device) = (SinkStream::new()?, SinkMem::new(BATCH_BYTES));
    while let Some(buf) = to_copy.recv().await {
        buf.copy_to(&stream, &mut device)?;
    }
    producer.await??;
    tokio::task::spawn_blocking(move || stream.synchronize()).await??;
    println!("{} batches, {} of them from idle memory", pool.stats().gets, pool.stats().hits);
    Ok(())
}
