//! The charts and tables of a series, as the object that `page.js` draws.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use pinpool_observe::judge::Snapshot;
use pinpool_observe::judge::words::{counted, percent, seconds};
use pinpool_os::words::{Size, Time};
use pinpool_replay::{Event, Recording};
use serde_json::{Value, json};

use crate::diagnosis::Said;
use crate::series::Series;
use pinpool_cli::table::grouped;

/// Samples, and sums of lost time, over the x axis.
const PARTS: f64 = 600.0;
const LOST_PARTS: usize = 60;
/// Most alarms, panels of a chart and rows of a table.
const ALARMS_MAX: usize = 4;
const LANES_MAX: usize = 8;
const ROWS_MAX: usize = 20;
/// Less lost time is not drawn.
const LOST_MIN_NS: u64 = 1_000_000;

type Points = Vec<(f64, f64)>;

/// A series with its samples.
pub(super) struct Charts<'a> {
    series: &'a Series,
    /// The sums over all pools.
    samples: Vec<(f64, Snapshot)>,
    /// Bytes of each tag, and of each pool, at the samples.
    tags: BTreeMap<&'a str, Points>,
    pools: BTreeMap<&'a str, Points>,
}

/// `sum` with the bytes and counters of another pool.
fn add(mut sum: Snapshot, of: &Snapshot) -> Snapshot {
    for (sum, of) in [
        (&mut sum.used_bytes, of.used_bytes),
        (&mut sum.in_flight_bytes, of.in_flight_bytes),
        (&mut sum.idle_bytes, of.idle_bytes),
        (&mut sum.free_bytes, of.free_bytes),
        (&mut sum.held_bytes, of.held_bytes),
        (&mut sum.gets, of.gets),
        (&mut sum.misses, of.misses + of.failed_gets),
        (&mut sum.evicted, of.evicted),
        (&mut sum.pin_calls, of.pin_calls),
        (&mut sum.waiting_ns, of.waiting_ns),
        (&mut sum.pinning_ns, of.pinning_ns),
        (&mut sum.moving_ns, of.moving_ns),
    ] {
        *sum = sum.saturating_add(of);
    }
    sum.max_bytes = sum.max_bytes.zip(of.max_bytes).map(|(one, other)| one.saturating_add(other));
    sum
}

fn in_use(of: &Snapshot) -> u64 {
    of.used_bytes.saturating_sub(of.in_flight_bytes)
}

fn lost_ns(of: &Snapshot) -> u64 {
    of.waiting_ns.saturating_add(of.pinning_ns).saturating_add(of.moving_ns)
}

fn axis(name: &str, unit: &str) -> Value {
    json!({ "name": name, "unit": unit })
}

/// A line with a value that holds until the next point (`steps`, or `area`, which is stacked), or marks (`triangles`, `crosses`).
fn line(name: &str, shape: &str, points: impl IntoIterator<Item = (f64, f64)>) -> Value {
    let points: Points = points.into_iter().collect();
    let is_mark = matches!(shape, "triangles" | "crosses");
    let is_kept = |at: usize| is_mark || at == 0 || at + 1 == points.len() || points[at].1 != points[at - 1].1;
    let kept: Points = (0..points.len()).filter(|&at| is_kept(at)).map(|at| points[at]).collect();
    json!({ "name": name, "shape": shape, "points": kept })
}

fn panel(name: &str, unit: &str, series: &[Value], is_lane: bool) -> Value {
    json!({ "y": axis(name, unit), "series": series, "is_lane": is_lane })
}

impl<'a> Charts<'a> {
    pub(super) fn new(series: &'a Series) -> Self {
        let mut all: Vec<_> = { series.pools.iter().enumerate() }
            .flat_map(|(at, pool)| pool.points.iter().map(move |(x, snapshot)| (*x, at, snapshot)))
            .collect();
        all.sort_by(|one, other| one.0.total_cmp(&other.0));
        let end = all.last().map_or(0.0, |last| last.0);
        let part = |x: f64| (x / end * PARTS).floor();
        let mut charts = Self { series, samples: Vec::new(), tags: BTreeMap::new(), pools: BTreeMap::new() };
        let mut now: Vec<Option<&Snapshot>> = vec![None; series.pools.len()];
        for (place, (x, at, snapshot)) in all.iter().enumerate() {
            now[*at] = Some(snapshot);
            // The last of each part, which has all pools.
            if all.get(place + 1).is_none_or(|next| next.0 > *x && part(next.0) > part(*x)) {
                charts.sample(*x, &now);
            }
        }
        charts
    }

