//! What a trace shows over its time, recorded or replayed, and the figures of it.

use std::collections::BTreeMap;

use super::figure::{Axis, Bar, Figure, Panel, Report, Series, Shape, Unit, Verdict, number};
use crate::why::Said;
use pinpool_cli::table::grouped;

/// Parts of the x axis of which each has one hit rate.
const HIT_RATE_PARTS: usize = 60;
/// Verdicts that are printed.
const VERDICTS_MAX: usize = 4;
/// With more classes they are put together by powers of two.
const CLASSES_MAX: usize = 20;

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
    /// With what it shows in words.
    pub(super) map: Option<(Panel, String)>,
    pub(super) notes: Vec<String>,
    /// What the judge says of each pool, the worst first.
    pub(super) said: Vec<Said>,
}

impl Timeline {
    pub(super) fn report(self, source: String) -> Report {
        let mut figures = vec![self.bytes_figure(), self.limit_figure(), self.hit_rate_figure(), self.traffic_figure()];
        figures.extend(self.latency_figure());
        let (verdicts, facts) = (self.verdicts(), self.facts());
        let Self { map, mut notes, .. } = self;
        match map {
            Some((map, description)) => {
                let (x, panels) = (Axis::new("time", Unit::Seconds), vec![map]);
                figures.push(Figure { id: "arena", title: "Map of the memory", description, x, panels });
            }
            None => {
                notes.push("There is no map of the memory: the trace has no addresses of pinned memory.".to_owned())
            }
        }
        Report { title: "The pool in this trace", source, verdicts, facts, figures, notes, table: None }
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let several = self.said.len() > 1;
        let verdict = |said: &Said| Verdict {
            name: if several { format!("{}: {}", said.pool, said.cause) } else { said.cause.clone() },
            text: said.lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(". "),
        };
        let alarms = self.said.iter().filter(|said| said.is_alarm).count();
        let mut verdicts: Vec<_> = self.said.iter().take(alarms.clamp(1, VERDICTS_MAX)).map(verdict).collect();
        if verdicts.is_empty() {
            let text = "There are too few gets to judge.".to_owned();
            verdicts.push(Verdict { name: "unknown".to_owned(), text });
        }
        verdicts
    }

    fn axis(&self) -> Axis {
        if self.has_time { Axis::new("time", Unit::Seconds) } else { Axis::new("gets", Unit::Count) }
    }

    fn series(&self, name: &str, value: impl Fn(&Sample) -> Option<u64>) -> Series {
        Series::new(name, Shape::Steps, self.samples.iter().filter_map(|at| Some((at.x, value(at)? as f64))))
    }

    fn bytes_figure(&self) -> Figure {
        let mut series = vec![
            self.series("pinned", |sample| Some(sample.pinned_bytes)),
            self.series("in use", |sample| Some(sample.in_use_bytes)),
            self.series("idle", |sample| Some(sample.idle_bytes)),
            self.series("in flight", |sample| Some(sample.in_flight_bytes)),
            self.series("ceiling", |sample| sample.ceiling_bytes),
        ];
        let peak = |series: &Series| series.points.iter().map(|point| point.1).fold(0.0, f64::max);
        let mut words: Vec<_> =
            series[..4].iter().map(|series| format!("{} {}", series.name, Unit::Bytes.text(peak(series)))).collect();
        let ceiling = self.samples.iter().rev().find_map(|sample| sample.ceiling_bytes);
        let has_ceiling = ceiling.is_some();
        // A ceiling far above everything would press all lines to the bottom.
        let is_far = ceiling.is_some_and(|ceiling| ceiling as f64 > peak(&series[0]).max(1.0) * 4.0);
        if is_far || !has_ceiling {
            series.pop();
        }
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
            panels: vec![Panel::Lines { y: Axis::new("bytes", Unit::Bytes), series }],
        }
    }

    fn limit_figure(&self) -> Figure {
        let name = |name| if self.limits.len() > 1 { format!("limit of {name}") } else { "limit".to_owned() };
        let limits = self.limits.iter().map(|(pool, points)| Series::new(name(pool), Shape::Steps, points.clone()));
        let raises = Series::new("raise", Shape::Triangles, self.raises.clone());
        let evictions = self.series("evictions", |sample| Some(sample.evicted));
        let evicted = self.samples.last().map_or(0, |sample| sample.evicted);
        let ends = self.limits.iter().filter_map(|(_, points)| Some((points.first()?.1, points.last()?.1)));
        let ends: Vec<_> = ends.map(|(first, last)| format!("from {} to {}", number(first), number(last))).collect();
        let ends = if ends.is_empty() { String::new() } else { format!("The limit goes {}. ", ends.join("; ")) };
        let description = format!("{ends}{} raises (triangles), {} evictions.", self.raises.len(), grouped(evicted));
        Figure::limit(description, self.axis(), limits.chain([raises]).collect(), vec![evictions])
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
            (
                "hit rate",
                percent(last.hits, last.gets).map_or_else(|| "?".to_owned(), |rate| format!("{} %", number(rate))),
            ),
            ("calls that pin", grouped(last.pins)),
            ("pinned at most", bytes(peak(|sample| sample.pinned_bytes))),
            ("in use at most", bytes(peak(|sample| sample.in_use_bytes))),
            ("raises", grouped(self.raises.len() as u64)),
        ];
        if self.has_time {
            facts.push(("lasts", Unit::Seconds.text(last.x)));
        }
        facts
    }
}

