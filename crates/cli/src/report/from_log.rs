//! The figures of a log.

use super::charts::verdicts;
use super::figure::{Axis, Figure, MARKS_MAX, Report, Series, Shape, Table, Unit, number};
use crate::why::lines::Log;
use crate::why::lines::curve::{Curve, RaisePoint};
use crate::why::of_log;
use pinpool_cli::table::grouped;

/// Pools that are drawn: lines beyond these cannot be told apart.
const POOLS_MAX: usize = 4;
/// Verdicts that are printed.
const VERDICTS_MAX: usize = 8;
/// Rows of the table of raises.
const ROWS_MAX: usize = 500;

pub(super) fn report(name: &str, log: &Log) -> Report {
    let drawn = drawn_pools(log);
    let figures = vec![limit_figure(log, &drawn), hit_rate_figure(log, &drawn)];
    let (printed, silent) = raises(log);
    let version = log.tensorflow.map_or_else(String::new, |version| format!(", of TensorFlow {version}"));
    let messages = log.messages;
    let source = format!("{name}: {} messages in {} lines{version}", grouped(messages), grouped(log.lines));
    let mut notes = vec![
        "Counters of the log begin again at each raise. The gets of all windows that the log shows are added; those of windows \
         that it does not show are not, so a place on the x axis is a lower bound."
            .to_owned(),
    ];
    if silent > 0 {
        notes.push(
            "Raises that were not printed are known from the limits of the lines around them, and are spread evenly between \
             these."
                .to_owned(),
        );
    }
    if log.curves.len() > drawn.len() {
        let (all, drawn) = (log.curves.len(), drawn.len());
        notes.push(format!(
            "The log shows {all} pools; drawn are the {drawn} with the most lines. `pinpool why --lines` lists all."
        ));
    }
    if printed + silent > MARKS_MAX {
        notes.push(format!("Of each pool's raises at most the first {} are marked.", grouped(MARKS_MAX as u64)));
    }
    if let Some(stopped) = &log.stopped {
        notes.push(format!("The log is not whole: {stopped}."));
    }
    if log.cut > 0 {
        notes.push(format!("{} messages are cut off or damaged and not used.", grouped(log.cut)));
    }
    notes.push("The log has no bytes, sizes or pin times: `PINPOOL_TRACE` records them.".to_owned());
    Report {
        title: "The pool in this log",
        source,
        verdicts: verdicts(&of_log(log), VERDICTS_MAX),
        facts: facts(log, printed, silent),
        figures,
        notes,
        tables: table(log).into_iter().collect(),
    }
}

/// Numbers of the pools with the most lines.
fn drawn_pools(log: &Log) -> Vec<usize> {
    let mut pools: Vec<usize> = (0..log.curves.len()).collect();
    let lines = |&pool: &usize| log.curves[pool].checks.len() + log.curves[pool].raises.len();
    pools.sort_by_key(|pool| std::cmp::Reverse(lines(pool)));
    pools.truncate(POOLS_MAX);
    pools.sort_unstable();
    pools
}

/// Raises printed and not printed.
fn raises(log: &Log) -> (usize, usize) {
    let all = || log.curves.iter().flat_map(|curve| &curve.raises);
    let printed = all().filter(|raise| raise.is_printed).count();
    (printed, all().count() - printed)
}

fn facts(log: &Log, printed: usize, silent: usize) -> Vec<(&'static str, String)> {
    let last = log.curves.iter().rev().find_map(|curve| curve.checks.last());
    let gets: u64 = log.curves.iter().filter_map(|curve| curve.checks.last()).map(|check| check.gets).sum();
    let limit = match log.curves.as_slice() {
        [curve] => curve.limit,
        _ => None,
    };
    let mut facts = vec![
        ("gets, at least", grouped(gets)),
        ("raises printed", grouped(printed as u64)),
        ("raises not printed", grouped(silent as u64)),
    ];
    facts.extend(limit.map(|limit| ("limit at the end", format!("{} buffers", grouped(limit)))));
    let hit_rate = last.map(|check| hit_percent(check.unsatisfied_rate)).filter(|rate| rate.is_finite());
    facts.extend(hit_rate.map(|rate| ("hit rate at the end", format!("{} %", number(rate)))));
    facts.push(("pools", grouped(log.curves.len() as u64)));
    facts
}

fn hit_percent(unsatisfied_rate: f64) -> f64 {
    (1.0 - unsatisfied_rate) * 100.0
}

/// The x axis: gets, or raises where the log has nothing else. Logarithmic if most raises would be in one place otherwise.
fn axis(log: &Log) -> Axis {
    let has_gets = log.curves.iter().any(|curve| !curve.checks.is_empty());
    let mut axis = Axis::new(if has_gets { "gets" } else { "raises" }, Unit::Count);
    let end = log.curves.iter().filter_map(|curve| curve.checks.last()).map(|check| check.gets).max().unwrap_or(0);
    let raises = || log.curves.iter().flat_map(|curve| &curve.raises);
    let early = raises().filter(|raise| raise.gets < end / 50).count();
    axis.is_logarithmic = has_gets && early > 2 && early * 2 > raises().count();
    axis
}

/// The place of each raise on the x axis.
fn places(curve: &Curve) -> Vec<(f64, &RaisePoint)> {
    let is_counted = curve.checks.is_empty();
    let raises = (1_u32..).zip(&curve.raises);
    raises.map(|(number, raise)| (if is_counted { number.into() } else { raise.gets as f64 }, raise)).collect()
}

