//! Presets and sources side by side, and the default preset under a ceiling: Markdown for a report.
//!
//! Owns which settings are compared and how far a figure may be from its target. A target stands in parentheses behind its
//! figure; a figure that misses it, or a peak over its ceiling, is bold.

use std::collections::HashMap;
use std::error::Error;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use pinpool::Preset::{Adaptive, TensorFlow};
use pinpool::Rounding::{self, Eighths, Exact, Pow2};
use pinpool_replay::{Replay, ReplayReport, SourceKind, Workload};

use super::summary::{ceiling_bytes, counts_for_worst, geometric_mean, in_mib, mib, worst_ratio};
use crate::files::{named, why};

/// The ceiling of the last table, as a multiple of the requested peak.
const CEILING_RATIO: f64 = 1.25;
/// Tolerances, as factors of a target ...
const PAGE_LOCKS_FACTOR: f64 = 1.10;
const PEAK_FACTOR: f64 = 1.03;
/// ... and as page-locks: a tenth of a small target is less than one.
const PAGE_LOCKS_MARGIN: f64 = 3.0;

/// Expected figures of a workload: of the adaptive preset over a virtual range and over discrete regions. Late page-locks and
/// slow gets are those of a virtual range.
#[derive(Debug, Clone, Copy)]
struct Target {
    page_locks: [f64; 2],
    late_page_locks: f64,
    slow_gets: f64,
    peak_ratio: [f64; 2],
}

type Targets = HashMap<String, Target>;

/// One workload under each of the compared settings.
struct ComparedWorkload<'a> {
    name: &'a str,
    replays: Vec<ReplayReport>,
}

pub(super) fn markdown(workloads: &[(String, Workload)], targets: Option<&Path>) -> Result<String, Box<dyn Error>> {
    let targets = targets.map_or_else(|| Ok(Targets::new()), read_targets)?;
    let replay = |preset, rounding: Rounding, source| Replay {
        preset: Some(preset),
        rounding: Some(rounding),
        source,
        ..Replay::default()
    };
    let adaptive = [SourceKind::Virtual, SourceKind::Discrete].map(|source| replay(Adaptive, Eighths, source));
    let tensorflow = [Exact, Pow2].map(|rounding| replay(TensorFlow, rounding, SourceKind::Virtual));
    let unlimited = play(workloads, |_| adaptive.iter().chain(&tensorflow).cloned().collect())?;
    let limited = play(workloads, |workload| {
        let max_bytes = Some(ceiling_bytes(workload, CEILING_RATIO));
        adaptive.iter().map(|replay| Replay { max_bytes, ..replay.clone() }).collect()
    })?;
    let tables = [
        page_locks_and_peaks(&unlimited, &targets),
        over_time(&unlimited),
        moves(&unlimited, &targets),
        under_ceiling(&limited),
    ];
    Ok(tables.join("\n"))
}

fn play(
    workloads: &[(String, Workload)],
    settings: impl Fn(&Workload) -> Vec<Replay>,
) -> Result<Vec<ComparedWorkload<'_>>, String> {
    let compare = |(name, workload): &'_ (String, Workload)| {
        let replays: Result<_, _> = settings(workload).iter().map(|replay| replay.play(workload)).collect();
        replays.map_err(|error| format!("{name}: {error}"))
    };
    workloads.iter().map(|named| Ok(ComparedWorkload { name: &named.0, replays: compare(named)? })).collect()
}

/// Lines of `workload,page-locks,late,peak,slow gets,page-locks,peak`, the last two for discrete regions; `#` begins a comment.
fn read_targets(path: &Path) -> Result<Targets, String> {
    let text = fs::read_to_string(path).map_err(|error| named(path, &why(&error)))?;
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let parse = |line: &str| {
        let (name, numbers) = line.split_once(',').unwrap_or((line, ""));
        let numbers: Result<Vec<f64>, _> = numbers.split(',').map(str::parse).collect();
        match numbers.as_deref() {
            Ok(&[locks, late_page_locks, peak, slow_gets, discrete_locks, discrete_peak]) => {
                let (page_locks, peak_ratio) = ([locks, discrete_locks], [peak, discrete_peak]);
                Ok((name.to_owned(), Target { page_locks, late_page_locks, slow_gets, peak_ratio }))
            }
            _ => Err(format!("{}: `{line}`: not a name and six numbers", path.display())),
        }
    };
    lines.map(parse).collect()
}

