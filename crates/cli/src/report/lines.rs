//! Panels of lines, areas and marks, with the values under the pointer. No script: a browser shows the titles of elements.

use super::escape::escaped;
use super::figure::{Axis, Series, Shape, Unit, number};
use super::svg::{Canvas, LOOKS, PLOT_HEIGHT, Plot};

/// Height of a panel that is compared with others.
const LANE_HEIGHT: f64 = 70.0;
/// Places of a panel with values of their own under the pointer.
const HOVERS: u32 = 100;

impl Canvas {
    pub(super) fn lines(&mut self, axis: &Axis, x: (f64, f64), y: &Axis, series: &[Series], is_lane: bool) {
        let areas: Vec<&Series> = series.iter().filter(|one| one.shape == Shape::Area).collect();
        let edges = edges(&areas);
        let range = y_range(y.unit, series, &edges);
        let scale = y.unit.scale(range.1);
        self.header(&y.label(scale));
        // Marks that are not there are not explained.
        let series: Vec<_> = series.iter().filter(|one| !one.shape.is_mark() || !one.points.is_empty()).collect();
        let look = |number: usize| format!("s{}", number % LOOKS);
        if !is_lane {
            self.legend(series.iter().map(|one| &*one.name), |canvas, at, x, y| match series[at].shape {
                Shape::Line | Shape::Steps => canvas.path(&format!("line {}", look(at)), &format!("M{x:.1} {y:.1}h28")),
                Shape::Area => {
                    canvas.path(&format!("fill area {}", look(at)), &format!("M{x:.1} {:.1}h28v12h-28z", y - 6.0))
                }
                mark => canvas.mark(mark, (x + 14.0, y)),
            });
        }
        let plot = self.axes(axis, x, range, scale.factor, if is_lane { LANE_HEIGHT } else { PLOT_HEIGHT });
        // The uppermost first: those below it hide what is not its own.
        for (number, edge) in edges.iter().enumerate().rev() {
            self.area(&look(number), edge, &plot);
        }
        for (number, one) in series.iter().enumerate() {
            match one.shape {
                Shape::Area => {}
                Shape::Line | Shape::Steps => self.curve(&look(number), one, &plot),
                mark => one.points.iter().for_each(|&(x, y)| self.mark(mark, plot.at(x, y))),
            }
        }
        if self.has_hover && !axis.is_logarithmic {
            self.hovers(axis, x, y.unit, &series, &plot);
        }
    }

    fn area(&mut self, look: &str, edge: &[(f64, f64)], plot: &Plot) {
        let Some((&first, rest)) = edge.split_first() else { return };
        let (x, y) = plot.at(first.0, first.1);
        let mut steps = format!("M{x:.1} {:.1}V{y:.1}", plot.bottom);
        let mut last = y;
        for &(x, y) in rest {
            let (x, y) = plot.at(x, y);
            // Most edges follow another, and many of its places change nothing here.
            if format!("{y:.1}") != format!("{last:.1}") {
                steps += &format!("H{x:.1}V{y:.1}");
                last = y;
            }
        }
        steps += &format!("H{:.1}V{:.1}z", plot.right, plot.bottom);
        self.path(&format!("fill area {look}"), &steps);
    }

    fn curve(&mut self, look: &str, one: &Series, plot: &Plot) {
        let mut points = one.points.iter().map(|&(x, y)| plot.at(x, y));
        let Some((x, y)) = points.next() else { return };
        if one.points.len() == 1 {
            // A line of one point has no length.
            self.line(format_args!("<circle class=\"fill {look}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\"/>"));
        }
        let mut steps = format!("M{x:.1} {y:.1}");
        steps.extend(points.map(|(x, y)| match one.shape {
            Shape::Steps => format!("H{x:.1}V{y:.1}"),
            _ => format!("L{x:.1} {y:.1}"),
        }));
        if one.shape == Shape::Steps {
            steps += &format!("H{:.1}", plot.right);
        }
        self.path(&format!("line {look}"), &steps);
    }

