//! What a figure shows, whatever draws it.

/// One figure: a file, and a part of the page.
#[derive(Debug)]
pub(super) struct Figure {
    /// Its file without the end `.svg`, and its element in the page.
    pub(super) id: &'static str,
    pub(super) title: &'static str,
    /// The same in words: what it shows and the values that matter.
    pub(super) description: String,
    pub(super) body: Body,
}

#[derive(Debug)]
pub(super) enum Body {
    /// Panels above each other with one x axis.
    Lines {
        x: Axis,
        panels: Vec<LinePanel>,
    },
    /// Panels of horizontal bars.
    Bars(Vec<BarPanel>),
    Map(Map),
}

#[derive(Debug, Clone)]
pub(super) struct Axis {
    pub(super) name: String,
    pub(super) unit: Unit,
    pub(super) is_logarithmic: bool,
}

/// What the numbers of an axis count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Bytes,
    Seconds,
    Count,
    Percent,
}

#[derive(Debug)]
pub(super) struct LinePanel {
    pub(super) y: Axis,
    pub(super) series: Vec<Series>,
    pub(super) marks: Vec<Marks>,
}

#[derive(Debug)]
pub(super) struct Series {
    pub(super) name: String,
    /// In order of x.
    pub(super) points: Vec<(f64, f64)>,
    /// Whether a value holds until the next point.
    pub(super) is_step: bool,
}

/// Points in time that are marked, with the value there.
#[derive(Debug)]
pub(super) struct Marks {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
    /// Drawn as crosses instead of triangles.
    pub(super) are_crosses: bool,
}

#[derive(Debug)]
pub(super) struct BarPanel {
    pub(super) name: String,
    pub(super) bars: Vec<Bar>,
}

#[derive(Debug)]
pub(super) struct Bar {
    pub(super) name: String,
    pub(super) value: f64,
    /// Written behind the bar.
    pub(super) text: String,
}

/// Memory by place and time.
#[derive(Debug)]
pub(super) struct Map {
    pub(super) x: Axis,
    pub(super) x_max: f64,
    /// What one row is.
    pub(super) rows_name: String,
    /// For each column, which are equal spans of time, the state of each row from the lowest address on; `None` is not pinned.
    pub(super) columns: Vec<Vec<Option<MapState>>>,
}

/// In the order in which one hides another in the same cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum MapState {
    Free,
    Idle,
    InUse,
    InFlight,
}

impl MapState {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Idle => "idle buffers",
            Self::InUse => "in use",
            Self::InFlight => "in flight",
        }
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
        Self { name: name.into(), unit, is_logarithmic: false }
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
        return pinpool_cli::table::grouped(whole(value));
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

/// At most four points for each of `buckets` equal parts of the x axis: the first, the lowest, the highest and the last.
pub(super) fn thinned(points: &[(f64, f64)], buckets: usize) -> Vec<(f64, f64)> {
    let (Some(first), Some(last)) = (points.first(), points.last()) else { return Vec::new() };
    if points.len() <= buckets * 2 || last.0 <= first.0 {
        return points.to_vec();
    }
    let width = (last.0 - first.0) / buckets as f64;
    let bucket = |point: &(f64, f64)| ((point.0 - first.0) / width).floor();
    let mut thin = Vec::new();
    for part in points.chunk_by(|a, b| bucket(a).total_cmp(&bucket(b)).is_eq()) {
        let extreme = |largest: bool| {
            let by_value = |a: &(usize, &(f64, f64)), b: &(usize, &(f64, f64))| a.1.1.total_cmp(&b.1.1);
            let points = part.iter().enumerate();
            if largest { points.max_by(by_value) } else { points.min_by(by_value) }.map_or(0, |(at, _)| at)
        };
        let mut kept = [0, extreme(false), extreme(true), part.len() - 1];
        kept.sort_unstable();
        let mut before = None;
        for at in kept {
            if before.replace(at) != Some(at) {
                thin.push(part[at]);
            }
        }
    }
    thin
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
