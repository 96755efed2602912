//! `pinpool-bench keep`: how fast a restarted process has its page-locked memory again.
//!
//! ```text
//!   round 1..R:  a new pool pins the bytes   beside   kept memory: attached first, filled, given up; attached again, checked
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use pinpool::{Backend, Pool};
use pinpool_shared::keep::{Keeper, Kept};
use serde::Serialize;

use super::requested::{self, pool_builder};
use super::statistics::{gb_per_s, median, mib, rounded};
use super::{BenchError, Measured, Report};

/// Measure how fast kept memory is page-locked again, beside a fresh pin of as many bytes
///
/// A keeper is started within this process. `fresh` is a reserve of a new pool. `first` attaches to memory that nobody has used yet. `again`
/// attaches to memory that holds the bytes of an earlier holder, as a restarted process does; its first and last byte of each
/// page are compared with what was written.
#[derive(Debug, Args)]
pub(super) struct KeepArgs {
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = requested::at_least(4096))]
    bytes: u64,

    /// How often each is measured; the table shows the median
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,

    /// What page-locks the memory: register, mlock, or heap for none
    #[arg(long, value_name = "NAME", default_value = "mlock")]
    backend: Backend,

    /// Pages that the administrator has set aside: only, or never [default: if there are enough]
    #[arg(long, value_name = "WHEN", value_parser = ["only", "never"])]
    hugetlb: Option<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct KeepReport {
    bytes: u64,
    rounds: u16,
    page_lock: &'static str,
    hugetlb: bool,
    fresh_ms: f64,
    first_ms: f64,
    again_ms: f64,
    fresh_gb_s: f64,
    first_gb_s: f64,
    again_gb_s: f64,
}

impl KeepArgs {
    pub(super) fn measure(&self) -> Measured<KeepReport> {
        let bytes = usize::try_from(self.bytes).unwrap_or(usize::MAX);
        let hugetlb = self.hugetlb.as_deref().map(|when| when == "only");
        let pool = || -> Measured<Pool> { Ok(pool_builder(self.backend.clone()).build()?) };
        let name = format!("bench-{}", std::process::id());
        let (mut fresh, mut first, mut again) = (Vec::new(), Vec::new(), Vec::new());
        let (mut page_lock, mut is_hugetlb) = ("none", false);
        for round in 0..self.rounds {
            let pool_of_round = pool()?;
            let begun = Instant::now();
            pool_of_round.prewarm(self.bytes)?;
            fresh.push(begun.elapsed());
            drop(pool_of_round);
            let keeper = Keeper::new(&name, bytes, hugetlb)?;
            let is_over = AtomicBool::new(false);
            let attach = || -> Measured<(Kept, Duration)> {
                let pool = pool()?;
                let begun = Instant::now();
                let kept = Kept::attach(&pool, &name, bytes)?;
                Ok((kept, begun.elapsed()))
            };
            let measured = std::thread::scope(|scope| {
                scope.spawn(|| keeper.serve(|| is_over.load(Ordering::Relaxed)));
                let measured = (|| {
                    let (kept, took) = attach()?;
                    kept.get(0, bytes)?.as_mut_slice()?.fill(round.to_le_bytes()[0] | 1);
                    kept.complete("bench", self.bytes)?;
                    drop(kept);
                    let (kept, took_again) = attach()?;
                    let buf = kept.get(0, bytes)?;
                    let is_there = buf.as_slice()?.iter().step_by(512).all(|&byte| byte == round.to_le_bytes()[0] | 1);
                    if !is_there || kept.completed().is_none_or(|mark| mark.len != self.bytes) {
                        return Err(BenchError::Failure("the bytes of the holder before are not there".to_owned()));
                    }
                    page_lock = kept.page_lock();
                    Ok((took, took_again))
                })();
                is_over.store(true, Ordering::Relaxed);
                measured
            });
            is_hugetlb = keeper.is_hugetlb();
            let (took, took_again) = measured?;
            first.push(took);
            again.push(took_again);
        }
        let [fresh, first, again] =
            [fresh, first, again].map(|times: Vec<Duration>| median(times.iter().map(Duration::as_secs_f64).collect()));
        let ms = |seconds| rounded(seconds * 1e3);
        let rate = |seconds| gb_per_s(self.bytes, Duration::from_secs_f64(seconds));
        Ok(KeepReport {
            bytes: self.bytes,
            rounds: self.rounds,
            page_lock,
            hugetlb: is_hugetlb,
            fresh_ms: ms(fresh),
            first_ms: ms(first),
            again_ms: ms(again),
            fresh_gb_s: rate(fresh),
            first_gb_s: rate(first),
            again_gb_s: rate(again),
        })
    }
}

impl Report for KeepReport {
    fn table(&self) -> (Vec<String>, &[String]) {
        let Self { bytes, page_lock, rounds, .. } = self;
        let pages = if self.hugetlb { "hugetlb pages" } else { "pages of a memory file" };
        let line =
            |name: &str, ms: f64, rate: f64, what: &str| format!("  {name:<6} {ms:>10.2} ms {rate:>8.2} GB/s  {what}");
        let lines = vec![
            format!("{} page-locked by {page_lock}, kept in {pages}; median of {rounds}", mib(*bytes)),
            line("fresh", self.fresh_ms, self.fresh_gb_s, "a new pool pins as much"),
            line("first", self.first_ms, self.first_gb_s, "kept memory that nobody has used yet"),
            line("again", self.again_ms, self.again_gb_s, "kept memory with the bytes of the holder before"),
        ];
        (lines, &[])
    }
}
