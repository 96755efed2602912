//! The charts and tables of a series.

use std::collections::BTreeMap;

use pinpool_observe::judge::words::{counted, seconds};
use pinpool_observe::judge::{Lost, Snapshot};
use pinpool_replay::{Event, Recording};

use super::figure::Series as Line;
use super::figure::{Axis, Figure, Panel, Report, Shape, Table, Unit, Verdict, number};
use crate::diagnosis::Said;
use crate::series::Series;
use pinpool_cli::table::grouped;

/// Parts of the x axis of which each has one sample, and one sum of lost time.
const PARTS: f64 = 600.0;
const LOST_PARTS: usize = 60;
/// Diagnoses that are printed.
const VERDICTS_MAX: usize = 4;
/// Tags, pools and limits that are drawn.
const LANES_MAX: usize = 8;
/// Rows of tables.
const ROWS_MAX: usize = 20;
/// Less lost time is not drawn.
const LOST_MIN_NS: u64 = 1_000_000;

/// The sums over all pools at one time.
#[derive(Debug, Clone, Copy, Default)]
struct Sample {
    x: f64,
    in_use_bytes: u64,
    in_flight_bytes: u64,
    idle_bytes: u64,
    free_bytes: u64,
    held_bytes: u64,
    /// `None` if a pool has no limit.
    max_bytes: Option<u64>,
    gets: u64,
    hits: u64,
    evicted: u64,
    pins: u64,
    lost: Lost,
}

impl Sample {
    fn add(self, of: &Snapshot) -> Self {
        let sum = |one: u64, other: u64| one.saturating_add(other);
        Self {
            in_use_bytes: sum(self.in_use_bytes, of.used_bytes.saturating_sub(of.in_flight_bytes)),
            in_flight_bytes: sum(self.in_flight_bytes, of.in_flight_bytes),
            idle_bytes: sum(self.idle_bytes, of.idle_bytes),
            free_bytes: sum(self.free_bytes, of.free_bytes),
            held_bytes: sum(self.held_bytes, of.held_bytes),
            max_bytes: self.max_bytes.zip(of.max_bytes).map(|(one, other)| sum(one, other)),
            gets: self.gets + of.gets,
            hits: self.hits + of.gets.saturating_sub(of.misses + of.failed_gets),
            evicted: self.evicted + of.evicted,
            pins: self.pins + of.page_locks,
            lost: Lost {
                waiting_ns: sum(self.lost.waiting_ns, of.waiting_ns),
                page_locking_ns: sum(self.lost.page_locking_ns, of.page_locking_ns),
                moving_ns: sum(self.lost.moving_ns, of.moving_ns),
                ..self.lost
            },
            ..self
        }
    }
}

/// A series with what is drawn of it.
pub(super) struct Charts<'a> {
    series: &'a Series,
    samples: Vec<Sample>,
    /// Bytes of each tag, and of each pool, at the samples.
    tags: BTreeMap<&'a str, Vec<(f64, f64)>>,
    pools: BTreeMap<&'a str, Vec<(f64, f64)>>,
}

impl<'a> Charts<'a> {
    pub(super) fn new(series: &'a Series) -> Self {
        let mut all: Vec<_> = { series.pools.iter().enumerate() }
            .flat_map(|(at, pool)| pool.points.iter().map(move |(x, snapshot)| (*x, at, snapshot)))
            .collect();
        all.sort_by(|one, other| one.0.total_cmp(&other.0));
        let end = all.last().map_or(0.0, |last| last.0);
        let mut charts = Self { series, samples: Vec::new(), tags: BTreeMap::new(), pools: BTreeMap::new() };
        let mut now: Vec<Option<&Snapshot>> = vec![None; series.pools.len()];
        for (place, (x, at, snapshot)) in all.iter().enumerate() {
            now[*at] = Some(snapshot);
            // The last of each part, which has all pools.
            if all
                .get(place + 1)
                .is_none_or(|next| next.0 > *x && (next.0 / end * PARTS).floor() > (x / end * PARTS).floor())
            {
                charts.sample(*x, &now);
            }
        }
        charts
    }

