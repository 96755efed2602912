//! What a trace shows over its time, recorded or replayed, and the figures of it.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use pinpool_observe::judge::words::{counted, seconds};

use super::figure::{Axis, Figure, Report, Series, Shape, Table, Unit, Verdict, number};
use crate::why::Said;
use pinpool_cli::table::grouped;

/// Parts of the x axis of which each has one sum of lost time.
const LOST_PARTS: usize = 60;
/// Rows of sizes; more are combined by powers of two.
const SIZES_MAX: usize = 20;
/// Verdicts that are printed.
const VERDICTS_MAX: usize = 4;

/// Marks of one kind are at least one part of so many of the width apart.
const MARKS_APART: f64 = 150.0;
/// Less lost time is not drawn, in seconds.
const LOST_MIN: f64 = 1e-3;

/// What time is lost by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Doing {
    Waiting,
    PageLocking,
    Moving,
}

impl Doing {
    const ALL: [(Self, &'static str); 3] =
        [(Self::Waiting, "waiting"), (Self::PageLocking, "pinning"), (Self::Moving, "moving")];
}

/// The pool's state at one place.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Sample {
    /// Seconds, or gets for a trace without time.
    pub(super) x: f64,
    pub(super) in_use_bytes: u64,
    pub(super) in_flight_bytes: u64,
    pub(super) idle_bytes: u64,
    pub(super) pinned_bytes: u64,
    pub(super) ceiling_bytes: Option<u64>,
    pub(super) gets: u64,
    pub(super) hits: u64,
    pub(super) evicted: u64,
    /// Calls that pinned memory.
    pub(super) pins: u64,
}

/// All that is drawn of a trace.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    pub(super) has_time: bool,
    pub(super) samples: Vec<Sample>,
    /// Pools with their limits over the x axis.
    pub(super) limits: Vec<(String, Vec<(f64, f64)>)>,
    /// Each raise of these, with the limit behind it.
    pub(super) raises: Vec<(f64, f64)>,
    /// Gets and bytes of each size.
    pub(super) traffic: BTreeMap<u64, (u64, u64)>,
    /// Nanoseconds of each call.
    pub(super) pins: Vec<u64>,
    pub(super) unpins: Vec<u64>,
    pub(super) notes: Vec<String>,
    /// What the clock showed at 0, in seconds since 1970.
    pub(super) clock: Option<f64>,
    /// Whether it is of a process that runs: then there are no sizes.
    pub(super) is_live: bool,
    /// Time that was lost: where, what it was lost by, and seconds.
    pub(super) lost: Vec<(f64, Doing, f64)>,
    /// Gets that waited, page-locked or moved memory, where it is known.
    pub(super) slow_gets: Option<u64>,
    /// Who holds what: lanes, and what is still out at the end.
    pub(super) held: (Vec<Figure>, Option<Table>),
    /// What the judge says of each pool, the worst first.
    pub(super) said: Vec<Said>,
}

impl Timeline {
    pub(super) fn report(self, source: String) -> Report {
        let (verdicts, facts) = (self.verdicts(), self.facts());
        let mut figures = vec![self.bytes_figure()];
        figures.extend(self.lost_figure());
        figures.extend(self.limit_figure());
        let sizes = Some(self.sizes_table()).filter(|_| !self.is_live);
        let calls = self.calls_table();
        let Self { notes, held: (lanes, left), .. } = self;
        figures.extend(lanes);
        let tables = left.into_iter().chain(sizes).chain(calls).collect();
        Report { title: "The pool in this trace", source, verdicts, facts, figures, notes, tables }
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let several = self.said.len() > 1;
        let verdict = |said: &Said| Verdict {
            name: if several { format!("{}: {}", said.pool, said.cause) } else { said.cause.clone() },
            text: sentences(said),
            is_alarm: said.is_alarm,
        };
        let alarms = self.said.iter().filter(|said| said.is_alarm).count();
        let mut verdicts: Vec<_> = self.said.iter().take(alarms.clamp(1, VERDICTS_MAX)).map(verdict).collect();
        if verdicts.is_empty() {
            let text = "There are too few gets to judge.".to_owned();
            verdicts.push(Verdict { name: "unknown".to_owned(), text, is_alarm: false });
        }
        verdicts
    }

