//! What a report shows, as one object that is drawn, and that the page holds as JSON.

use serde::Serialize;

use pinpool_cli::table::grouped;

/// A line has at most four points in each of these parts: more cannot be seen.
const PARTS: usize = 430;
/// Most marks that are drawn; a log with more is no program's.
pub(super) const MARKS_MAX: usize = 5_000;

#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    pub(super) title: &'static str,
    /// Where it is from, in words.
    pub(super) source: String,
    pub(super) verdicts: Vec<Verdict>,
    /// Names and values.
    pub(super) facts: Vec<(&'static str, String)>,
    pub(super) figures: Vec<Figure>,
    /// What is left out, and why; what is a lower bound.
    pub(super) notes: Vec<String>,
    pub(super) tables: Vec<Table>,
    /// A page that is drawn again so often.
    #[serde(skip)]
    pub(super) refresh_seconds: Option<u64>,
}

/// One pool's.
#[derive(Debug, Serialize)]
pub(super) struct Verdict {
    pub(super) name: String,
    /// What it means and what to set; a line of its own for each sentence.
    pub(super) text: String,
    pub(super) is_alarm: bool,
}

/// Rows, which open at a click unless they are open from the beginning.
#[derive(Debug, Serialize)]
pub(super) struct Table {
    pub(super) is_open: bool,
    pub(super) name: String,
    pub(super) head: [&'static str; 4],
    pub(super) rows: Vec<[String; 4]>,
}

/// One figure: a file, and a part of the page.
#[derive(Debug, Serialize)]
pub(super) struct Figure {
    /// Its file without the end `.svg`, and its element in the page.
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    /// The figure in words: what it shows and the values that matter.
    pub(super) description: String,
    pub(super) x: Axis,
    /// Above each other with one x axis.
    pub(super) panels: Vec<Panel>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Panel {
    Lines {
        y: Axis,
        series: Vec<Series>,
        /// One of several panels that are compared: it is low.
        is_lane: bool,
    },
    Bars {
        name: String,
        bars: Vec<Bar>,
    },
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Axis {
    pub(super) name: String,
    pub(super) unit: Unit,
    pub(super) is_logarithmic: bool,
    /// Of an axis of time, what the clock showed at 0, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) clock: Option<f64>,
}

/// What the numbers of an axis count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Unit {
    Bytes,
    Seconds,
    Count,
    Percent,
}

#[derive(Debug, Serialize)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) shape: Shape,
    /// In order of x.
    pub(super) points: Vec<(f64, f64)>,
}

/// How points are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Shape {
    Line,
    /// A line whose value holds until the next point.
    Steps,
    /// The same, filled, and on top of the areas before it.
    Area,
    /// Marks without a line.
    Triangles,
    Crosses,
}

#[derive(Debug, Serialize)]
pub(super) struct Bar {
    pub(super) name: String,
    pub(super) value: f64,
    /// Written behind the bar.
    pub(super) text: String,
}

impl Figure {
    /// Limits with the marks of their raises, above evictions if there are any points of them.
    pub(super) fn limit(description: String, x: Axis, limits: Vec<Series>, evictions: Vec<Series>) -> Self {
        let panel = |name, series| Panel::Lines { y: Axis::new(name, Unit::Count), series, is_lane: false };
        let mut panels = vec![panel("limit on idle buffers", limits)];
        if evictions.iter().any(|series| !series.points.is_empty()) {
            panels.push(panel("evictions so far", evictions));
        }
        Self { id: "limit", title: "Limit and evictions", description, x, panels }
    }

    pub(super) fn hit_rate(description: String, x: Axis, series: Vec<Series>) -> Self {
        let panels =
            vec![Panel::Lines { y: Axis::new("gets served by an idle buffer", Unit::Percent), series, is_lane: false }];
        Self { id: "hit-rate", title: "Hit rate", description, x, panels }
    }
}

impl Shape {
    /// Whether a value holds until the next point.
    pub(super) fn holds(self) -> bool {
        matches!(self, Self::Steps | Self::Area)
    }

    pub(super) fn is_mark(self) -> bool {
        matches!(self, Self::Triangles | Self::Crosses)
    }
}

impl Series {
    /// The value at `x`, which is that of the last point at or before it; `None` before the first.
    pub(super) fn value_at(&self, x: f64) -> Option<f64> {
        let behind = self.points.partition_point(|point| point.0 <= x);
        self.points.get(behind.checked_sub(1)?).map(|point| point.1)
    }

    /// Keeps as many of the points, which are in order of x, as can be seen.
    pub(super) fn new(name: impl Into<String>, shape: Shape, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let mut points: Vec<_> = { points.into_iter() }.filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
        if shape.holds() {
            // A value holds until the next one, and the last point says how far the line goes.
            let last = points.len().saturating_sub(1);
            let is_kept = |at: usize| at == 0 || at == last || points[at].1 != points[at - 1].1;
            points = (0..points.len()).filter(|&at| is_kept(at)).map(|at| points[at]).collect();
        }
        match shape {
            Shape::Line | Shape::Steps | Shape::Area => points = thinned(&points, PARTS),
            Shape::Triangles | Shape::Crosses => points.truncate(MARKS_MAX),
        }
        Self { name: name.into(), shape, points }
    }
}

/// The unit in which an axis is written, chosen by its largest value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Scale {
    pub(super) factor: f64,
    name: &'static str,
}

impl Unit {
    pub(super) fn scale(self, largest: f64) -> Scale {
        // A few units at least, so that the numbers of the axis have few digits after the point.
        self.scale_of(largest / if self == Self::Count { 10.0 } else { 4.0 })
    }

