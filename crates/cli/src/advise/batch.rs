//! How sizes follow the batch size: `bytes = fixed + samples x bytes a sample`, for each size of a trace.
//!
//! Two traces or more with different batch sizes tell both parts: each size of the first is paired with the one of the same rank
//! in the others, and a line is fitted. One trace alone tells them only where a size is a multiple of the batch size (all of
//! it is samples) or is not (none of it is).

use std::collections::BTreeMap;

use pinpool_replay::{TraceOp, Workload};
use serde::Serialize;

use pinpool_cli::table::grouped;

/// Below this part of the bytes a multiple of the batch size may be one by chance.
const PART_MIN: f64 = 0.5;
/// A line may miss the sizes by so much.
const TOLERANCE: f64 = 0.02;

/// Sizes at another batch size.
#[derive(Debug, Serialize)]
pub(super) struct BatchFit {
    from: u64,
    to: u64,
    /// Bytes of a get on average that do not depend on the batch size, and bytes that each sample takes.
    fixed_bytes: f64,
    bytes_per_sample: f64,
    origin: String,
    #[serde(skip)]
    sizes: BTreeMap<u64, u64>,
}

/// Each size of the gets of a trace, and their number.
fn sizes(workload: &Workload) -> BTreeMap<u64, u64> {
    let mut sizes = BTreeMap::new();
    for (_, operation) in workload.lines() {
        match *operation {
            TraceOp::Get { bytes, .. } if bytes > 0 => *sizes.entry(bytes as u64).or_default() += 1,
            TraceOp::Steps { count, bytes, step: 0 } if bytes > 0 => *sizes.entry(bytes as u64).or_default() += count,
            _ => {}
        }
    }
    sizes
}

fn grows_by_steps(workload: &Workload) -> bool {
    workload.lines().iter().any(|(_, operation)| matches!(operation, TraceOp::Steps { step: 1.., .. }))
}

/// The size at part `rank` of the gets, from the smallest on.
fn size_at(sizes: &BTreeMap<u64, u64>, rank: f64) -> u64 {
    let all = sizes.values().sum::<u64>() as f64;
    let mut below = 0.0;
    for (&size, &count) in sizes {
        below += count as f64;
        if below >= rank * all {
            return size;
        }
    }
    sizes.last_key_value().map_or(0, |(&size, _)| size)
}

impl BatchFit {
    /// # Errors
    ///
    /// If the traces do not tell the two parts; the text says what is missing.
    pub(super) fn of(workloads: &[Workload], batch_sizes: &[u64], to: u64) -> Result<Self, String> {
        if workloads.len() != batch_sizes.len() {
            return Err(format!(
                "--batch-size names {} batch sizes for {} traces: give one for each, separated by commas",
                batch_sizes.len(),
                workloads.len()
            ));
        }
        let (Some(first), Some(&from)) = (workloads.first(), batch_sizes.first()) else {
            return Err("no trace is named".to_owned());
        };
        if workloads.iter().any(grows_by_steps) {
            return Err(
                "an `s` line of the trace gets sizes that grow by steps, which belong to no batch size: leave \
                        --batch-size out, or write these gets as `a` or `r` lines"
                    .to_owned(),
            );
        }
        let lines = if workloads.len() == 1 { by_multiples(first, from)? } else { by_ranks(workloads, batch_sizes)? };
        let counts = sizes(first);
        let all = counts.values().sum::<u64>().max(1) as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| {
            let sum = |(size, line)| counts.get(size).map_or(0.0, |&count| count as f64 * of(line));
            lines.iter().map(sum).sum::<f64>() / all
        };
        let (fixed_bytes, bytes_per_sample) = (mean(|line| line.0), mean(|line| line.1));
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 1; saturates.
        let scaled = |&(fixed, slope): &(f64, f64)| (fixed + slope * to as f64).round().max(1.0) as u64;
        let sizes = lines.iter().map(|(&size, line)| (size, scaled(line))).collect();
        let origin = if workloads.len() == 1 {
            format!("from one trace: sizes that are multiples of {from} are all samples, others none")
        } else {
            format!("fitted to {} traces", workloads.len())
        };
        Ok(Self { from, to, fixed_bytes, bytes_per_sample, origin, sizes })
    }

