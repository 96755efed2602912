//! Presets and sources beside each other, and the default preset under a ceiling: Markdown for a report.
//!
//! Owns which runs are compared, and how far from its target a figure may be. A target stands in parentheses behind its
//! figure; a figure that misses it, or a peak over its ceiling, is bold.

use std::collections::HashMap;
use std::error::Error;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use pinpool::Preset::{Adaptive, Tensorflow};
use pinpool::Rounding::{Eighths, Exact, Pow2};
use pinpool::trace::{Replay, Replayed, SourceKind, TraceError};

use crate::replay::{Named, ceiling_bytes};
use crate::replayed::{geometric_mean, in_mib, is_of_some_size, mib, worst_ratio};

/// The ceiling of the second table, as a multiple of the peak requested.
const CEILING_RATIO: f64 = 1.25;
/// A figure may be worse than its target by this much ...
const MORE_PAGE_LOCKS: f64 = 1.10;
const HIGHER_PEAK: f64 = 1.03;
/// ... and by so many page-locks in any case: a tenth of a few is less than one.
const FEW_PAGE_LOCKS: f64 = 3.0;

/// What a workload should cost.
#[derive(Debug, Clone, Copy)]
struct Target {
    page_locks: [f64; 2],
    late_page_locks: f64,
    peak_ratio: [f64; 2],
}

type Targets = HashMap<String, Target>;

/// One workload under one setting after the other.
struct Row<'a> {
    name: &'a str,
    replays: Vec<Replayed>,
}

pub(crate) fn markdown(workloads: &[Named], targets: Option<&Path>) -> Result<String, Box<dyn Error>> {
    let targets = targets.map_or_else(|| Ok(Targets::new()), read_targets)?;
    let [span, walls] = [SourceKind::Span, SourceKind::Walls].map(|source| Replay {
        preset: Some(Adaptive),
        rounding: Some(Eighths),
        source,
        ..Replay::default()
    });
    let [exact, pow2] = [Exact, Pow2].map(|rounding| Replay {
        preset: Some(Tensorflow),
        rounding: Some(rounding),
        ..Replay::default()
    });
    let free = play(workloads, |_| vec![span.clone(), walls.clone(), exact.clone(), pow2.clone()])?;
    let ceiled = play(workloads, |named| {
        let max_bytes = Some(ceiling_bytes(&named.workload, CEILING_RATIO));
        [&span, &walls].map(|replay| Replay { max_bytes, ..replay.clone() }).to_vec()
    })?;
    Ok([page_locks_and_peaks(&free, &targets), over_time(&free), under_the_ceiling(&ceiled)].join("\n"))
}

fn play<'a>(workloads: &'a [Named], settings: impl Fn(&Named) -> Vec<Replay>) -> Result<Vec<Row<'a>>, String> {
    let row = |named: &'a Named| {
        let Named { name, workload } = named;
        let replays: Result<_, _> = settings(named).iter().map(|replay| replay.play(workload)).collect();
        Ok(Row { name: name.as_str(), replays: replays.map_err(|error: TraceError| format!("{name}: {error}"))? })
    };
    workloads.iter().map(row).collect()
}

/// Lines of `workload,page-locks,late,peak,page-locks,peak`, the last two for a source with walls; `#` begins a comment.
fn read_targets(path: &Path) -> Result<Targets, String> {
    let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, numbers) = line.split_once(',').unwrap_or((line, ""));
            let numbers: Result<Vec<f64>, _> = numbers.split(',').map(str::parse).collect();
            match numbers.as_deref() {
                Ok(&[locks, late, peak, walls_locks, walls_peak]) => {
                    let target = Target {
                        page_locks: [locks, walls_locks],
                        late_page_locks: late,
                        peak_ratio: [peak, walls_peak],
                    };
                    Ok((name.to_owned(), target))
                }
                _ => Err(format!("{}: `{line}`: not a name and five numbers", path.display())),
            }
        })
        .collect()
}

/// Settings that are compared, in the order of their columns; the first two have targets.
const COLUMNS: [&str; 4] = ["adaptive", "with walls", "tensorflow exact", "tensorflow pow2"];

