//! The timeline of a workload, which has gets and puts alone: replayed through the pool on simulated memory, in virtual time.

use std::collections::BTreeMap;

use pinpool::{Pool, Stats};
use pinpool_replay::{Replay, TraceError, TraceOp, Watch, Workload};

use super::timeline::{Sample, Timeline};
use crate::why::Judged;

/// The pool is seen so often over the time of the workload, and so often over its gets.
const TIMES: u64 = 1_000;
/// With more sizes, further ones are counted with their power of two.
const SIZES_MAX: usize = 4_096;

/// Plays `workload` under `replay`, which `set` names.
///
/// # Errors
///
/// The errors of [`Replay::play`].
pub(super) fn timeline(workload: &Workload, replay: &Replay, set: &str) -> Result<Timeline, TraceError> {
    let has_time = workload.duration_us() > 0;
    let mut seen: Vec<(f64, u64, Sample)> = Vec::new();
    let mut judged = Judged::default();
    let mut see = |now_us: u64, pool: &Pool| {
        judged.look(pool);
        let stats = &pool.stats();
        let x = if has_time { now_us as f64 * 1e-6 } else { stats.requests.served as f64 };
        seen.push((stats.limits.max_idle_buffers as f64, stats.limits.raises, sample(x, stats)));
    };
    let played = replay.play_watched(workload, Some(Watch::new(workload, TIMES, &mut see)))?;
    let samples: Vec<_> = seen.iter().map(|(.., sample)| *sample).collect();
    let limits = seen.iter().map(|(limit, _, sample)| (sample.x, *limit)).collect();
    let settings = if set.is_empty() {
        format!(
            "The trace has gets and puts alone: it was replayed with the default settings of the preset {}",
            played.preset
        )
    } else {
        format!("The trace was replayed under {} with the preset {}", set.replace(',', ", "), played.preset)
    };
    let ceiling = if replay.max_bytes.is_some() { "" } else { ", without a limit" };
    let mut notes =
        vec![format!("{settings} on simulated memory, in virtual time{ceiling}. So there are no pin times.")];
    if !has_time {
        notes.push("The trace has no time: the x axis counts its gets.".to_owned());
    }
    Ok(Timeline {
        has_time,
        samples,
        limits: vec![("the pool".to_owned(), limits)],
        raises: raises(&seen),
        traffic: traffic(workload),
        notes,
        said: judged.worst("the pool").into_iter().collect(),
        ..Timeline::default()
    })
}

fn sample(x: f64, stats: &Stats) -> Sample {
    Sample {
        x,
        in_use_bytes: stats.memory.in_use_bytes,
        in_flight_bytes: stats.copies.in_flight_bytes,
        idle_bytes: stats.memory.idle_bytes,
        pinned_bytes: stats.memory.held_bytes,
        ceiling_bytes: stats.limits.max_bytes,
        gets: stats.requests.served,
        hits: stats.requests.hits,
        evicted: stats.memory.evictions.over_limit,
        pins: stats.memory.pin.count,
    }
}

/// Each raise between two samples, at the later of them.
fn raises(seen: &[(f64, u64, Sample)]) -> Vec<(f64, f64)> {
    let mut before = 0;
    let mut raises = Vec::new();
    for &(limit, count, sample) in seen {
        raises.extend((before..count).map(|_| (sample.x, limit)));
        before = count;
    }
    raises
}

/// Gets and bytes of each size that is asked for.
fn traffic(workload: &Workload) -> BTreeMap<u64, (u64, u64)> {
    let mut traffic: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let mut add = |bytes: usize, gets: u64| {
        let bytes = bytes as u64;
        if bytes == 0 {
            return;
        }
        let is_new = !traffic.contains_key(&bytes);
        let size = if is_new && traffic.len() >= SIZES_MAX { 1 << bytes.ilog2() } else { bytes };
        let sum = traffic.entry(size).or_default();
        *sum = (sum.0 + gets, sum.1.saturating_add(bytes.saturating_mul(gets)));
    };
    for &(_, operation) in workload.lines() {
        match operation {
            TraceOp::Get { bytes, .. } => add(bytes, 1),
            TraceOp::Steps { count, bytes, step: 0 } => add(bytes, count),
            TraceOp::Steps { count, bytes, step } => {
                let mut bytes = bytes;
                for _ in 0..count {
                    add(bytes, 1);
                    bytes = bytes.saturating_add(step);
                }
            }
            _ => {}
        }
    }
    traffic
}
