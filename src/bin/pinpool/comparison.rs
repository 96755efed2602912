//! Presets and sources beside each other, and the default preset under a ceiling: Markdown for a report.
//!
//! Owns which runs are compared, and how far from its target a figure may be. A target stands in parentheses behind its
//! figure; a figure that misses it is bold.

use std::collections::HashMap;
use std::error::Error;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use pinpool::Preset::{Adaptive, Tensorflow};
use pinpool::Rounding::{Eighths, Exact, Pow2};
use pinpool::trace::{Replay, Replayed, SourceKind, TraceError};

use crate::replay::{Named, ceiling_bytes};
use crate::replayed::{geometric_mean, is_of_some_size, mib, worst_ratio};

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
    Ok(format!("{}\n{}", presets(&free, &targets), under_the_ceiling(&ceiled)))
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

fn presets(rows: &[Row<'_>], targets: &Targets) -> String {
    let mut text = String::new();
    let mut line = |cells: &[String]| {
        let _ = writeln!(text, "| {} |", cells.join(" | ")); // Writing to a string does not fail.
    };
    let heads = [
        "workload",
        "gets",
        "asked MiB",
        "adaptive: page-locks",
        "late",
        "peak / asked",
        "mean MiB",
        "60 s MiB",
        "with walls: page-locks",
        "late",
        "peak / asked",
        "mean MiB",
        "60 s MiB",
        "tensorflow exact: page-locks",
        "late",
        "peak / asked",
        "tensorflow pow2: page-locks",
        "late",
        "peak / asked",
    ];
    line(&heads.map(str::to_owned));
    line(&heads.map(|head| if head == "workload" { "---" } else { "---:" }.to_owned()));
    for Row { name, replays } in rows {
        let target = targets.get(*name);
        let mut cells = vec![(*name).to_owned(), replays[0].gets.to_string(), mib(replays[0].peak_requested_bytes)];
        for (at, replayed) in replays.iter().enumerate() {
            let target = target.filter(|_| at < 2);
            let late_target = target.filter(|_| at == 0).map(|target| target.late_page_locks);
            cells.push(locks(replayed.page_locks, target.map(|target| target.page_locks[at])));
            cells.push(locks(replayed.late_page_locks, late_target));
            cells.push(peak(replayed.peak_ratio(), target.map(|target| target.peak_ratio[at])));
            if at < 2 {
                cells.extend([replayed.mean_pinned_bytes, replayed.pinned_after_60s_bytes].map(mib));
            }
        }
        line(&cells);
    }
    let of = |at: usize| rows.iter().map(move |row| &row.replays[at]);
    let summary = |name: &str, of_locks: &dyn Fn(usize) -> [String; 2], of_peaks: &dyn Fn(usize) -> String| {
        let mut cells = vec![format!("**{name}**"), String::new(), String::new()];
        for at in 0..4 {
            cells.extend(of_locks(at));
            cells.push(of_peaks(at));
            cells.extend((at < 2).then(|| [String::new(), String::new()]).into_iter().flatten());
        }
        cells
    };
    let none = |_| [String::new(), String::new()];
    let sums = |at| {
        let sum = |figure: fn(&Replayed) -> u64| of(at).map(figure).sum::<u64>().to_string();
        [sum(|replayed| replayed.page_locks), sum(|replayed| replayed.late_page_locks)]
    };
    line(&summary("sum", &sums, &|_| String::new()));
    line(&summary("geometric mean", &none, &|at| format!("{:.3}", geometric_mean(of(at).map(Replayed::peak_ratio)))));
    line(&summary("worst over 16 MiB", &none, &|at| format!("{:.2}", worst_ratio(of(at)))));
    text
}

fn under_the_ceiling(rows: &[Row<'_>]) -> String {
    let mut text = String::from(
        "| workload | ceiling MiB | adaptive: peak MiB | waits | fallbacks | with walls: peak MiB | waits | fallbacks |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n",
    );
    for Row { name, replays } in rows {
        let max_bytes = replays[0].max_bytes.unwrap_or(u64::MAX);
        let _ = write!(text, "| {name} | {} |", mib(max_bytes));
        for replayed in replays {
            let passed = if replayed.peak_pinned_bytes > max_bytes { " **passed**" } else { "" };
            let peak = mib(replayed.peak_pinned_bytes);
            let _ = write!(text, " {peak}{passed} | {} | {} |", replayed.waits, replayed.fallbacks);
        }
        text.push('\n');
    }
    let sum = |at: usize, figure: fn(&Replayed) -> u64| {
        rows.iter().map(|row| &row.replays[at]).filter(|r| is_of_some_size(r)).map(figure).sum::<u64>()
    };
    let _ = write!(text, "| **sum over 16 MiB** | |");
    for at in 0..2 {
        let _ =
            write!(text, " | {} | {} |", sum(at, |replayed| replayed.waits), sum(at, |replayed| replayed.fallbacks));
    }
    text + "\n"
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