    pub(super) fn axis(&self) -> Axis {
        let axis = if self.has_time { Axis::new("time", Unit::Seconds) } else { Axis::new("gets", Unit::Count) };
        Axis { clock: self.clock, ..axis }
    }

    fn series(&self, name: &str, shape: Shape, value: impl Fn(&Sample) -> Option<u64>) -> Series {
        Series::new(name, shape, self.samples.iter().filter_map(|at| Some((at.x, value(at)? as f64))))
    }

    fn bytes_figure(&self) -> Figure {
        let used = |sample: &Sample| sample.in_use_bytes + sample.in_flight_bytes + sample.idle_bytes;
        let mut series = vec![
            self.series("in use", Shape::Area, |sample| Some(sample.in_use_bytes)),
            self.series("in flight", Shape::Area, |sample| Some(sample.in_flight_bytes)),
            self.series("idle", Shape::Area, |sample| Some(sample.idle_bytes)),
            self.series("free", Shape::Area, |sample| Some(sample.pinned_bytes.saturating_sub(used(sample)))),
        ];
        let peak = |value: &dyn Fn(&Sample) -> u64| self.samples.iter().map(value).max().unwrap_or(0) as f64;
        let pinned = peak(&|sample| sample.pinned_bytes);
        let mut words = vec![format!("pinned {}", Unit::Bytes.text(pinned))];
        for (name, value) in [
            ("in use", peak(&|sample| sample.in_use_bytes)),
            ("idle", peak(&|sample| sample.idle_bytes)),
            ("in flight", peak(&|sample| sample.in_flight_bytes)),
        ] {
            words.push(format!("{name} {}", Unit::Bytes.text(value)));
        }
        let ceiling = self.samples.iter().rev().find_map(|sample| sample.ceiling_bytes);
        // A limit far above everything would press all areas to the bottom.
        let is_far = ceiling.is_some_and(|ceiling| ceiling as f64 > pinned.max(1.0) * 4.0);
        if ceiling.is_some() && !is_far {
            series.push(self.series("limit", Shape::Steps, |sample| sample.ceiling_bytes));
        }
        series.extend(
            [("wait", Doing::Waiting, Shape::Triangles), ("pin or unpin", Doing::PageLocking, Shape::Crosses)]
                .map(|(name, doing, shape)| Series::new(name, shape, self.marks(doing))),
        );
        words.push(match ceiling {
            Some(bytes) if is_far => format!("limit {}, above the chart", Unit::Bytes.text(bytes as f64)),
            Some(bytes) => format!("limit {} at the end", Unit::Bytes.text(bytes as f64)),
            None => "no limit".to_owned(),
        });
        Figure {
            id: "bytes",
            title: "Bytes by state",
            description: format!("At most: {}.", words.join(", ")),
            x: self.axis(),
            panels: vec![Axis::new("bytes", Unit::Bytes).panel(series)],
        }
    }

    /// Where time was lost by `doing`, at the height of what is pinned then: one mark in each part.
    fn marks(&self, doing: Doing) -> Vec<(f64, f64)> {
        let end = self.samples.last().map_or(0.0, |last| last.x);
        let mut marks: Vec<(f64, f64)> = Vec::new();
        for &(x, of, _) in &self.lost {
            let is_far = marks.last().is_none_or(|last| x - last.0 >= end / MARKS_APART);
            if of == doing && is_far {
                let next =
                    self.samples.partition_point(|sample| sample.x < x).min(self.samples.len().saturating_sub(1));
                marks.extend(self.samples.get(next).map(|sample| (x, sample.pinned_bytes as f64)));
            }
        }
        marks
    }

