#![allow(clippy::print_stdout)] // An example that shows something.
//! The statistics of a pool over HTTP, for Prometheus.
//!
//! `cargo run -p pinpool-metrics --example prometheus [ADDRESS]` serves on 127.0.0.1:9464 until it is stopped, while a few
//! threads use the pool. `prometheus --config.file=crates/metrics/examples/prometheus/prometheus.yml` scrapes it; `grafana.json` is a
//! dashboard to import into Grafana. The pool takes its settings from `PINPOOL_*`.

use std::error::Error;
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use pinpool::Pool;

mod serve;

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:9464".to_owned());
    let recorder = serve::recorder()?;
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder)?;
    let pool = Pool::builder().name("train").build()?;
    let reporter = pinpool_metrics::Reporter::new(&pool);
    for worker in 0..4usize {
        let pool = pool.clone();
        thread::spawn(move || load(&pool, worker));
    }
    let listener = TcpListener::bind(address)?;
    println!("http://{}/metrics", listener.local_addr()?);
    // Each scrape reports the current statistics.
    serve::answer(&listener, || {
        reporter.report();
        handle.run_upkeep();
        handle.render()
    })?;
    Ok(())
}

/// Requests and returns buffers of a few sizes.
fn load(pool: &Pool, worker: usize) {
    for step in 0usize.. {
        let len = (1 + (step + worker) % 5) << 18;
        if let Ok(mut buf) = pool.get(len)
            && let Ok(bytes) = buf.wait_slice_mut()
        {
            bytes.fill(7);
        }
        thread::sleep(Duration::from_millis(1));
    }
}