    fn sample(&mut self, x: f64, now: &[Option<&'a Snapshot>]) {
        let begin = Snapshot { max_bytes: Some(0), ..Snapshot::default() };
        self.samples.push((x, now.iter().flatten().fold(begin, |sum, of| add(sum, of))));
        for (pool, of) in self.series.pools.iter().zip(now) {
            let bytes = of.map_or(0, |of| of.used_bytes);
            self.pools.entry(&pool.name).or_default().push((x, bytes as f64));
        }
        self.tags.values_mut().for_each(|points| points.push((x, 0.0)));
        let begun = self.samples[0].0;
        for holder in now.iter().flatten().flat_map(|of| &of.holders) {
            let new = || [begun, x].into_iter().filter(|at| *at < x).chain([x]).map(|at| (at, 0.0)).collect();
            let points: &mut Points = self.tags.entry(&holder.tag).or_insert_with(new);
            if let Some((_, bytes)) = points.last_mut() {
                *bytes += holder.bytes as f64;
            }
        }
    }

    pub(super) fn report(self, title: &str, source: &str, notes: &[String], tables: Vec<Value>) -> Value {
        let has_tags = self.tags.keys().any(|tag| *tag != "(untagged)");
        let figures = [
            self.bytes_figure(),
            self.lost_figure(),
            self.limit_figure(),
            has_tags.then(|| self.lanes("tags", "Owners", &self.tags)),
            (self.pools.len() > 1).then(|| self.lanes("pools", "Pools", &self.pools)),
        ];
        let figures: Vec<_> = figures.into_iter().flatten().collect();
        let tables: Vec<_> = self.left().into_iter().chain(tables).collect();
        json!({
            "title": title, "source": source, "diagnoses": diagnoses(&self.series.said), "facts": self.facts(),
            "charts": figures, "notes": notes, "tables": tables,
        })
    }

    fn figure(&self, id: &str, title: &str, description: String, panels: Vec<Value>) -> Value {
        let mut x = if self.series.has_time { axis("time", "seconds") } else { axis("requests", "count") };
        if let Some(clock) = self.series.clock {
            x["clock"] = clock.into();
        }
        json!({ "id": id, "title": title, "description": description, "x": x, "panels": panels })
    }

    fn line(&self, name: &str, shape: &str, value: impl Fn(&Snapshot) -> Option<u64>) -> Value {
        line(name, shape, self.samples.iter().filter_map(|(x, of)| Some((*x, value(of)? as f64))))
    }

    fn peak(&self, value: impl Fn(&Snapshot) -> u64) -> u64 {
        self.samples.iter().map(|(_, of)| value(of)).max().unwrap_or(0)
    }

    /// `None` if the bytes are unknown, as in a log.
    fn bytes_figure(&self) -> Option<Value> {
        let held = self.peak(|of| of.held_bytes);
        if held == 0 {
            return None;
        }
        let mut series = vec![
            self.line("in use", "area", |of| Some(in_use(of))),
            self.line("in flight", "area", |of| Some(of.in_flight_bytes)),
            self.line("idle", "area", |of| Some(of.idle_bytes)),
            self.line("free", "area", |of| Some(of.free_bytes)),
        ];
        let max = self.samples.iter().filter_map(|(_, of)| of.max_bytes).max();
        // A limit far above everything would make the areas flat.
        let is_far = max.is_some_and(|max| max / 4 > held);
        if max.is_some() && !is_far {
            series.push(self.line("limit", "steps", |of| of.max_bytes));
        }
        let mut mark = |name, shape, ns: fn(&Snapshot) -> u64| {
            let mut before = 0;
            let grown = self.samples.iter().filter(|(_, of)| std::mem::replace(&mut before, ns(of)) < ns(of));
            series.push(line(name, shape, grown.map(|(x, of)| (*x, of.held_bytes as f64))));
        };
        mark("wait", "triangles", |of| of.waiting_ns);
        mark("pin or unpin", "crosses", |of| of.pinning_ns);
        let limit = match max {
            Some(max) if is_far => format!("limit {}, above the chart", Size(max)),
            Some(max) => format!("limit {}", Size(max)),
            None => "no limit".to_owned(),
        };
        let words = format!("At most {} held and {} in use; {limit}.", Size(held), Size(self.peak(in_use)));
        Some(self.figure("bytes", "Bytes by state", words, vec![panel("bytes", "bytes", &series, false)]))
    }

    /// Seconds lost in each part of the time; `None` if nothing was.
    fn lost_figure(&self) -> Option<Value> {
        let (end, last) = self.samples.last().filter(|(end, last)| lost_ns(last) >= LOST_MIN_NS && *end > 0.0)?;
        type Part = (&'static str, fn(&Snapshot) -> u64);
        let parts: [Part; 3] =
            [("waiting", |of| of.waiting_ns), ("pinning", |of| of.pinning_ns), ("remapping", |of| of.moving_ns)];
        let parts = parts.into_iter().filter(|(_, ns)| ns(last) > 0);
        let words: Vec<_> = parts.clone().map(|(name, ns)| format!("{name} {}", seconds(ns(last)))).collect();
        let series: Vec<_> = parts
            .map(|(name, ns)| {
                let at = |part: usize| end * part as f64 / LOST_PARTS as f64;
                let until =
                    |x: f64| self.samples.iter().take_while(|(at, _)| *at <= x).last().map_or(0, |(_, of)| ns(of));
                let grown = |part: usize| until(at(part + 1)).saturating_sub(until(at(part))) as f64 * 1e-9;
                let points = (0..LOST_PARTS).map(|part| (at(part), grown(part)));
                line(name, "area", points.chain([(*end, grown(LOST_PARTS - 1))]))
            })
            .collect();
        let words = format!("All threads together lost {}: {}.", seconds(lost_ns(last)), words.join(", "));
        let name = format!("lost in each {LOST_PARTS}th of the time");
        Some(self.figure("lost", "Time lost", words, vec![panel(&name, "seconds", &series, false)]))
    }

    /// The limit on idle buffers; `None` if no pool has one, or nothing was raised or evicted.
    fn limit_figure(&self) -> Option<Value> {
        let (mut lines, mut raises, mut words) = (Vec::new(), Vec::new(), String::new());
        for pool in self.series.pools.iter().take(LANES_MAX) {
            let limit = |(x, of): &(f64, Snapshot)| Some((*x, of.pool_size_limit?));
            let points: Vec<_> = pool.points.iter().filter_map(limit).collect();
            let (Some((_, first)), Some((_, last))) = (points.first(), points.last()) else { continue };
            raises.extend(
                points.windows(2).filter(|pair| pair[1].1 > pair[0].1).map(|pair| (pair[1].0, pair[1].1 as f64)),
            );
            words += &format!("The limit of {} changes from {} to {}. ", pool.name, grouped(*first), grouped(*last));
            let points = points.into_iter().map(|(x, limit)| (x, limit as f64));
            lines.push(line(&format!("limit of {}", pool.name), "steps", points));
        }
        let evicted = self.samples.last().map_or(0, |(_, of)| of.evicted);
        if lines.is_empty() || (self.series.has_time && raises.is_empty() && evicted == 0) {
            return None;
        }
        lines.push(line("raise", "triangles", raises));
        let panels = vec![
            panel("limit on idle buffers", "count", &lines, false),
            panel("evictions so far", "count", &[self.line("evictions", "steps", |of| Some(of.evicted))], false),
        ];
        Some(self.figure("limit", "Limit and evictions", format!("{words}{} evictions.", grouped(evicted)), panels))
    }

    /// A panel for each of those with most bytes, the largest first.
    fn lanes(&self, id: &str, title: &str, of: &BTreeMap<&str, Points>) -> Value {
        let peak = |points: &Points| points.iter().map(|(_, bytes)| *bytes).fold(0.0, f64::max);
        let mut lanes: Vec<_> = of.iter().collect();
        lanes.sort_by(|one, other| peak(other.1).total_cmp(&peak(one.1)));
        let which = if lanes.len() > LANES_MAX {
            format!(", the {LANES_MAX} largest of {}", lanes.len())
        } else {
            String::new()
        };
        let panel = |(name, points): &(&&str, &Points)| {
            panel(name, "bytes", &[line(name, "area", points.iter().copied())], true)
        };
        let panels = lanes.iter().take(LANES_MAX).map(panel).collect();
        self.figure(id, title, format!("Bytes in use or in flight{which}."), panels)
    }

    /// The buffers that are out at the end, by pool and tag.
    fn left(&self) -> Option<Value> {
        let last = self.series.pools.iter().filter_map(|pool| Some((&pool.name, &pool.points.last()?.1)));
        let mut left: Vec<_> =
            last.flat_map(|(pool, last)| last.holders.iter().map(move |holder| (pool, holder))).collect();
        left.retain(|(_, holder)| holder.buffers > 0);
        left.sort_by_key(|(_, holder)| Reverse(holder.bytes));
        let buffers: u64 = left.iter().map(|(_, holder)| holder.buffers).sum();
        let rows = left.iter().take(ROWS_MAX).map(|(pool, holder)| {
            let place = holder.place.as_ref().map_or_else(String::new, |place| format!(", most allocated at {place}"));
            let pool = if self.series.pools.len() > 1 { format!("{pool}: ") } else { String::new() };
            let age = holder.oldest.map_or_else(|| "?".to_owned(), |age| Time(age).to_string());
            [format!("{pool}{}{place}", holder.tag), grouped(holder.buffers), Size(holder.bytes).to_string(), age]
        });
        let name = format!("Out at the end: {}", counted(buffers, "buffer"));
        (buffers > 0).then(|| table(&name, ["owner", "buffers", "bytes", "oldest"], rows.collect(), true))
    }

    fn facts(&self) -> Vec<(&'static str, String)> {
        let Some((end, last)) = self.samples.last() else { return Vec::new() };
        let mut facts = vec![("requests", grouped(last.gets))];
        if last.gets > 0 {
            facts.push(("hit rate", percent(last.gets.saturating_sub(last.misses), last.gets)));
        }
        facts.push(("evictions", grouped(last.evicted)));
        let held = self.peak(|of| of.held_bytes);
        if held > 0 {
            facts.extend([
                ("time lost", seconds(lost_ns(last))),
                ("pin calls", grouped(last.pin_calls)),
                ("most held", Size(held).to_string()),
                ("most in use", Size(self.peak(in_use)).to_string()),
            ]);
        }
        if self.series.has_time {
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 0; saturates.
            facts.push(("duration", seconds((end * 1e9) as u64)));
        }
        facts
    }
}

/// The diagnoses, the worst first: all alarms, or the first.
fn diagnoses(said: &[Said]) -> Vec<Value> {
    let alarms = said.iter().filter(|said| said.is_alarm).count();
    let diagnosis = |one: &Said| {
        let name = if said.len() > 1 { format!("{}: {}", one.pool, one.cause) } else { one.cause.clone() };
        let cause = format!("{}: ", one.cause);
        let lines: Vec<_> = one.lines.iter().map(|line| line.trim().trim_start_matches(&*cause)).collect();
        json!({ "name": name, "lines": lines, "is_alarm": one.is_alarm })
    };
    let told: Vec<_> = said.iter().take(alarms.clamp(1, ALARMS_MAX)).map(diagnosis).collect();
    match told.is_empty() {
        true => vec![json!({ "name": "unknown", "lines": ["too few requests for a diagnosis"], "is_alarm": false })],
        false => told,
    }
}

fn table(name: &str, head: [&str; 4], rows: Vec<[String; 4]>, is_open: bool) -> Value {
    json!({ "name": name, "head": head, "rows": rows, "is_open": is_open })
}

/// The sizes and the pin calls of a recording.
pub(super) fn tables(recording: &Recording) -> Vec<Value> {
    let mut sizes: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    let (mut pins, mut unpins) = (Vec::new(), Vec::new());
    for record in &recording.records {
        match record.event {
            Event::Get { bytes, class_bytes, .. } => {
                let sum = sizes.entry(class_bytes).or_default();
                *sum = (sum.0 + 1, sum.1.saturating_add(bytes));
            }
            Event::Pin { took_ns, .. } => pins.push(took_ns),
            Event::Unpin { took_ns, .. } => unpins.push(took_ns),
            _ => {}
        }
    }
    let all: u64 = sizes.values().map(|(_, bytes)| bytes).sum();
    let mut sizes: Vec<_> = sizes.into_iter().collect();
    sizes.sort_by_key(|(_, (_, bytes))| Reverse(*bytes));
    let count = sizes.len();
    let size =
        |(size, (gets, bytes))| [Size(size).to_string(), grouped(gets), Size(bytes).to_string(), percent(bytes, all)];
    let sizes: Vec<_> = sizes.into_iter().take(ROWS_MAX).map(size).collect();
    let which = if count > ROWS_MAX { format!(": the first {ROWS_MAX} of {count}") } else { String::new() };
    let call = |(name, mut times): (&str, Vec<u64>)| {
        times.sort_unstable();
        let longest = seconds(*times.last()?);
        Some([name.to_owned(), grouped(times.len() as u64), seconds(times[times.len() / 2]), longest])
    };
    let calls: Vec<_> = [("pin", pins), ("unpin", unpins)].into_iter().filter_map(call).collect();
    let mut tables = Vec::new();
    if !sizes.is_empty() {
        tables.push(table(&format!("Sizes by traffic{which}"), ["size", "requests", "bytes", "share"], sizes, false));
    }
    if !calls.is_empty() {
        tables.push(table("Pin and unpin calls", ["call", "count", "median", "longest"], calls, false));
    }
    tables
}
