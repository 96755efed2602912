//! What it costs the copying thread that the pool knows when its copies end.
//!
//! ```text
//!   bare          one pinned buffer that nobody tracks:  the call alone      ┐
//!   copy_to       get ─▶ copy_to, which is the put       tracked by the pool ├ BURST times, timed; then all copies end
//!   memcpy_htod   get ─▶ cudarc's copy ─▶ drop           tracked by both     ┘
//! ```
//!
//! The ways take turns, so that what drifts drifts under all. Part of a get is to ask which copies of the burst before are
//! over.

use std::time::{Duration, Instant};

use pinpool::Pool;
use serde::Serialize;

use super::far::{Far, Way};
use super::figure::{Measured, median, mib, rounded};

/// A parameter buffer, and a small batch.
const SIZES: [u64; 2] = [4 << 10, LARGEST_BYTES];
pub(super) const LARGEST_BYTES: u64 = 64 << 10;
/// Copies enqueued between two waits: no queue is full.
const BURST: usize = 16;
/// Bursts of one way in a turn.
const BURSTS: usize = 32;
const FEWEST_TURNS: usize = 3;

/// One size; nanoseconds for each copy on one thread.
#[derive(Debug, Serialize)]
pub(super) struct Tracked {
    bytes: u64,
    bare_ns: f64,
    ways: Vec<OfWay>,
}

#[derive(Debug, Serialize)]
struct OfWay {
    by: &'static str,
    ns: f64,
    beyond_bare_ns: f64,
}

/// About `seconds` for each size.
pub(super) fn measure(pool: &Pool, far: &mut Far, seconds: Duration) -> Measured<Vec<Tracked>> {
    SIZES.into_iter().map(|bytes| of_size(pool, far, bytes, seconds)).collect()
}

fn of_size(pool: &Pool, far: &mut Far, bytes: u64, seconds: Duration) -> Measured<Tracked> {
    let len = usize::try_from(bytes).unwrap_or(usize::MAX);
    let ways = far.ways();
    let mut bare_buf = pool.get(len)?;
    bare_buf.as_mut_slice().fill(1);
    let (mut bare, mut by_way) = (Vec::new(), vec![Vec::new(); ways.len()]);
    let begun = Instant::now();
    while bare.len() < FEWEST_TURNS || begun.elapsed() < seconds {
        let mut took = Duration::ZERO;
        for _ in 0..BURSTS {
            let (buf, burst) = far.send_bare(bare_buf, BURST)?;
            bare_buf = buf;
            took += burst;
        }
        bare.push(ns_each(took));
        for (&way, seen) in ways.iter().zip(&mut by_way) {
            seen.push(ns_each(turn(pool, far, way, len)?));
        }
    }
    let bare_ns = median(bare);
    let of_way = |(way, seen): (Way, Vec<f64>)| {
        let ns = median(seen);
        OfWay { by: way.name(), ns: rounded(ns), beyond_bare_ns: rounded(ns - bare_ns) }
    };
    let ways = ways.into_iter().zip(by_way).map(of_way).collect();
    Ok(Tracked { bytes, bare_ns: rounded(bare_ns), ways })
}

fn turn(pool: &Pool, far: &mut Far, way: Way, len: usize) -> Measured<Duration> {
    let mut took = Duration::ZERO;
    for _ in 0..BURSTS {
        let begun = Instant::now();
        for _ in 0..BURST {
            far.send(way, pool.get(len)?)?;
        }
        took += begun.elapsed();
        far.synchronize()?;
    }
    Ok(took)
}

#[allow(clippy::cast_precision_loss)] // For people.
fn ns_each(took: Duration) -> f64 {
    took.as_secs_f64() * 1e9 / (BURST * BURSTS) as f64
}

impl Tracked {
    pub(super) fn rows(&self) -> Vec<String> {
        let row =
            |by: &str, ns: f64, beyond: String| format!("  {:<10} {by:<14} {ns:>10.0} {beyond:>12}", mib(self.bytes));
        let bare = row("bare", self.bare_ns, String::new());
        let ways = self.ways.iter().map(|of| row(of.by, of.ns, format!("{:+.0}", of.beyond_bare_ns)));
        std::iter::once(bare).chain(ways).collect()
    }
}