fn percent(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64 * 100.0)
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

/// Name, gets and bytes of each size, or of each power of two where there are many sizes.
fn traffic_rows(traffic: &BTreeMap<u64, (u64, u64)>) -> Vec<(String, u64, u64)> {
    let name = |bytes: u64| Unit::Bytes.text(bytes as f64);
    if traffic.len() <= CLASSES_MAX {
        return traffic.iter().map(|(&size, &(gets, bytes))| (name(size), gets, bytes)).collect();
    }
    let mut powers: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    for (&size, &(gets, bytes)) in traffic {
        let sum = powers.entry(size.max(1).ilog2()).or_default();
        *sum = (sum.0 + gets, sum.1.saturating_add(bytes));
    }
    let row = |(power, (gets, bytes)): (u32, (u64, u64))| {
        (format!("{} to {}", name(1 << power), name((1_u64 << power).saturating_mul(2))), gets, bytes)
    };
    powers.into_iter().map(row).collect()
}

/// Calls by powers of two of microseconds.
fn latency_bars(nanoseconds: &[u64]) -> Vec<Bar> {
    let mut counts: BTreeMap<u32, u64> = BTreeMap::new();
    for time in nanoseconds {
        *counts.entry((time / 1_000).checked_ilog2().map_or(0, |power| power + 1)).or_default() += 1;
    }
    let (Some(first), Some(last)) = (counts.keys().next().copied(), counts.keys().next_back().copied()) else {
        return Vec::new();
    };
    let text = |power: u32| Unit::Seconds.text(2_f64.powi(power.try_into().unwrap_or(0)) * 1e-6);
    let bar = |power: u32| {
        let count = counts.get(&power).copied().unwrap_or(0);
        let name =
            if power == 0 { format!("under {}", text(0)) } else { format!("{} to {}", text(power - 1), text(power)) };
        Bar { name, value: count as f64, text: grouped(count) }
    };
    (first..=last).map(bar).collect()
}

/// Takes sorted numbers.
fn percentile(sorted: &[u64], share: f64) -> f64 {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Saturates.
    let at = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(at.saturating_sub(1).min(sorted.len().saturating_sub(1))).map_or(0.0, |&time| time as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_by_powers_of_two_with_the_empty_ones_between() {
        let bars = latency_bars(&[500, 1_500, 1_999, 9_000]);
        let shown: Vec<_> = bars.iter().map(|bar| (bar.name.as_str(), bar.text.as_str())).collect();
        assert_eq!(
            shown,
            [
                ("under 1 us", "1"),
                ("1 us to 2 us", "2"),
                ("2 us to 4 us", "0"),
                ("4 us to 8 us", "0"),
                ("8 us to 16 us", "1")
            ]
        );
        assert!(latency_bars(&[]).is_empty());
        assert_eq!(
            [percentile(&[1, 2, 3, 4], 0.5), percentile(&[1, 2, 3, 4], 0.99), percentile(&[], 0.5)],
            [2.0, 4.0, 0.0]
        );
    }

    #[test]
    fn many_sizes_are_put_together() {
        let few: BTreeMap<_, _> = [(1024, (2, 2048)), (3000, (1, 3000))].into();
        assert_eq!(traffic_rows(&few), [("1 KiB".to_owned(), 2, 2048), ("2.93 KiB".to_owned(), 1, 3000)]);
        let many: BTreeMap<_, _> = (0..30).map(|more| (1024 + more, (1, 1024))).collect();
        assert_eq!(traffic_rows(&many), [("1 KiB to 2 KiB".to_owned(), 30, 30 * 1024)]);
    }
}
