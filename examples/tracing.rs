//! The log lines of the pool in `tracing`: its bridge for the `log` crate receives them. The name of the pool is in brackets.
//!
//! `cargo run --example tracing` prints, among others, `INFO ... pool[loader] created: preset=adaptive ...`, a `WARN` with the holders of
//! the memory when a request fails, and the totals at the end.

#![allow(clippy::print_stdout)] // The example prints its result.

use std::time::Duration;

use pinpool::Pool;
use tracing::Level;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `init` also installs the bridge: the feature `tracing-log` of tracing-subscriber, or `tracing_log::LogTracer::init()`.
    tracing_subscriber::fmt().with_max_level(Level::DEBUG).with_writer(std::io::stdout).init();
    let _epoch = tracing::info_span!("epoch", number = 1).entered();

    let pool = Pool::builder().name("loader").max_bytes(4 << 20).wait(Duration::ZERO).build()?;
    let images = pool.tagged("loader/images");
    let _held = images.get(3 << 20)?;
    if let Err(error) = images.get(2 << 20) {
        tracing::info!("the request failed: {error}");
    }
    println!("{}", pool.dump());
    Ok(())
}
