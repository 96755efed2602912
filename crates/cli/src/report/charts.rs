//! Converts a series to the object that `page.js` draws: its charts and tables.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use pinpool_observe::diagnosis::words::{counted, percent, seconds};
use pinpool_observe::diagnosis::{Snapshot, TagUse};
use pinpool_os::format::{Size, Time};
use serde_json::{Value, json};

use crate::diagnosis::{DiagnosisText, TOO_SHORT};
use crate::series::Series;
use pinpool_cli::table::grouped;

/// Number of samples over the x axis, and the number of samples in each sum of lost time.
const PARTS: usize = 600;
const LOST_PARTS: usize = 10;
/// Maximum number of alarms, panels of a chart and rows of a table.
const ALARMS_MAX: usize = 4;
const LANES_MAX: usize = 8;
const ROWS_MAX: usize = 20;
/// Less lost time than this is not drawn.
const LOST_NS_MIN: u64 = 1_000_000;

/// An x value, and the latest snapshot of each pool that has begun by then, with the pool's name.
type Sample<'a> = (f64, Vec<(&'a str, &'a Snapshot)>);
/// Bytes at each sample, by the name of a tag or a pool.
type Lanes<'a> = BTreeMap<&'a str, Vec<f64>>;

/// A series with its samples.
pub(super) struct Charts<'a> {
    series: &'a Series,
    samples: Vec<Sample<'a>>,
}

/// Returns the sum of a value over all pools.
fn sum((_, pools): &Sample<'_>, value: impl Fn(&Snapshot) -> u64) -> u64 {
    pools.iter().map(|(_, of)| value(of)).fold(0, u64::saturating_add)
}

/// Returns the sum of the limits, or `None` if a pool has no limit or all pools have ended.
fn limit((_, pools): &Sample<'_>) -> Option<u64> {
    pools.iter().try_fold(0_u64, |sum, (_, of)| Some(sum.saturating_add(of.max_bytes?))).filter(|&sum| sum > 0)
}

fn in_use(of: &Snapshot) -> u64 {
    of.used_bytes.saturating_sub(of.in_flight_bytes)
}

fn axis(name: &str, unit: &str) -> Value {
    json!({ "name": name, "unit": unit })
}

/// Returns a line with a value that applies until the next point (`steps`, or `area`, which is stacked), or marks (`discs`,
/// `rings`).
fn line(name: &str, shape: &str, points: impl IntoIterator<Item = (f64, f64)>) -> Value {
    let points: Vec<_> = points.into_iter().collect();
    let is_mark = matches!(shape, "discs" | "rings");
    let is_kept = |at: usize| is_mark || at == 0 || at + 1 == points.len() || points[at].1 != points[at - 1].1;
    let kept: Vec<_> = (0..points.len()).filter(|&at| is_kept(at)).map(|at| points[at]).collect();
    json!({ "name": name, "shape": shape, "points": kept })
}

fn panel(name: &str, unit: &str, series: &[Value], is_lane: bool) -> Value {
    json!({ "y": axis(name, unit), "series": series, "is_lane": is_lane })
}

impl<'a> Charts<'a> {
    pub(super) fn new(series: &'a Series) -> Self {
        let points = series.pools.iter().flat_map(|pool| &pool.points).map(|(x, _)| *x);
        let (begin, end) = (points.clone().fold(f64::INFINITY, f64::min), points.fold(0.0, f64::max));
        let latest = |x: f64| {
            let pools = series.pools.iter().filter_map(|pool| {
                let until = pool.points.partition_point(|(at, _)| *at <= x);
                Some((&*pool.name, &pool.points[..until].last()?.1))
            });
            (x, pools.collect())
        };
        let part = |part| if part == PARTS { end } else { begin + (end - begin) * part as f64 / PARTS as f64 };
        Self { series, samples: (0..=PARTS).map(part).map(latest).collect() }
    }