    fn sample(&mut self, x: f64, now: &[Option<&'a Snapshot>]) {
        let begin = Sample { x, max_bytes: Some(0), ..Sample::default() };
        self.samples.push(now.iter().flatten().fold(begin, |sum, of| sum.add(of)));
        for (pool, of) in self.series.pools.iter().zip(now) {
            let bytes = of.map_or(0, |of| of.used_bytes);
            self.pools.entry(&pool.name).or_default().push((x, bytes as f64));
        }
        self.tags.values_mut().for_each(|points| points.push((x, 0.0)));
        let begun = self.samples[0].x;
        for holder in now.iter().flatten().flat_map(|of| &of.holders) {
            let new = || [begun, x].into_iter().filter(|at| *at < x).chain([x]).map(|at| (at, 0.0)).collect();
            let points: &mut Vec<_> = self.tags.entry(&holder.tag).or_insert_with(new);
            if let Some((_, bytes)) = points.last_mut() {
                *bytes += holder.bytes as f64;
            }
        }
    }

    pub(super) fn report(self, title: &'static str, source: String, notes: Vec<String>, tables: Vec<Table>) -> Report {
        let mut figures: Vec<_> = self.bytes_figure().into_iter().collect();
        figures.extend(self.lost_figure());
        figures.extend(self.limit_figure());
        if self.tags.keys().any(|tag| *tag != "(untagged)") {
            figures.push(self.lanes("tags", "Who holds what", "tag", &self.tags));
        }
        if self.pools.len() > 1 {
            figures.push(self.lanes("pools", "Pools", "pool", &self.pools));
        }
        let tables = self.left().into_iter().chain(tables).collect();
        Report { title, source, verdicts: verdicts(&self.series.said), facts: self.facts(), figures, notes, tables }
    }

    fn axis(&self) -> Axis {
        let axis = if self.series.has_time { Axis::new("time", Unit::Seconds) } else { Axis::new("gets", Unit::Count) };
        Axis { clock: self.series.clock, ..axis }
    }

    fn line(&self, name: &str, shape: Shape, value: impl Fn(&Sample) -> Option<u64>) -> Line {
        Line::new(name, shape, self.samples.iter().filter_map(|at| Some((at.x, value(at)? as f64))))
    }

    fn peak(&self, value: impl Fn(&Sample) -> u64) -> u64 {
        self.samples.iter().map(value).max().unwrap_or(0)
    }

    /// `None` if nothing is known of bytes, as in a log.
    fn bytes_figure(&self) -> Option<Figure> {
        let mut series = vec![
            self.line("in use", Shape::Area, |sample| Some(sample.in_use_bytes)),
            self.line("in flight", Shape::Area, |sample| Some(sample.in_flight_bytes)),
            self.line("idle", Shape::Area, |sample| Some(sample.idle_bytes)),
            self.line("free", Shape::Area, |sample| Some(sample.free_bytes)),
        ];
        let held = self.peak(|sample| sample.held_bytes);
        if held == 0 {
            return None;
        }
        let max = self.samples.iter().filter_map(|sample| sample.max_bytes).max();
        // A limit far above everything would press all areas to the bottom.
        let is_far = max.is_some_and(|max| max / 4 > held.max(1));
        if max.is_some() && !is_far {
            series.push(self.line("limit", Shape::Steps, |sample| sample.max_bytes));
        }
        let mark = |lost: &Lost| [lost.waiting_ns, lost.page_locking_ns];
        for (at, (name, shape)) in
            [("wait", Shape::Triangles), ("pin or unpin", Shape::Crosses)].into_iter().enumerate()
        {
            let mut before = 0;
            let grown = self.samples.iter().filter(|sample| {
                let now = mark(&sample.lost)[at];
                std::mem::replace(&mut before, now) < now
            });
            series.push(Line::new(name, shape, grown.map(|sample| (sample.x, sample.held_bytes as f64))));
        }
        let text = |bytes: u64| Unit::Bytes.text(bytes as f64);
        let limit = match max {
            Some(max) if is_far => format!("limit {}, above the chart", text(max)),
            Some(max) => format!("limit {}", text(max)),
            None => "no limit".to_owned(),
        };
        let used = text(self.peak(|sample| sample.in_use_bytes));
        Some(Figure {
            id: "bytes",
            title: "Bytes by state",
            description: format!("At most {} pinned and {used} in use; {limit}.", text(held)),
            x: self.axis(),
            panels: vec![Axis::new("bytes", Unit::Bytes).panel(series)],
        })
    }

    /// Seconds lost in each part of the time; `None` if nothing was.
    fn lost_figure(&self) -> Option<Figure> {
        let last = self.samples.last()?;
        if last.lost.total_ns() < LOST_MIN_NS || last.x <= 0.0 {
            return None;
        }
        type Part = (&'static str, fn(&Lost) -> u64);
        let of: [Part; 3] = [
            ("waiting", |lost| lost.waiting_ns),
            ("pinning", |lost| lost.page_locking_ns),
            ("moving", |lost| lost.moving_ns),
        ];
        let lost = of.into_iter().filter(|(_, ns)| ns(&last.lost) > 0);
        let words: Vec<_> = lost.clone().map(|(name, ns)| format!("{} {name}", seconds(ns(&last.lost)))).collect();
        let series = lost.map(|(name, ns)| {
            let at = |part: usize| last.x * part as f64 / LOST_PARTS as f64;
            let until =
                |x: f64| self.samples.iter().take_while(|sample| sample.x <= x).last().map_or(0, |at| ns(&at.lost));
            let grown = |part: usize| until(at(part + 1)).saturating_sub(until(at(part))) as f64 * 1e-9;
            let points = (0..LOST_PARTS).map(|part| (at(part), grown(part)));
            Line::new(name, Shape::Area, points.chain([(last.x, grown(LOST_PARTS - 1))]))
        });
        let axis = Axis::new(format!("lost in each {LOST_PARTS}th of the time"), Unit::Seconds);
        Some(Figure {
            id: "lost",
            title: "Time lost",
            description: format!("Of all threads together {}: {}.", seconds(last.lost.total_ns()), words.join(", ")),
            x: self.axis(),
            panels: vec![axis.panel(series.collect())],
        })
    }

    /// The limit on idle buffers; `None` if no pool has one, or it stays and nothing is evicted.
    fn limit_figure(&self) -> Option<Figure> {
        let (mut lines, mut raises, mut words) = (Vec::new(), Vec::new(), Vec::new());
        for pool in self.series.pools.iter().take(LANES_MAX) {
            let limit = |(x, of): &(f64, Snapshot)| Some((*x, of.pool_size_limit? as f64));
            let points: Vec<_> = pool.points.iter().filter_map(limit).collect();
            let (Some(first), Some(last)) = (points.first(), points.last()) else { continue };
            raises.extend(points.windows(2).filter(|pair| pair[1].1 > pair[0].1).map(|pair| pair[1]));
            words.push(format!("The limit of {} goes from {} to {}.", pool.name, number(first.1), number(last.1)));
            lines.push(Line::new(format!("limit of {}", pool.name), Shape::Steps, points));
        }
        let evicted = self.samples.last().map_or(0, |sample| sample.evicted);
        // With time, a limit that stays and evicts nothing is no news.
        if lines.is_empty() || (self.series.has_time && raises.is_empty() && evicted == 0) {
            return None;
        }
        lines.push(Line::new("raise", Shape::Triangles, raises));
        words.push(format!("{} evictions.", grouped(evicted)));
        let evictions = self.line("evictions", Shape::Steps, |sample| Some(sample.evicted));
        let panels = vec![
            Axis::new("limit on idle buffers", Unit::Count).panel(lines),
            Axis::new("evictions so far", Unit::Count).panel(vec![evictions]),
        ];
        Some(Figure { id: "limit", title: "Limit and evictions", description: words.join(" "), x: self.axis(), panels })
    }

    /// A panel for each of those with most bytes, the largest first.
    fn lanes(&self, id: &'static str, title: &'static str, noun: &str, of: &BTreeMap<&str, Vec<(f64, f64)>>) -> Figure {
        let peak = |points: &[(f64, f64)]| points.iter().map(|(_, bytes)| *bytes).fold(0.0, f64::max);
        let mut lanes: Vec<_> = of.iter().map(|(name, points)| (*name, peak(points), points)).collect();
        lanes.sort_by(|one, other| other.1.total_cmp(&one.1));
        let largest = lanes.first().map_or_else(String::new, |(name, peak, _)| {
            format!(", most of them in {name}: {} at one time", Unit::Bytes.text(*peak))
        });
        let all = lanes.len();
        let which = if all > LANES_MAX {
            format!("the {LANES_MAX} of {all} {noun}s with most")
        } else {
            format!("each {noun}")
        };
        let panel = |(name, _, points): (&str, f64, &Vec<(f64, f64)>)| Panel {
            series: vec![Line::new(name, Shape::Area, points.clone())],
            y: Axis::new(name, Unit::Bytes),
            is_lane: true,
        };
        Figure {
            id,
            title,
            description: format!("Bytes that users hold or devices read, of {which}{largest}."),
            x: self.axis(),
            panels: lanes.into_iter().take(LANES_MAX).map(panel).collect(),
        }
    }

    /// What is out at the end, by pool and tag.
    fn left(&self) -> Option<Table> {
        let last = self.series.pools.iter().filter_map(|pool| Some((&pool.name, &pool.points.last()?.1)));
        let mut left: Vec<_> =
            last.flat_map(|(pool, last)| last.holders.iter().map(move |holder| (pool, holder))).collect();
        left.retain(|(_, holder)| holder.buffers > 0);
        left.sort_by_key(|(_, holder)| std::cmp::Reverse(holder.bytes));
        let buffers: u64 = left.iter().map(|(_, holder)| holder.buffers).sum();
        let rows = left.iter().take(ROWS_MAX).map(|(pool, holder)| {
            let place = holder.place.as_ref().map_or_else(String::new, |place| format!(", most got at {place}"));
            let owner = if self.series.pools.len() > 1 { format!("{pool}: ") } else { String::new() };
            let age = holder.oldest.map_or_else(|| "?".to_owned(), |age| Unit::Seconds.text(age.as_secs_f64()));
            [
                format!("{owner}{}{place}", holder.tag),
                grouped(holder.buffers),
                Unit::Bytes.text(holder.bytes as f64),
                age,
            ]
        });
        let head = ["owner", "buffers", "bytes", "oldest for"];
        let name = format!("Out at the end: {}", counted(buffers, "buffer"));
        (buffers > 0).then(|| Table { is_open: true, name, head, rows: rows.collect() })
    }

    fn facts(&self) -> Vec<(&'static str, String)> {
        let last = self.samples.last().copied().unwrap_or_default();
        let bytes = |bytes: u64| Unit::Bytes.text(bytes as f64);
        let mut facts = vec![
            ("gets", grouped(last.gets)),
            ("hit rate", percent(last.hits, last.gets)),
            ("evictions", grouped(last.evicted)),
        ];
        let held = self.peak(|sample| sample.held_bytes);
        if held > 0 {
            facts.extend([
                ("time lost", seconds(last.lost.total_ns())),
                ("pin calls", grouped(last.pins)),
                ("pinned at most", bytes(held)),
                ("in use at most", bytes(self.peak(|sample| sample.in_use_bytes))),
            ]);
        }
        if self.series.has_time {
            facts.push(("lasts", Unit::Seconds.text(last.x)));
        }
        facts
    }
}

/// The diagnoses, the worst first: all alarms, or the first.
fn verdicts(said: &[Said]) -> Vec<Verdict> {
    let name = |said: &Said, several: bool| {
        if several { format!("{}: {}", said.pool, said.cause) } else { said.cause.clone() }
    };
    let verdict =
        |one: &Said| Verdict { name: name(one, said.len() > 1), text: sentences(one), is_alarm: one.is_alarm };
    let alarms = said.iter().filter(|said| said.is_alarm).count();
    let mut verdicts: Vec<_> = said.iter().take(alarms.clamp(1, VERDICTS_MAX)).map(verdict).collect();
    if verdicts.is_empty() {
        let text = "There are too few gets to judge.".to_owned();
        verdicts.push(Verdict { name: "unknown".to_owned(), text, is_alarm: false });
    }
    verdicts
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

fn percent(part: u64, all: u64) -> String {
    if all == 0 { "?".to_owned() } else { format!("{} %", number(part as f64 / all as f64 * 100.0)) }
}

/// The sizes and the calls of a recording.
pub(super) fn tables(recording: &Recording) -> Vec<Table> {
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
    sizes.sort_by_key(|(_, (_, bytes))| std::cmp::Reverse(*bytes));
    let text = |bytes: u64| Unit::Bytes.text(bytes as f64);
    let name = match sizes.len() {
        many if many > ROWS_MAX => format!("Sizes by traffic: the first {ROWS_MAX} of {many}"),
        _ => "Sizes by traffic".to_owned(),
    };
    let rows = sizes.into_iter().take(ROWS_MAX);
    let rows =
        rows.map(|(size, (gets, bytes))| [text(size), grouped(gets), text(bytes), percent(bytes, all)]).collect();
    let sizes = Table { is_open: false, name, head: ["size", "requests", "bytes", "share"], rows };
    let call = |(name, mut times): (&str, Vec<u64>)| {
        times.sort_unstable();
        let time = |ns: u64| Unit::Seconds.text(ns as f64 * 1e-9);
        Some([name.to_owned(), grouped(times.len() as u64), time(times[times.len() / 2]), time(*times.last()?)])
    };
    let calls = [("pin", pins), ("unpin", unpins)].into_iter().filter(|(_, times)| !times.is_empty());
    let rows: Vec<_> = calls.filter_map(call).collect();
    let head = ["call", "count", "median", "longest"];
    let calls = Table { is_open: false, name: "Pin and unpin calls".to_owned(), head, rows };
    [sizes, calls].into_iter().filter(|table| !table.rows.is_empty()).collect()
}