    /// Seconds lost in each part of the time; `None` where nothing was.
    fn lost_figure(&self) -> Option<Figure> {
        let end = self.samples.last().map_or(0.0, |last| last.x);
        let sum =
            |doing: Doing| self.lost.iter().filter(|(_, of, _)| *of == doing).map(|(.., seconds)| seconds).sum::<f64>();
        let all = Doing::ALL.map(|(doing, name)| (doing, name, sum(doing)));
        let total: f64 = all.iter().map(|(.., sum)| sum).sum();
        if total < LOST_MIN || end <= 0.0 {
            return None;
        }
        let words: Vec<_> = { all.iter() }
            .filter(|(.., sum)| *sum > 0.0)
            .map(|(_, name, sum)| format!("{} {name}", time_text(*sum)))
            .collect();
        let series = { all.iter() }.filter(|(.., sum)| *sum > 0.0).map(|(doing, name, _)| {
            let mut parts = vec![0.0; LOST_PARTS + 1];
            for (x, _, seconds) in self.lost.iter().filter(|(_, of, _)| of == doing) {
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // At most the number of parts.
                let at = (x / end * LOST_PARTS as f64).max(0.0) as usize;
                parts[at.min(LOST_PARTS - 1)] += seconds;
            }
            // What falls on the end counts with the last part.
            parts[LOST_PARTS] = parts[LOST_PARTS - 1];
            let points = parts.into_iter().enumerate().map(|(at, lost)| (at as f64 * end / LOST_PARTS as f64, lost));
            Series::new(*name, Shape::Area, points)
        });
        let name = format!("lost in each {LOST_PARTS}th of the time");
        Some(Figure {
            id: "lost",
            title: "Time lost",
            description: format!("Of all threads together {}: {}.", time_text(total), words.join(", ")),
            x: self.axis(),
            panels: vec![Axis::new(name, Unit::Seconds).panel(series.collect())],
        })
    }

    /// `None` if the limit stays and nothing is evicted.
    fn limit_figure(&self) -> Option<Figure> {
        let name = |name| if self.limits.len() > 1 { format!("limit of {name}") } else { "limit".to_owned() };
        let limits = self.limits.iter().map(|(pool, points)| Series::new(name(pool), Shape::Steps, points.clone()));
        let raises = Series::new("raise", Shape::Triangles, self.raises.clone());
        let evictions = self.series("evictions", Shape::Steps, |sample| Some(sample.evicted));
        let evicted = self.samples.last().map_or(0, |sample| sample.evicted);
        let is_flat = self.limits.iter().all(|(_, points)| points.windows(2).all(|pair| pair[0].1 == pair[1].1));
        if is_flat && evicted == 0 {
            return None;
        }
        let in_words = |(first, last): (f64, f64)| match first.total_cmp(&last) {
            Ordering::Equal => format!("stays at {}", number(first)),
            _ => format!("goes from {} to {}", number(first), number(last)),
        };
        let ends = self.limits.iter().filter_map(|(_, points)| Some((points.first()?.1, points.last()?.1)));
        let mut ends: Vec<_> = ends.map(in_words).collect();
        ends.dedup();
        let ends = if ends.is_empty() { String::new() } else { format!("The limit {}. ", ends.join("; ")) };
        let raises_marked = match self.raises.len() {
            0 => String::new(),
            raised => format!("{} (triangles), ", counted(raised as u64, "raise")),
        };
        let description = format!("{ends}{raises_marked}{}.", counted(evicted, "eviction"));
        let panels = vec![
            Axis::new("limit on idle buffers", Unit::Count).panel(limits.chain([raises]).collect()),
            Axis::new("evictions so far", Unit::Count).panel(vec![evictions]),
        ];
        Some(Figure { id: "limit", title: "Limit and evictions", description, x: self.axis(), panels })
    }

