//! Measures how long a miss of 1 GiB delays a single-threaded runtime. One task repeatedly sleeps for 1 ms and records its longest
//! interval: once while another task awaits the request, and once while that task sleeps equally long. On a machine with a GPU,
//! the first line also contains the choice of the backend, which the first poll makes.

#![allow(clippy::print_stdout)] // The example prints its result.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pinpool::Pool;
use tokio::task::{LocalSet, spawn_local, yield_now};
use tokio::time::sleep;

const ROUNDS: usize = 5;
const BEAT: Duration = Duration::from_millis(1);

/// The longest interval during `work`, its duration, and its result.
async fn longest_beat<T>(work: impl Future<Output = T>) -> (Duration, Duration, T) {
    let longest = Rc::new(Cell::new(Duration::ZERO));
    let recorded = longest.clone();
    let heart = spawn_local(async move {
        loop {
            let begun = Instant::now();
            sleep(BEAT).await;
            recorded.set(recorded.get().max(begun.elapsed()));
        }
    });
    yield_now().await;
    let begun = Instant::now();
    let result = work.await;
    let took = begun.elapsed();
    sleep(BEAT).await;
    heart.abort();
    (longest.get(), took, result)
}

async fn measure() -> pinpool::Result<()> {
    for _ in 0..ROUNDS {
        let pool = Pool::builder().max_bytes(2 << 30).build()?;
        let (during, took, buf) = longest_beat(pool.get_async(1 << 30)).await;
        drop((buf?, pool));
        let (idle, ..) = longest_beat(sleep(took)).await;
        println!("1 GiB in {took:.1?}: longest beat {during:.1?}, idle {idle:.1?}");
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    Ok(LocalSet::new().block_on(&runtime, measure())?)
}