    /// The largest unit of which `value` has one.
    fn scale_of(self, value: f64) -> Scale {
        let steps: &[(f64, &'static str)] = match self {
            Self::Bytes => &[
                (1.0, "B"),
                (1024.0, "KiB"),
                (1_048_576.0, "MiB"),
                (1_073_741_824.0, "GiB"),
                (1_099_511_627_776.0, "TiB"),
            ],
            Self::Seconds => &[(1e-6, "us"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h")],
            Self::Count => &[(1.0, ""), (1e3, "thousands"), (1e6, "millions"), (1e9, "billions")],
            Self::Percent => &[(1.0, "%")],
        };
        let fitting = steps.iter().rev().find(|(factor, _)| value >= *factor).or(steps.first());
        let &(factor, name) = fitting.unwrap_or(&(1.0, ""));
        Scale { factor, name }
    }

    /// A single value with its unit.
    pub(super) fn text(self, value: f64) -> String {
        let Scale { factor, name } = self.scale_of(value);
        match (self, name) {
            (Self::Count, _) => number(value),
            (_, name) => format!("{} {name}", number(value / factor)),
        }
    }
}

impl Axis {
    pub(super) fn new(name: impl Into<String>, unit: Unit) -> Self {
        Self { name: name.into(), unit, is_logarithmic: false, clock: None }
    }

    /// Name and unit.
    pub(super) fn label(&self, scale: Scale) -> String {
        if scale.name.is_empty() { self.name.clone() } else { format!("{} ({})", self.name, scale.name) }
    }
}

/// A number with as many digits after the point as it has of use.
pub(super) fn number(value: f64) -> String {
    if !value.is_finite() {
        return "?".to_owned();
    }
    if value.abs() >= 1000.0 {
        return grouped(whole(value));
    }
    let digits = if value.abs() >= 100.0 { 1 } else { 3 };
    let text = format!("{value:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// A count in few letters.
pub(super) fn short(value: f64) -> String {
    let steps = [(1e9, "G"), (1e6, "M"), (1e3, "k")];
    match steps.into_iter().find(|(factor, _)| value >= *factor) {
        Some((factor, letter)) => format!("{}{letter}", number(value / factor)),
        None => number(value),
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Saturates.
fn whole(value: f64) -> u64 {
    value.round() as u64
}

/// At most four points of each of `parts` equal parts: the first, the lowest, the highest and the last.
fn thinned(points: &[(f64, f64)], parts: usize) -> Vec<(f64, f64)> {
    let len = points.len().div_ceil(parts).max(4);
    let part = |part: &[(f64, f64)]| {
        let by_value = |a: &usize, b: &usize| part[*a].1.total_cmp(&part[*b].1);
        let (lowest, highest) = ((0..part.len()).min_by(by_value), (0..part.len()).max_by(by_value));
        let kept = std::collections::BTreeSet::from([Some(0), lowest, highest, part.len().checked_sub(1)]);
        kept.into_iter().flatten().map(|at| part[at]).collect::<Vec<_>>()
    };
    if len == 4 { points.to_vec() } else { points.chunks(len).flat_map(part).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_are_written_in_a_unit_with_few_digits() {
        let label = |unit: Unit, largest| Axis::new("x", unit).label(unit.scale(largest));
        assert_eq!(label(Unit::Bytes, 5e9), "x (GiB)");
        assert_eq!(label(Unit::Bytes, 3e9), "x (MiB)");
        assert_eq!(label(Unit::Seconds, 0.01), "x (ms)");
        assert_eq!(label(Unit::Seconds, 0.0), "x (us)");
        assert_eq!(label(Unit::Count, 9_999.0), "x");
        assert_eq!(label(Unit::Count, 63_521.0), "x (thousands)");
        assert_eq!(label(Unit::Percent, 1.0), "x (%)");
    }

    #[test]
    fn values_are_written_with_their_unit() {
        assert_eq!(Unit::Bytes.text(16_777_216.0), "16 MiB");
        assert_eq!(Unit::Count.text(63_521.0), "63,521");
        assert_eq!(Unit::Percent.text(98.2683), "98.268 %");
        assert_eq!(number(-0.0001), "0");
        assert_eq!(number(100.0), "100");
        assert_eq!(number(f64::NAN), "?");
    }

    #[test]
    fn points_that_change_nothing_are_left_out() {
        let points = [(0.0, 1.0), (1.0, 1.0), (2.0, 5.0), (3.0, 5.0), (4.0, f64::NAN), (5.0, 5.0)];
        let points_as = |shape| Series::new("x", shape, points).points;
        assert_eq!(points_as(Shape::Steps), [(0.0, 1.0), (2.0, 5.0), (5.0, 5.0)]);
        assert_eq!(points_as(Shape::Line).len(), 5, "the gap alone");
    }

    #[test]
    fn thinning_keeps_each_peak_and_the_ends() {
        let points: Vec<_> =
            (0..10_000).map(|at| (f64::from(at), if at == 5_003 { 9.0 } else { f64::from(at % 2) })).collect();
        let thin = thinned(&points, 100);
        assert!(thin.len() <= 400, "{}", thin.len());
        assert!(thin.contains(&(5_003.0, 9.0)));
        assert_eq!((thin.first(), thin.last()), (points.first(), points.last()));
        assert!(thin.is_sorted_by(|a, b| a.0 < b.0));
        assert!(thinned(&[], 10).is_empty());
        assert_eq!(thinned(&[(1.0, 1.0); 3], 1), [(1.0, 1.0); 3]);
    }
}