    /// The size that takes the place of `bytes`.
    pub(super) fn size(&self, bytes: u64) -> u64 {
        self.sizes.get(&bytes).copied().unwrap_or(bytes)
    }

    pub(super) fn lines(&self) -> String {
        let Self { from, to, fixed_bytes, bytes_per_sample, origin, .. } = self;
        format!(
            "with {to} samples a batch in place of {from}: a get has {fixed_bytes:.0} bytes + {to} x {bytes_per_sample:.1} bytes on \
             average ({origin})\n"
        )
    }
}

/// Fixed bytes and bytes a sample of each size of one trace.
fn by_multiples(workload: &Workload, batch_size: u64) -> Result<BTreeMap<u64, (f64, f64)>, String> {
    if batch_size == 1 {
        return Err("a batch of one sample does not tell what of a size is fixed and what belongs to the sample; record a second \
                    trace with another batch size and name both, as in `advise A B --batch-size 1,2`"
            .to_owned());
    }
    let sizes = sizes(workload);
    let bytes = |(size, count): (&u64, &u64)| size.saturating_mul(*count);
    let all: u64 = sizes.iter().map(bytes).fold(0, u64::saturating_add);
    let scaling: u64 =
        sizes.iter().filter(|(size, _)| size.is_multiple_of(batch_size)).map(bytes).fold(0, u64::saturating_add);
    if (scaling as f64) < PART_MIN * all as f64 {
        return Err(format!(
            "the sizes cannot be split into a fixed part and bytes a sample: {} of the {} bytes of all gets are multiples of the \
             batch size {batch_size}, so what other batches need cannot be told from it alone; record a second trace with \
             another batch size and name both, as in `advise A B --batch-size {batch_size},{}`",
            grouped(scaling),
            grouped(all),
            batch_size.saturating_mul(2)
        ));
    }
    let line = |size: u64| {
        if size.is_multiple_of(batch_size) { (0.0, (size / batch_size) as f64) } else { (size as f64, 0.0) }
    };
    Ok(sizes.into_keys().map(|size| (size, line(size))).collect())
}

/// Fixed bytes and bytes a sample of each size of the first of several traces.
fn by_ranks(workloads: &[Workload], batch_sizes: &[u64]) -> Result<BTreeMap<u64, (f64, f64)>, String> {
    let all: Vec<_> = workloads.iter().map(sizes).collect();
    let mean_batch = batch_sizes.iter().sum::<u64>() as f64 / batch_sizes.len() as f64;
    let spread: f64 = batch_sizes.iter().map(|&batch| (batch as f64 - mean_batch).powi(2)).sum();
    if spread == 0.0 {
        return Err(format!(
            "the traces have one batch size ({}): two different ones are needed to tell the fixed part from the samples",
            batch_sizes.first().copied().unwrap_or(0)
        ));
    }
    let Some(first) = all.first() else { return Err("no trace is named".to_owned()) };
    let gets = first.values().sum::<u64>() as f64;
    let (mut lines, mut below) = (BTreeMap::new(), 0.0);
    for (&size, &count) in first {
        let rank = (below + count as f64 / 2.0) / gets;
        below += count as f64;
        let at_rank: Vec<f64> = all.iter().map(|sizes| size_at(sizes, rank) as f64).collect();
        let mean = at_rank.iter().sum::<f64>() / at_rank.len() as f64;
        let slope = batch_sizes
            .iter()
            .zip(&at_rank)
            .map(|(&batch, size)| (batch as f64 - mean_batch) * (size - mean))
            .sum::<f64>()
            / spread;
        let fixed = mean - slope * mean_batch;
        let off =
            batch_sizes.iter().zip(&at_rank).map(|(&batch, size)| (fixed + slope * batch as f64 - size).abs() / size);
        if slope < 0.0 || fixed < -TOLERANCE * mean || off.fold(0.0, f64::max) > TOLERANCE {
            return Err(format!(
                "the sizes do not lie on a line over the batch size: gets of {} bytes in the first trace are {:?} bytes in all of \
                 them, at batch sizes {batch_sizes:?}",
                grouped(size),
                at_rank
            ));
        }
        lines.insert(size, (fixed.max(0.0), slope));
    }
    Ok(lines)
}
