//! What a report shows, as one object: words and tables, and charts as series that `page.js` draws.

use serde::Serialize;

use pinpool_cli::table::grouped;

/// A series has at most four points in each of this many parts: more are invisible.
const PARTS: usize = 430;
/// Most marks of one kind.
const MARKS_MAX: usize = 5_000;

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
}

/// The diagnosis of one pool.
#[derive(Debug, Serialize)]
pub(super) struct Verdict {
    pub(super) name: String,
    /// What it means and what to set, a line for each sentence.
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

/// One chart, or several above each other with the same x axis.
#[derive(Debug, Serialize)]
pub(super) struct Figure {
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    /// What it shows in words, with the values that matter.
    pub(super) description: String,
    pub(super) x: Axis,
    pub(super) panels: Vec<Panel>,
}

#[derive(Debug, Serialize)]
pub(super) struct Panel {
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
    /// One of several panels to compare: it is low.
    pub(super) is_lane: bool,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Axis {
    pub(super) name: String,
    pub(super) unit: Unit,
    /// Of a time axis, the clock at 0, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) clock: Option<f64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Unit {
    Bytes,
    Seconds,
    Count,
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
    /// A line whose value holds until the next point.
    Steps,
    /// The same, filled, and on top of the areas before it.
    Area,
    /// Filled marks without a line.
    Triangles,
    /// Hollow marks without a line.
    Crosses,
}

impl Series {
    /// Keeps as many of the points, which are in order of x, as are visible.
    pub(super) fn new(name: impl Into<String>, shape: Shape, points: impl IntoIterator<Item = (f64, f64)>) -> Self {
        let mut points: Vec<_> = points.into_iter().filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
        if matches!(shape, Shape::Steps | Shape::Area) {
            // A value holds until the next one, and the last point says how far the line goes.
            let last = points.len().saturating_sub(1);
            let is_kept = |at: usize| at == 0 || at == last || points[at].1 != points[at - 1].1;
            points = (0..points.len()).filter(|&at| is_kept(at)).map(|at| points[at]).collect();
        }
        match shape {
            // Areas are stacked: they keep the points of each other.
            Shape::Steps if points.len() > PARTS * 4 => points = thinned(&points),
            Shape::Steps | Shape::Area => {}
            Shape::Triangles | Shape::Crosses => points.truncate(MARKS_MAX),
        }
        Self { name: name.into(), shape, points }
    }
}

impl Axis {
    pub(super) fn new(name: impl Into<String>, unit: Unit) -> Self {
        Self { name: name.into(), unit, clock: None }
    }

    pub(super) fn panel(self, series: Vec<Series>) -> Panel {
        Panel { y: self, series, is_lane: false }
    }
}

impl Unit {
    /// A single value with its unit.
    pub(super) fn text(self, value: f64) -> String {
        let steps: &[(f64, &str)] = match self {
            Self::Bytes => &[
                (1.0, "B"),
                (1024.0, "KiB"),
                (1_048_576.0, "MiB"),
                (1_073_741_824.0, "GiB"),
                (1_099_511_627_776.0, "TiB"),
            ],
            Self::Seconds => &[(1e-6, "us"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h")],
            Self::Count => &[(1.0, "")],
        };
        let fitting = steps.iter().rev().find(|(factor, _)| value >= *factor).or(steps.first());
        let &(factor, name) = fitting.unwrap_or(&(1.0, ""));
        format!("{} {name}", number(value / factor)).trim_end().to_owned()
    }
}

/// A number with as many decimals as are of use.
pub(super) fn number(value: f64) -> String {
    if !value.is_finite() {
        return "?".to_owned();
    }
    if value.abs() >= 1000.0 {
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Saturates.
        return grouped(value.round() as u64);
    }
    let digits = if value.abs() >= 100.0 { 1 } else { 3 };
    let text = format!("{value:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    if text == "-0" { "0".to_owned() } else { text.to_owned() }
}

/// At most four points of each part: the first, the lowest, the highest and the last.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let len = points.len().div_ceil(PARTS);
    let part = |part: &[(f64, f64)]| {
        let by_value = |a: &usize, b: &usize| part[*a].1.total_cmp(&part[*b].1);
        let (lowest, highest) = ((0..part.len()).min_by(by_value), (0..part.len()).max_by(by_value));
        let mut kept: Vec<_> = [Some(0), lowest, highest, part.len().checked_sub(1)].into_iter().flatten().collect();
        kept.sort_unstable();
        kept.dedup();
        kept.into_iter().map(|at| part[at]).collect::<Vec<_>>()
    };
    points.chunks(len).flat_map(part).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thinned_series_keeps_its_ends_and_its_extremes() {
        let points = (0..100_000).map(|at| (f64::from(at), if at == 777 { 9.0 } else { 1.0 + f64::from(at % 2) }));
        let series = Series::new("a", Shape::Steps, points);
        assert!(series.points.len() <= PARTS * 4 + 4, "{}", series.points.len());
        assert_eq!((series.points[0].0, series.points.last().unwrap().0), (0.0, 99_999.0));
        assert!(series.points.contains(&(777.0, 9.0)));
        let steps = Series::new("a", Shape::Steps, (0..10).map(|at| (f64::from(at), 1.0)));
        assert_eq!(steps.points, [(0.0, 1.0), (9.0, 1.0)]);
        let raises = [(0.0, 100.0), (1.0, 110.0), (2.0, 121.0), (3.0, 133.0)];
        assert_eq!(Series::new("a", Shape::Steps, raises).points, raises, "few points stay");
    }

    #[test]
    fn values_have_units() {
        let bytes = [0.0, 4096.0, 1_000_000.0].map(|value| Unit::Bytes.text(value));
        assert_eq!(bytes, ["0 B", "4 KiB", "976.6 KiB"]);
        assert_eq!([Unit::Seconds.text(0.0017), Unit::Count.text(12_345.0)], ["1.7 ms", "12,345"]);
    }
}