fn series_name(log: &Log, pool: usize, what: &str) -> String {
    if log.curves.len() > 1 { format!("{what}, pool {}", pool + 1) } else { what.to_owned() }
}

fn limit_figure(log: &Log, drawn: &[usize]) -> Figure {
    let (mut limits, mut evictions) = (Vec::new(), Vec::new());
    let (mut printed, mut silent) = (Vec::new(), Vec::new());
    for &pool in drawn {
        let curve = &log.curves[pool];
        limits.push(Series::new(series_name(log, pool, "limit"), Shape::Steps, limit_points(curve)));
        let evicted = curve.checks.iter().map(|check| (check.gets as f64, check.evicted as f64));
        evictions.push(Series::new(series_name(log, pool, "evictions"), Shape::Line, evicted));
        for (x, raise) in places(curve) {
            let marks = if raise.is_printed { &mut printed } else { &mut silent };
            marks.push((x, raise.to as f64));
        }
    }
    let description = limit_words(log, drawn, printed.len(), silent.len());
    limits.push(Series::new("raise", Shape::Triangles, printed));
    limits.push(Series::new("raise that was not printed", Shape::Crosses, silent));
    let mut panels = vec![Axis::new("limit on idle buffers", Unit::Count).panel(limits)];
    if evictions.iter().any(|series| !series.points.is_empty()) {
        panels.push(Axis::new("evictions so far", Unit::Count).panel(evictions));
    }
    Figure { id: "limit", title: "Limit and evictions", description, x: axis(log), panels }
}

/// The limit at each message and raise, in order of the x axis.
fn limit_points(curve: &Curve) -> Vec<(f64, f64)> {
    let checks = curve.checks.iter().filter_map(|check| Some((check.gets as f64, check.limit? as f64)));
    let raises = places(curve).into_iter().map(|(x, raise)| (x, raise.to as f64));
    let mut points: Vec<_> = checks.chain(raises).collect();
    // A limit never falls, so at one place the lower one is first.
    points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    points
}

fn limit_words(log: &Log, drawn: &[usize], printed: usize, silent: usize) -> String {
    let mut words = Vec::new();
    for &pool in drawn {
        let points = limit_points(&log.curves[pool]);
        let (Some(first), Some(last)) = (points.first(), points.last()) else { continue };
        let (first, last) = (number(first.1), number(last.1));
        let name = series_name(log, pool, "the limit");
        let change = if first == last {
            format!("{name} stays at {last}")
        } else {
            format!("{name} goes from {first} to {last}")
        };
        let evicted = log.curves[pool].checks.last().map_or_else(String::new, |check| {
            format!(" over {} gets, with {} evictions", grouped(check.gets), grouped(check.evicted))
        });
        words.push(format!("{change}{evicted}"));
    }
    let mut text = words.join("; ");
    if let Some(first) = text.get(..1).map(str::to_uppercase) {
        text.replace_range(..1, &first);
    }
    let separator = if text.is_empty() { "" } else { ". " };
    let printed = if printed == 1 { "1 raise was".to_owned() } else { format!("{printed} raises were") };
    let were = if silent == 1 { "was" } else { "were" };
    format!("{text}{separator}{printed} printed (filled), {silent} {were} not (hollow).")
}

fn hit_rate_figure(log: &Log, drawn: &[usize]) -> Figure {
    let mut series = Vec::new();
    let mut words = Vec::new();
    for &pool in drawn {
        let checks = log.curves[pool].checks.iter();
        let points: Vec<_> = checks
            .map(|check| (check.gets as f64, hit_percent(check.unsatisfied_rate)))
            .filter(|(_, rate)| rate.is_finite())
            .collect();
        let name = series_name(log, pool, "hit rate");
        if let (Some(first), Some(last)) = (points.first(), points.last()) {
            words.push(format!("{name}: {} % at the first line, {} % at the last", number(first.1), number(last.1)));
        }
        series.push(Series::new(name, Shape::Line, points));
    }
    if words.is_empty() {
        words.push("The log has no line with a rate".to_owned());
    }
    let description = format!("{}. Each value is of the gets since the raise before.", words.join("; "));
    let panels = vec![Axis::new("requests served by an idle buffer", Unit::Percent).panel(series)];
    Figure { id: "hit-rate", title: "Hit rate", description, x: axis(log), panels }
}

fn table(log: &Log) -> Option<Table> {
    let raise = |(at, curve): (usize, &Curve)| -> Vec<[String; 4]> {
        let row = |raise: &RaisePoint| {
            let printed = if raise.is_printed { "yes" } else { "no" };
            [(at + 1).to_string(), grouped(raise.gets), grouped(raise.to), printed.to_owned()]
        };
        curve.raises.iter().map(row).collect()
    };
    let mut rows: Vec<_> = log.curves.iter().enumerate().flat_map(raise).collect();
    let name = match rows.len() {
        0 => return None,
        all if all > ROWS_MAX => format!("Raises: the first {ROWS_MAX} of {all}"),
        all => format!("Raises: {all}"),
    };
    rows.truncate(ROWS_MAX);
    Some(Table { is_open: false, name, head: ["pool", "gets", "limit raised to", "printed"], rows })
}