    /// Each size that was requested, or each power of two if there are many.
    fn sizes_table(&self) -> Table {
        let name = |bytes: u64| Unit::Bytes.text(bytes as f64);
        let is_many = self.traffic.len() > SIZES_MAX;
        let mut sizes: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for (&size, &(gets, bytes)) in &self.traffic {
            let sum = sizes.entry(if is_many { 1 << size.max(1).ilog2() } else { size }).or_default();
            *sum = (sum.0 + gets, sum.1.saturating_add(bytes));
        }
        let all: u64 = sizes.values().map(|(_, bytes)| bytes).sum();
        let row = |(size, (gets, bytes)): (u64, (u64, u64))| {
            let to = if is_many { format!(" to {}", name(size.saturating_mul(2))) } else { String::new() };
            let share = percent(bytes, all).map_or_else(|| "-".to_owned(), |share| format!("{} %", number(share)));
            [format!("{}{to}", name(size)), grouped(gets), name(bytes), share]
        };
        let rows = sizes.into_iter().map(row).collect();
        Table {
            is_open: false,
            name: "Sizes by traffic".to_owned(),
            head: ["size", "requests", "bytes", "share"],
            rows,
        }
    }

    fn calls_table(&self) -> Option<Table> {
        let row = |(name, times): (&str, &Vec<u64>)| {
            let mut sorted = times.clone();
            sorted.sort_unstable();
            let at = |at: usize| Some(Unit::Seconds.text(*sorted.get(at)? as f64 * 1e-9));
            let (half, longest) = (at(sorted.len().saturating_sub(1) / 2)?, at(sorted.len().checked_sub(1)?)?);
            Some([name.to_owned(), grouped(sorted.len() as u64), half, longest])
        };
        let rows: Vec<_> = [("pin", &self.pins), ("unpin", &self.unpins)].into_iter().filter_map(row).collect();
        let head = ["call", "count", "median", "longest"];
        (!rows.is_empty()).then(|| Table { is_open: false, name: "Pin and unpin calls".to_owned(), head, rows })
    }

    fn facts(&self) -> Vec<(&'static str, String)> {
        let last = self.samples.last().copied().unwrap_or_default();
        let peak = |value: fn(&Sample) -> u64| self.samples.iter().map(value).max().unwrap_or(0);
        let bytes = |bytes: u64| Unit::Bytes.text(bytes as f64);
        let mut facts = vec![
            ("gets", grouped(last.gets)),
            ("waited, pinned or moved", self.slow_gets.map_or_else(|| "?".to_owned(), grouped)),
            (
                "hit rate",
                percent(last.hits, last.gets).map_or_else(|| "?".to_owned(), |rate| format!("{} %", number(rate))),
            ),
            ("pin calls", grouped(last.pins)),
            ("pinned at most", bytes(peak(|sample| sample.pinned_bytes))),
            ("in use at most", bytes(peak(|sample| sample.in_use_bytes))),
        ];
        if self.slow_gets.is_none() {
            facts.remove(1);
        }
        if self.has_time {
            facts.push(("lasts", Unit::Seconds.text(last.x)));
        }
        facts
    }
}

/// What is said of a pool, a line each, without its cause, which stands before it.
pub(super) fn sentences(said: &Said) -> String {
    let sentence = |line: &String| {
        let line = line.trim();
        let line = line.strip_prefix(said.cause.as_str()).and_then(|rest| rest.strip_prefix(": ")).unwrap_or(line);
        let begin = line.chars().next().filter(|_| !line.starts_with("export "));
        begin.map_or_else(|| line.to_owned(), |begin| begin.to_uppercase().chain(line.chars().skip(1)).collect())
    };
    said.lines.iter().map(sentence).collect::<Vec<_>>().join("\n")
}

fn percent(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64 * 100.0)
}

/// Time lost, as the judge says it.
fn time_text(time: f64) -> String {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 0; saturates.
    seconds((time * 1e9) as u64)
}