fn page_locks_and_peaks(rows: &[Row<'_>], targets: &Targets) -> String {
    let heads = COLUMNS.map(|column| [format!("{column}: page-locks"), "late".to_owned(), "peak / asked".to_owned()]);
    let mut table = Table::new(["asked MiB".to_owned()].into_iter().chain(heads.into_iter().flatten()));
    for Row { name, replays } in rows {
        let target = targets.get(*name);
        let cells = replays.iter().enumerate().flat_map(|(at, replayed)| {
            let target = target.filter(|_| at < 2);
            let late_target = target.filter(|_| at == 0).map(|target| target.late_page_locks);
            [
                locks(replayed.page_locks, target.map(|target| target.page_locks[at])),
                locks(replayed.late_page_locks, late_target),
                peak(replayed.peak_ratio(), target.map(|target| target.peak_ratio[at])),
            ]
        });
        table.line(name, [mib(replays[0].peak_requested_bytes)].into_iter().chain(cells));
    }
    let none = String::new;
    let sums = (0..COLUMNS.len()).flat_map(|at| {
        let sum = |figure: fn(&Replayed) -> u64| column(rows, at).map(figure).sum::<u64>().to_string();
        [sum(|replayed| replayed.page_locks), sum(|replayed| replayed.late_page_locks), none()]
    });
    table.line("**sum**", [none()].into_iter().chain(sums));
    let peaks =
        |of: &dyn Fn(usize) -> String| (0..COLUMNS.len()).flat_map(|at| [none(), none(), of(at)]).collect::<Vec<_>>();
    let means = peaks(&|at| format!("{:.3}", geometric_mean(column(rows, at).map(Replayed::peak_ratio))));
    table.line("**geometric mean**", [none()].into_iter().chain(means));
    let worst = peaks(&|at| format!("{:.3}", worst_ratio(column(rows, at))));
    table.line("**worst over 16 MiB**", [none()].into_iter().chain(worst));
    table.0
}

fn over_time(rows: &[Row<'_>]) -> String {
    let heads = COLUMNS.map(|column| [format!("{column}: mean MiB"), "60 s later".to_owned(), "hits".to_owned()]);
    let mut table = Table::new(["gets".to_owned()].into_iter().chain(heads.into_iter().flatten()));
    for Row { name, replays } in rows {
        let cells = replays.iter().flat_map(|replayed| {
            let hits = replayed.front_hits.to_string();
            [mib(replayed.mean_pinned_bytes), mib(replayed.pinned_after_60s_bytes), hits]
        });
        table.line(name, [replays[0].gets.to_string()].into_iter().chain(cells));
    }
    let means = (0..COLUMNS.len()).flat_map(|at| {
        let mean = geometric_mean(column(rows, at).map(|replayed| in_mib(replayed.mean_pinned_bytes)));
        [format!("{mean:.1}"), String::new(), String::new()]
    });
    table.line("**geometric mean**", [String::new()].into_iter().chain(means));
    let sums = (0..COLUMNS.len()).flat_map(|at| {
        let sum = |figure: fn(&Replayed) -> u64| column(rows, at).map(figure).sum::<u64>();
        [
            String::new(),
            mib(sum(|replayed| replayed.pinned_after_60s_bytes)),
            sum(|replayed| replayed.front_hits).to_string(),
        ]
    });
    let gets = rows.iter().map(|row| row.replays[0].gets).sum::<u64>().to_string();
    table.line("**sum**", [gets].into_iter().chain(sums));
    table.0
}

fn under_the_ceiling(rows: &[Row<'_>]) -> String {
    let heads =
        ["ceiling MiB", "adaptive: peak MiB", "waits", "fallbacks", "with walls: peak MiB", "waits", "fallbacks"];
    let mut table = Table::new(heads.map(str::to_owned).into_iter());
    for Row { name, replays } in rows {
        let max_bytes = replays[0].max_bytes.unwrap_or(u64::MAX);
        let cells = replays.iter().flat_map(|replayed| {
            let peak = beside(mib(replayed.peak_pinned_bytes), replayed.peak_pinned_bytes > max_bytes, None);
            [peak, replayed.waits.to_string(), replayed.fallbacks.to_string()]
        });
        table.line(name, [mib(max_bytes)].into_iter().chain(cells));
    }
    let sums = (0..2).flat_map(|at| {
        let sum = |figure: fn(&Replayed) -> u64| {
            column(rows, at).filter(|replayed| is_of_some_size(replayed)).map(figure).sum::<u64>().to_string()
        };
        [String::new(), sum(|replayed| replayed.waits), sum(|replayed| replayed.fallbacks)]
    });
    table.line("**sum over 16 MiB**", [String::new()].into_iter().chain(sums));
    table.0
}

/// What every workload cost under one setting.
fn column<'a>(rows: &'a [Row<'_>], at: usize) -> impl Iterator<Item = &'a Replayed> {
    rows.iter().map(move |row| &row.replays[at])
}

/// A table with a name in front of each line and numbers behind it.
struct Table(String);

impl Table {
    fn new(heads: impl Iterator<Item = String>) -> Self {
        let mut table = Self(String::new());
        let heads: Vec<String> = heads.collect();
        let rules = vec!["---:".to_owned(); heads.len()];
        table.line("workload", heads.into_iter());
        table.line("---", rules.into_iter());
        table
    }

    fn line(&mut self, name: &str, cells: impl Iterator<Item = String>) {
        let cells: Vec<String> = cells.collect();
        let _ = writeln!(self.0, "| {name} | {} |", cells.join(" | ")); // Writing to a string does not fail.
    }
}

#[allow(clippy::cast_precision_loss)] // Page-locks are few.
fn locks(page_locks: u64, target: Option<f64>) -> String {
    let most = target.map(|target| (target * MORE_PAGE_LOCKS).max(target + FEW_PAGE_LOCKS));
    beside(page_locks.to_string(), most.is_some_and(|most| page_locks as f64 > most), target.map(|t| format!("{t}")))
}

fn peak(ratio: f64, target: Option<f64>) -> String {
    let missed = target.is_some_and(|target| ratio > target * HIGHER_PEAK);
    beside(format!("{ratio:.3}"), missed, target.map(|target| format!("{target:.2}")))
}

fn beside(figure: String, missed: bool, target: Option<String>) -> String {
    let figure = if missed { format!("**{figure}**") } else { figure };
    target.map_or(figure.clone(), |target| format!("{figure} ({target})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_beyond_its_tolerance_is_bold() {
        assert_eq!(locks(7, None), "7");
        assert_eq!([locks(10, Some(7.0)), locks(11, Some(7.0))], ["10 (7)", "**11** (7)"]);
        assert_eq!([locks(1100, Some(1000.0)), locks(1101, Some(1000.0))], ["1100 (1000)", "**1101** (1000)"]);
        assert_eq!([peak(1.03, Some(1.0)), peak(1.031, Some(1.0))], ["1.030 (1.00)", "**1.031** (1.00)"]);
    }
}