    /// Columns that say their values.
    fn hovers(&mut self, axis: &Axis, x: (f64, f64), unit: Unit, series: &[&Series], plot: &Plot) {
        if series.iter().all(|one| one.points.is_empty()) {
            return;
        }
        let width = (plot.right - plot.left) / f64::from(HOVERS);
        let step = (x.1 - x.0) / f64::from(HOVERS);
        let (top, height) = (plot.top, plot.bottom - plot.top);
        for column in 0..HOVERS {
            let (from, to) = (x.0 + step * f64::from(column), x.0 + step * f64::from(column + 1));
            let value = |one: &&Series| {
                if one.shape.is_mark() {
                    let marks = one.points.iter().filter(|point| (from..to).contains(&point.0)).count();
                    return (marks > 0).then(|| format!("{}: {marks}", one.name));
                }
                one.value_at(to).map(|value| format!("{}: {}", one.name, unit.text(value)))
            };
            let values: Vec<_> = series.iter().filter_map(value).collect();
            let place = if axis.unit == Unit::Count { number(to.round()) } else { axis.unit.text(to) };
            let words = escaped(&format!("{} {place}: {}", axis.name, values.join(", ")));
            let left = plot.left + width * f64::from(column);
            self.line(format_args!(
                "<rect class=\"hover\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"><title>{words}</title></rect>"
            ));
        }
    }
}

/// The upper edge of each area: its value and those of the areas before it, at each place where one of them changes.
fn edges(areas: &[&Series]) -> Vec<Vec<(f64, f64)>> {
    let mut places: Vec<f64> = areas.iter().flat_map(|area| &area.points).map(|point| point.0).collect();
    places.sort_by(f64::total_cmp);
    places.dedup();
    let mut below = vec![0.0; places.len()];
    let edge = |area: &&Series| {
        let (mut next, mut value) = (0, 0.0);
        let mut edge = Vec::new();
        for (&x, below) in places.iter().zip(&mut below) {
            while let Some(&(_, y)) = area.points.get(next).filter(|point| point.0 <= x) {
                (next, value) = (next + 1, y);
            }
            *below += value;
            edge.push((x, *below));
        }
        edge
    };
    areas.iter().map(edge).collect()
}

fn y_range(unit: Unit, series: &[Series], edges: &[Vec<(f64, f64)>]) -> (f64, f64) {
    let values = || series.iter().flat_map(|one| &one.points).chain(edges.iter().flatten()).map(|point| point.1);
    let (least, most) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
    match unit {
        // Near 100 % small differences count.
        Unit::Percent if least > 90.0 && least <= 100.0 => (least.floor().min(99.0), 100.0),
        Unit::Percent => (0.0, 100.0),
        _ => (0.0, if most > 0.0 { most * 1.08 } else { 1.0 }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::figure::{Figure, Panel};
    use super::super::svg::{Place, svg};
    use super::*;

    #[test]
    fn an_area_lies_on_those_before_it_wherever_one_of_them_changes() {
        let used = Series::new("in use", Shape::Area, [(0.0, 1.0), (2.0, 3.0)]);
        let idle = Series::new("idle", Shape::Area, [(1.0, 5.0), (2.0, 0.0)]);
        let edges = edges(&[&used, &idle]);
        assert_eq!(edges[0], [(0.0, 1.0), (1.0, 1.0), (2.0, 3.0)]);
        assert_eq!(edges[1], [(0.0, 1.0), (1.0, 6.0), (2.0, 3.0)]);
        assert!(y_range(Unit::Bytes, &[used, idle], &edges).1 > 6.0);
    }

    #[test]
    fn a_page_has_values_under_the_pointer_and_a_file_has_none() {
        let series = vec![
            Series::new("in use", Shape::Area, [(0.0, 1024.0), (50.0, 2048.0)]),
            Series::new("a <wait>", Shape::Triangles, [(10.5, 1.0), (10.7, 1.0)]),
        ];
        let x = Axis { clock: Some(0.0), ..Axis::new("time", Unit::Seconds) };
        let panels = vec![Panel::Lines { y: Axis::new("bytes", Unit::Bytes), series, is_lane: false }];
        let figure = Figure { id: "x", title: "x", description: String::new(), x, panels };
        let page = svg(&figure, Place::Wide);
        assert_eq!(page.matches("class=\"hover\"").count(), 100);
        assert!(page.contains("<title>time 11 s: in use: 1 KiB, a &lt;wait&gt;: 2</title>"), "{page}");
        assert!(page.contains(">00:00:20<") && page.contains("and the clock (UTC)"), "{page}");
        assert!(!svg(&figure, Place::File).contains("<rect class=\"hover\""));
    }
}
