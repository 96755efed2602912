//! What a trace shows over its time, recorded or replayed, and the figures of it.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use pinpool_observe::judge::words::{counted, seconds};

use super::bars::{latency_bars, percentile, traffic_rows};
use super::figure::{Axis, Bar, Figure, Panel, Report, Series, Shape, Table, Unit, Verdict, number};
use crate::why::Said;
use pinpool_cli::table::grouped;

/// Parts of the x axis of which each has one hit rate.
const HIT_RATE_PARTS: usize = 60;
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
        [(Self::Waiting, "waiting"), (Self::PageLocking, "page-locking"), (Self::Moving, "moving")];
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
        let sizes = Some(self.traffic_figure()).filter(|_| !self.is_live);
        let rest = sizes.into_iter().chain(self.latency_figure()).chain(self.limit_figure());
        let rest: Vec<_> = rest.chain([self.hit_rate_figure()]).collect();
        let Self { notes, held: (lanes, table), .. } = self;
        figures.extend(lanes.into_iter().chain(rest));
        let tables = table.into_iter().collect();
        Report {
            title: "The pool in this trace",
            source,
            verdicts,
            facts,
            figures,
            notes,
            tables,
            refresh_seconds: None,
        }
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
        // A ceiling far above everything would press all areas to the bottom.
        let is_far = ceiling.is_some_and(|ceiling| ceiling as f64 > pinned.max(1.0) * 4.0);
        if ceiling.is_some() && !is_far {
            series.push(self.series("ceiling", Shape::Steps, |sample| sample.ceiling_bytes));
        }
        series.extend(
            [("wait", Doing::Waiting, Shape::Triangles), ("page-lock", Doing::PageLocking, Shape::Crosses)]
                .map(|(name, doing, shape)| Series::new(name, shape, self.marks(doing))),
        );
        words.push(match ceiling {
            Some(bytes) if is_far => format!("ceiling {}, which is above the figure", Unit::Bytes.text(bytes as f64)),
            Some(bytes) => format!("ceiling {} at the end", Unit::Bytes.text(bytes as f64)),
            None => "no ceiling".to_owned(),
        });
        Figure {
            id: "bytes",
            title: "Bytes by state",
            description: format!("At most: {}.", words.join(", ")),
            x: self.axis(),
            panels: vec![Panel::Lines { y: Axis::new("bytes", Unit::Bytes), series, is_lane: false }],
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
            let mut parts = vec![0.0; HIT_RATE_PARTS + 1];
            for (x, _, seconds) in self.lost.iter().filter(|(_, of, _)| of == doing) {
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // At most the number of parts.
                let at = (x / end * HIT_RATE_PARTS as f64).max(0.0) as usize;
                parts[at.min(HIT_RATE_PARTS - 1)] += seconds;
            }
            // What falls on the end counts with the last part.
            parts[HIT_RATE_PARTS] = parts[HIT_RATE_PARTS - 1];
            let points =
                parts.into_iter().enumerate().map(|(at, lost)| (at as f64 * end / HIT_RATE_PARTS as f64, lost));
            Series::new(*name, Shape::Area, points)
        });
        let name = format!("lost in each {HIT_RATE_PARTS}th of the time");
        Some(Figure {
            id: "lost",
            title: "Time lost",
            description: format!("Of all threads together {}: {}.", time_text(total), words.join(", ")),
            x: self.axis(),
            panels: vec![Panel::Lines { series: series.collect(), y: Axis::new(name, Unit::Seconds), is_lane: false }],
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
        Some(Figure::limit(description, self.axis(), limits.chain([raises]).collect(), vec![evictions]))
    }

    fn hit_rate_figure(&self) -> Figure {
        let points = hit_rates(&self.samples);
        let (gets, hits) = self.samples.last().map_or((0, 0), |last| (last.gets, last.hits));
        let description = format!(
            "{} % of {} gets were served by an idle buffer. Each value is of a {HIT_RATE_PARTS}th of the figure's width.",
            percent(hits, gets).map_or_else(|| "?".to_owned(), number),
            grouped(gets)
        );
        Figure::hit_rate(description, self.axis(), vec![Series::new("hit rate", Shape::Line, points)])
    }

    fn traffic_figure(&self) -> Figure {
        let rows = traffic_rows(&self.traffic);
        let largest = rows.iter().max_by_key(|(_, _, bytes)| *bytes);
        let largest = largest.map_or_else(String::new, |(name, gets, bytes)| {
            format!(
                ": most bytes, {}, were asked for in {} of {name}",
                Unit::Bytes.text(*bytes as f64),
                gets_in_words(*gets)
            )
        });
        let bar = |(name, gets, bytes): &(String, u64, u64)| Bar {
            name: name.clone(),
            value: *bytes as f64,
            text: format!("{}, {}", Unit::Bytes.text(*bytes as f64), gets_in_words(*gets)),
        };
        let (name, bars) = ("size, and bytes asked for in it".to_owned(), rows.iter().map(bar).collect());
        Figure {
            id: "sizes",
            title: "Sizes by traffic",
            description: format!("Bytes asked for in each size over the trace{largest}."),
            x: self.axis(),
            panels: vec![Panel::Bars { name, bars }],
        }
    }

    fn latency_figure(&self) -> Option<Figure> {
        if self.pins.is_empty() && self.unpins.is_empty() {
            return None;
        }
        let calls = |name: &str, times: &[u64]| {
            let mut sorted = times.to_vec();
            sorted.sort_unstable();
            let at = |share: f64| Unit::Seconds.text(percentile(&sorted, share) * 1e-9);
            if sorted.is_empty() {
                return format!("No {name}.");
            }
            if sorted.len() == 1 {
                return format!("1 call that {name}s, which took {}.", at(1.0));
            }
            let calls = grouped(sorted.len() as u64);
            let (half, most, longest) = (at(0.5), at(0.99), at(1.0));
            format!("{calls} calls that {name}: half take up to {half}, 99 % up to {most}, the longest {longest}.")
        };
        let bars = |name: &str, times: &[u64]| Panel::Bars {
            name: format!("calls that {name}, by how long they take"),
            bars: latency_bars(times),
        };
        Some(Figure {
            id: "latency",
            title: "Time to pin and unpin",
            description: [calls("pin", &self.pins), calls("unpin", &self.unpins)].join(" "),
            x: self.axis(),
            panels: vec![bars("pin", &self.pins), bars("unpin", &self.unpins)],
        })
    }

    fn facts(&self) -> Vec<(&'static str, String)> {
        let last = self.samples.last().copied().unwrap_or_default();
        let peak = |value: fn(&Sample) -> u64| self.samples.iter().map(value).max().unwrap_or(0);
        let bytes = |bytes: u64| Unit::Bytes.text(bytes as f64);
        let mut facts = vec![
            ("gets", grouped(last.gets)),
            ("waited, locked or moved", self.slow_gets.map_or_else(|| "?".to_owned(), grouped)),
            (
                "hit rate",
                percent(last.hits, last.gets).map_or_else(|| "?".to_owned(), |rate| format!("{} %", number(rate))),
            ),
            ("calls that pin", grouped(last.pins)),
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
fn sentences(said: &Said) -> String {
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

fn gets_in_words(gets: u64) -> String {
    if gets == 1 { "1 get".to_owned() } else { format!("{} gets", grouped(gets)) }
}

/// The rate in each part of the x axis that has gets, at the end of the part.
fn hit_rates(samples: &[Sample]) -> Vec<(f64, f64)> {
    let end = samples.last().map_or(0.0, |last| last.x);
    let mut before = Sample::default();
    let mut rates = Vec::new();
    let mut next = end / HIT_RATE_PARTS as f64;
    for (at, sample) in samples.iter().enumerate() {
        let is_last = at + 1 == samples.len();
        if sample.x < next && !is_last {
            continue;
        }
        if let Some(rate) = percent(sample.hits - before.hits, sample.gets - before.gets) {
            rates.push((sample.x, rate));
            before = *sample;
        }
        next = sample.x + end / HIT_RATE_PARTS as f64;
    }
    rates
}