/// Column groups of the compared settings, in the order of the replays; the first two have targets.
const SETTINGS: [&str; 4] = ["adaptive", "with walls", "tensorflow exact", "tensorflow pow2"];

fn page_locks_and_peaks(rows: &[ComparedWorkload<'_>], targets: &Targets) -> String {
    let mut table = MarkdownTable::grouped("asked MiB", ["page-locks", "late", "peak / asked"]);
    for ComparedWorkload { name, replays } in rows {
        let target = targets.get(*name);
        let cells = replays.iter().enumerate().flat_map(|(at, replayed)| {
            let target = target.filter(|_| at < 2);
            let late_target = target.filter(|_| at == 0).map(|target| target.late_page_locks);
            [
                page_locks(replayed.page_locks, target.map(|target| target.page_locks[at])),
                page_locks(replayed.late_page_locks, late_target),
                peak(replayed.peak_ratio(), target.map(|target| target.peak_ratio[at])),
            ]
        });
        table.line(name, mib(replays[0].peak_requested_bytes), cells);
    }
    let of_each = |cells: &dyn Fn(usize) -> [String; 3]| (0..SETTINGS.len()).flat_map(cells).collect::<Vec<_>>();
    let none = String::new;
    let sum = |at, figure| sum(rows, at, figure).to_string();
    table.line("**sum**", none(), of_each(&|at| [sum(at, |r| r.page_locks), sum(at, |r| r.late_page_locks), none()]));
    let mean = |at| format!("{:.3}", geometric_mean(column(rows, at).map(ReplayReport::peak_ratio)));
    table.line("**geometric mean**", none(), of_each(&|at| [none(), none(), mean(at)]));
    let worst = |at| format!("{:.3}", worst_ratio(column(rows, at)));
    table.line("**worst over 16 MiB**", none(), of_each(&|at| [none(), none(), worst(at)]));
    table.0
}

fn over_time(rows: &[ComparedWorkload<'_>]) -> String {
    let mut table = MarkdownTable::grouped("gets", ["mean MiB", "60 s later", "hits"]);
    for ComparedWorkload { name, replays } in rows {
        let cells = replays.iter().flat_map(|replayed| {
            let hits = replayed.front_hits.to_string();
            [mib(replayed.mean_pinned_bytes), mib(replayed.pinned_after_60s_bytes), hits]
        });
        table.line(name, replays[0].gets.to_string(), cells);
    }
    let none = String::new;
    let means = (0..SETTINGS.len()).flat_map(|at| {
        let mean = geometric_mean(column(rows, at).map(|replayed| in_mib(replayed.mean_pinned_bytes)));
        [format!("{mean:.1}"), none(), none()]
    });
    table.line("**geometric mean**", none(), means);
    let sums = (0..SETTINGS.len()).flat_map(|at| {
        [none(), mib(sum(rows, at, |r| r.pinned_after_60s_bytes)), sum(rows, at, |r| r.front_hits).to_string()]
    });
    table.line("**sum**", sum(rows, 0, |r| r.gets).to_string(), sums);
    table.0
}

/// What the default preset moves in a virtual range: on the thread of a get, and ahead of it.
fn moves(rows: &[ComparedWorkload<'_>], targets: &Targets) -> String {
    let mut table =
        MarkdownTable::new("slow gets", ["worst ms", "GiB moved by gets", "GiB moved ahead"].map(str::to_owned));
    let gib = |bytes: u64| format!("{:.1}", in_mib(bytes) / 1024.0);
    for ComparedWorkload { name, replays } in rows {
        let replayed = &replays[0];
        let worst = format!("{:.1}", replayed.worst_moves_us as f64 / 1e3);
        let cells = [worst, gib(replayed.moved_bytes), gib(replayed.prepared_bytes)];
        let most = targets.get(*name).map(|target| target.slow_gets);
        let missed = most.is_some_and(|most| replayed.slow_gets as f64 > most);
        table.line(
            name,
            with_target(replayed.slow_gets.to_string(), missed, most.map(|most| format!("{most}"))),
            cells,
        );
    }
    let sums = [sum(rows, 0, |r| r.moved_bytes), sum(rows, 0, |r| r.prepared_bytes)].map(gib);
    let cells = [String::new()].into_iter().chain(sums);
    table.line("**sum**", sum(rows, 0, |r| r.slow_gets).to_string(), cells);
    table.0
}

fn under_ceiling(rows: &[ComparedWorkload<'_>]) -> String {
    let heads = ["adaptive: peak MiB", "waits", "fallbacks", "with walls: peak MiB", "waits", "fallbacks"];
    let mut table = MarkdownTable::new("ceiling MiB", heads.map(str::to_owned));
    for ComparedWorkload { name, replays } in rows {
        let max_bytes = replays[0].max_bytes.unwrap_or(u64::MAX);
        let cells = replays.iter().flat_map(|replayed| {
            let peak = with_target(mib(replayed.peak_pinned_bytes), replayed.peak_pinned_bytes > max_bytes, None);
            [peak, replayed.waits.to_string(), replayed.fallbacks.to_string()]
        });
        table.line(name, mib(max_bytes), cells);
    }
    let sums = (0..2).flat_map(|at| {
        let counted = || column(rows, at).filter(|replayed| counts_for_worst(replayed));
        let [waits, fallbacks] = [counted().map(|r| r.waits).sum::<u64>(), counted().map(|r| r.fallbacks).sum()];
        [String::new(), waits.to_string(), fallbacks.to_string()]
    });
    table.line("**sum over 16 MiB**", String::new(), sums);
    table.0
}

/// Every workload under one setting.
fn column<'a>(rows: &'a [ComparedWorkload<'_>], setting: usize) -> impl Iterator<Item = &'a ReplayReport> {
    rows.iter().map(move |row| &row.replays[setting])
}

fn sum(rows: &[ComparedWorkload<'_>], setting: usize, figure: fn(&ReplayReport) -> u64) -> u64 {
    column(rows, setting).map(figure).sum()
}

/// A table with a name in front of each line and numbers behind it.
struct MarkdownTable(String);

impl MarkdownTable {
    fn new(first: &str, heads: impl IntoIterator<Item = String>) -> Self {
        let mut table = Self(String::new());
        let heads: Vec<String> = heads.into_iter().collect();
        let rule = || "---:".to_owned();
        table.line("workload", first.to_owned(), heads.clone());
        table.line("---", rule(), heads.iter().map(|_| rule()));
        table
    }

    /// With three columns for each of the settings.
    fn grouped(first: &str, [lead, second, third]: [&str; 3]) -> Self {
        Self::new(
            first,
            SETTINGS.iter().flat_map(|setting| [format!("{setting}: {lead}"), second.to_owned(), third.to_owned()]),
        )
    }

    fn line(&mut self, name: &str, first: String, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = [first].into_iter().chain(cells).collect();
        let _ = writeln!(self.0, "| {name} | {} |", cells.join(" | ")); // Writing to a string does not fail.
    }
}

fn page_locks(count: u64, target: Option<f64>) -> String {
    let most = target.map(|target| (target * PAGE_LOCKS_FACTOR).max(target + PAGE_LOCKS_MARGIN));
    with_target(count.to_string(), most.is_some_and(|most| count as f64 > most), target.map(|t| format!("{t}")))
}

fn peak(ratio: f64, target: Option<f64>) -> String {
    let missed = target.is_some_and(|target| ratio > target * PEAK_FACTOR);
    with_target(format!("{ratio:.3}"), missed, target.map(|target| format!("{target:.2}")))
}

fn with_target(figure: String, missed: bool, target: Option<String>) -> String {
    let figure = if missed { format!("**{figure}**") } else { figure };
    target.map_or(figure.clone(), |target| format!("{figure} ({target})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_beyond_their_tolerance_are_bold() {
        assert_eq!(page_locks(7, None), "7");
        assert_eq!([page_locks(10, Some(7.0)), page_locks(11, Some(7.0))], ["10 (7)", "**11** (7)"]);
        assert_eq!(
            [page_locks(1100, Some(1000.0)), page_locks(1101, Some(1000.0))],
            ["1100 (1000)", "**1101** (1000)"]
        );
        assert_eq!([peak(1.03, Some(1.0)), peak(1.031, Some(1.0))], ["1.030 (1.00)", "**1.031** (1.00)"]);
    }
}
