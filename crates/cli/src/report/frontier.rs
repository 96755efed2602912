//! The picture of an advice: what each ceiling costs, with the point of today and the one that is advised.

use super::figure::{Axis, Figure, Panel, Series, Shape, Unit};
use super::svg::{Place, svg};

/// Bytes and seconds lost.
type Point = (u64, f64);

/// The picture as a file of its own. `today` lies at what was held at most: a ceiling far above that would be all there is to see.
pub(crate) fn frontier_svg(ceilings: &[Point], today: Point, advised: Option<Point>) -> String {
    let point = |&(bytes, seconds): &Point| (bytes as f64, seconds);
    let text = |of: &str, (bytes, seconds): Point| {
        format!("{}{of} and {} lost", Unit::Bytes.text(bytes as f64), Unit::Seconds.text(seconds))
    };
    let mut words = format!("Each point is a replay under that ceiling. Today: {}.", text(" held at most", today));
    let mut series = vec![
        Series::new("seconds lost", Shape::Line, ceilings.iter().map(point)),
        Series::new("today", Shape::Triangles, [point(&today)]),
    ];
    if let Some(advised) = advised {
        words += &format!(" Advised: {}.", text("", advised));
        series.push(Series::new("advised", Shape::Crosses, [point(&advised)]));
    }
    let figure = Figure {
        id: "frontier",
        title: "Ceiling against seconds lost",
        description: words,
        x: Axis::new("ceiling", Unit::Bytes),
        panels: vec![Panel::Lines { y: Axis::new("seconds lost", Unit::Seconds), series, is_lane: false }],
    };
    svg(&figure, Place::File)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn today_and_the_advice_are_marked() {
        let svg = frontier_svg(&[(1 << 20, 9.0), (2 << 20, 1.0)], (1 << 20, 9.0), Some((2 << 20, 1.0)));
        // One in the legend and one in the plot each.
        assert_eq!((svg.matches("fill mark").count(), svg.matches("line mark").count()), (2, 2), "{svg}");
        assert!(svg.contains("Today: 1 MiB held at most and 9 s lost. Advised: 2 MiB and 1 s lost."), "{svg}");
        assert!(!frontier_svg(&[], (0, 0.0), None).contains("NaN"));
    }
}