    fn lanes(&self, parts: impl Fn(&(&'a str, &'a Snapshot)) -> Vec<(&'a str, u64)>) -> Lanes<'a> {
        let mut lanes = Lanes::new();
        for (at, (_, pools)) in self.samples.iter().enumerate() {
            for (name, bytes) in pools.iter().flat_map(&parts) {
                lanes.entry(name).or_insert_with(|| vec![0.0; PARTS + 1])[at] += bytes as f64;
            }
        }
        lanes
    }

    pub(super) fn report(self, title: &str, source: &str) -> Value {
        let tags = self.lanes(|(_, of)| of.holders.iter().map(|holder| (&*holder.tag, holder.bytes)).collect());
        let pools = self.lanes(|(pool, of)| vec![(pool, of.used_bytes)]);
        let has_tags = tags.keys().any(|tag| *tag != "(untagged)");
        let charts = [
            self.bytes_figure(),
            self.lost_figure(),
            self.limit_figure(),
            has_tags.then(|| self.lanes_figure("tags", "Holders", &tags)),
            (pools.len() > 1).then(|| self.lanes_figure("pools", "Pools", &pools)),
        ];
        let missing = self.series.warning.iter().map(|warning| format!("A part is missing: {warning}."));
        json!({
            "title": title, "source": source, "diagnoses": diagnoses(&self.series.diagnoses), "facts": self.facts(),
            "charts": charts.into_iter().flatten().collect::<Vec<_>>(), "table": self.out_at_the_end(),
            "notes": self.series.notes.iter().cloned().chain(missing).collect::<Vec<_>>(),
        })
    }

    fn figure(&self, id: &str, title: &str, description: String, panels: Vec<Value>) -> Value {
        let mut x = if self.series.has_time { axis("time", "seconds") } else { axis("requests", "count") };
        if let Some(clock) = self.series.clock {
            x["clock"] = clock.into();
        }
        json!({ "id": id, "title": title, "description": description, "x": x, "panels": panels })
    }

    fn line(&self, name: &str, shape: &str, value: impl Fn(&Snapshot) -> u64) -> Value {
        line(name, shape, self.samples.iter().map(|sample| (sample.0, sum(sample, &value) as f64)))
    }

    fn peak(&self, value: impl Fn(&Snapshot) -> u64) -> u64 {
        self.samples.iter().map(|sample| sum(sample, &value)).max().unwrap_or(0)
    }

    /// Returns the chart of bytes, or `None` if the bytes are unknown, as in a log.
    fn bytes_figure(&self) -> Option<Value> {
        let held = self.peak(|now| now.held_bytes);
        if held == 0 {
            return None;
        }
        let mut series = vec![
            self.line("in use", "area", in_use),
            self.line("in flight", "area", |now| now.in_flight_bytes),
            self.line("idle", "area", |now| now.idle_bytes),
            self.line("free", "area", |now| now.free_bytes),
        ];
        // Pools that have not started or have ended add nothing to the sum, so the maximum is the limit of all pools.
        let max = self.samples.iter().filter_map(limit).max();
        // A limit far above the held bytes would make the areas flat.
        if max.is_some_and(|max| max / 4 <= held) {
            let limits = self.samples.iter().filter_map(|sample| Some((sample.0, limit(sample)? as f64)));
            series.push(line("limit", "steps", limits));
        }
        let mut mark = |name, shape, ns: fn(&Snapshot) -> u64| {
            let mut before = 0;
            let grown =
                self.samples.iter().filter(|sample| std::mem::replace(&mut before, sum(sample, ns)) < sum(sample, ns));
            series.push(line(name, shape, grown.map(|sample| (sample.0, sum(sample, |now| now.held_bytes) as f64))));
        };
        mark("wait", "discs", |now| now.waiting_ns);
        mark("pin or unpin", "rings", |now| now.pinning_ns);
        let limit = max.map_or_else(|| "no limit".to_owned(), |max| format!("limit {}", Size(max)));
        let words = format!("At most {} held; {limit}.", Size(held));
        Some(self.figure("bytes", "Bytes by state", words, vec![panel("bytes", "bytes", &series, false)]))
    }

    /// Returns the chart of the seconds lost in each part of the time, or `None` if nothing was lost.
    fn lost_figure(&self) -> Option<Value> {
        let last = self.samples.last()?;
        let lost_ns = Some(sum(last, |now| now.lost(0).total_ns())).filter(|&ns| ns >= LOST_NS_MIN)?;
        type Part = (&'static str, fn(&Snapshot) -> u64);
        let parts: [Part; 3] =
            [("waiting", |now| now.waiting_ns), ("pinning", |now| now.pinning_ns), ("remapping", |now| now.moving_ns)];
        let is_lost = |&(_, ns): &Part| sum(last, ns) > 0;
        let total = |(name, ns): &Part| format!("{name} {}", seconds(sum(last, ns)));
        let words: Vec<_> = parts.iter().filter(|part| is_lost(part)).map(total).collect();
        let sums: Vec<_> = self.samples.iter().step_by(LOST_PARTS).collect();
        // A part without a loss has no points, and keeps its color free.
        let grown = |part @ (name, ns): Part| {
            let seconds = |pair: &[&Sample<'_>]| sum(pair[1], ns).saturating_sub(sum(pair[0], ns)) as f64 * 1e-9;
            line(name, "area", sums.windows(2).filter(|_| is_lost(&part)).map(|pair| (pair[0].0, seconds(pair))))
        };
        let series = parts.map(grown);
        let words = format!("All threads together lost {}: {}.", seconds(lost_ns), words.join(", "));
        let name = format!("lost in each {}th of the time", PARTS / LOST_PARTS);
        Some(self.figure("lost", "Time lost", words, vec![panel(&name, "seconds", &series, false)]))
    }

    /// Returns the chart of the limit on idle buffers, or `None` if no pool has such a limit, or nothing was raised or evicted.
    fn limit_figure(&self) -> Option<Value> {
        let (mut lines, mut raises, mut words) = (Vec::new(), Vec::new(), String::new());
        for pool in self.series.pools.iter().take(LANES_MAX) {
            let limit = |(x, of): &(f64, Snapshot)| Some((*x, of.pool_size_limit? as f64));
            let points: Vec<_> = pool.points.iter().filter_map(limit).collect();
            let (Some((_, first)), Some((_, last))) = (points.first(), points.last()) else { continue };
            words += &format!("The limit on idle buffers of {} is {first} at first and {last} at the end. ", pool.name);
            raises.extend(points.windows(2).filter(|pair| pair[1].1 > pair[0].1).map(|pair| pair[1]));
            lines.push(line(&format!("limit of {}", pool.name), "steps", points));
        }
        let evicted = self.peak(|now| now.evicted);
        if lines.is_empty() || (self.series.has_time && raises.is_empty() && evicted == 0) {
            return None;
        }
        lines.push(line("raise", "discs", raises));
        let panels = vec![
            panel("limit on idle buffers", "count", &lines, false),
            panel("evictions so far", "count", &[self.line("evictions", "steps", |now| now.evicted)], false),
        ];
        words += &format!("{} evictions.", grouped(evicted));
        Some(self.figure("limit", "Limit on idle buffers, and evictions", words, panels))
    }

    /// Returns a chart with a panel for each of the largest holders, the largest first.
    fn lanes_figure(&self, id: &str, title: &str, of: &Lanes<'_>) -> Value {
        let peak = |bytes: &[f64]| bytes.iter().copied().fold(0.0, f64::max);
        let mut lanes: Vec<_> = of.iter().collect();
        lanes.sort_by(|one, other| peak(other.1).total_cmp(&peak(one.1)));
        let panel = |(name, bytes): &(&&str, &Vec<f64>)| {
            let points = self.samples.iter().zip(*bytes).map(|((x, _), bytes)| (*x, *bytes));
            panel(name, "bytes", &[line(name, "area", points)], true)
        };
        let panels: Vec<_> = lanes.iter().take(LANES_MAX).map(panel).collect();
        let words = format!("Bytes in use or in flight, the {} largest of {}.", panels.len(), lanes.len());
        self.figure(id, title, words, panels)
    }

    /// Returns the buffers in use at the end, by pool and tag.
    fn out_at_the_end(&self) -> Option<Value> {
        let last = self.series.pools.iter().filter_map(|pool| Some((&pool.name, &pool.points.last()?.1)));
        let mut left: Vec<_> =
            last.flat_map(|(pool, last)| last.holders.iter().map(move |holder| (pool, holder))).collect();
        left.retain(|(_, holder)| holder.buffers > 0);
        left.sort_by_key(|(_, holder)| Reverse(holder.bytes));
        let buffers: u64 = left.iter().map(|(_, holder)| holder.buffers).sum();
        let row = |(pool, holder): &(&String, &TagUse)| {
            let place = holder.place.as_ref().map_or_else(String::new, |place| format!(", most allocated at {place}"));
            let age = holder.oldest_age.map_or_else(|| "?".to_owned(), |age| Time(age).to_string());
            [format!("{pool}: {}{place}", holder.tag), grouped(holder.buffers), Size(holder.bytes).to_string(), age]
        };
        let rows: Vec<_> = left.iter().take(ROWS_MAX).map(row).collect();
        let name = format!("In use at the end: {}", counted(buffers, "buffer"));
        (buffers > 0).then(|| json!({ "name": name, "head": ["holder", "buffers", "bytes", "oldest"], "rows": rows }))
    }

    fn facts(&self) -> Vec<(&'static str, String)> {
        let Some(last) = self.samples.last() else { return Vec::new() };
        let (requests, misses) = (sum(last, |now| now.requests), sum(last, |now| now.misses));
        // As in the statistics, the hit rate is over the requests that were served.
        let served = requests.saturating_sub(sum(last, |now| now.failed_requests));
        let mut facts = vec![("requests", grouped(requests)), ("evictions", grouped(sum(last, |now| now.evicted)))];
        if served > 0 {
            facts.insert(1, ("hit rate", percent(served.saturating_sub(misses), served)));
        }
        if self.peak(|now| now.held_bytes) > 0 {
            facts.extend([
                ("pin calls", grouped(sum(last, |now| now.pin_calls))),
                ("most in use", Size(self.peak(in_use)).to_string()),
            ]);
        }
        if self.series.has_time {
            facts.push(("duration", Time(Duration::from_secs_f64(last.0)).to_string()));
        }
        facts
    }
}

/// Returns the diagnoses to show, the worst first: the alarms, or the first diagnosis if there is no alarm.
fn diagnoses(all: &[DiagnosisText]) -> Vec<Value> {
    let alarms = all.iter().filter(|one| one.is_alarm).count();
    let diagnosis = |one: &DiagnosisText| {
        let name = if all.len() > 1 { format!("{}: {}", one.pool, one.cause) } else { one.cause.clone() };
        let cause = format!("{}: ", one.cause);
        let lines: Vec<_> = one.lines.iter().map(|line| line.trim().trim_start_matches(&*cause)).collect();
        json!({ "name": name, "lines": lines, "is_alarm": one.is_alarm })
    };
    let shown: Vec<_> = all.iter().take(alarms.clamp(1, ALARMS_MAX)).map(diagnosis).collect();
    if shown.is_empty() { vec![json!({ "name": "unknown", "lines": [TOO_SHORT], "is_alarm": false })] } else { shown }
}
