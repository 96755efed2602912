//! Draws figures as SVG, with plotters.

use std::error::Error;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::escape::escaped;
use super::figure::{Axis, BarPanel, Body, Figure, LinePanel, Map, MapState, Marks, Series, number, short, thinned};
use super::style::{Role, css, restyle};

/// How wide a figure is, and what stands around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In the page, on a desktop or on paper.
    Wide,
    /// In the page, on a phone.
    Narrow,
    /// A file of its own: with its title and its style sheet.
    File,
}

impl Place {
    fn width(self) -> u32 {
        if self == Self::Narrow { 380 } else { 860 }
    }

    fn class(self) -> &'static str {
        match self {
            Self::Wide => "plot wide",
            Self::Narrow => "plot narrow",
            Self::File => "plot",
        }
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), Box<dyn Error>>;

/// plotters writes text of 1.24 times the size at its size.
const TEXT: f64 = 12.0 * 1.24;
const TITLE: f64 = 15.0 * 1.24;
const ROW: i32 = 20;
const PLOT_HEIGHT: i32 = 190;
const X_LABELS_HEIGHT: i32 = 44;
const MARGIN: i32 = 12;
/// Most marks that are drawn; a log with more is no program's.
pub(super) const MARKS_MAX: usize = 5_000;

/// The figure as one `svg` element.
///
/// # Errors
///
/// As plotters.
pub(super) fn svg(figure: &Figure, place: Place) -> Result<String, Box<dyn Error>> {
    let width = place.width();
    let panels = match &figure.body {
        Body::Lines { panels, .. } => panels.iter().map(|panel| line_panel_height(panel, width)).collect(),
        Body::Bars(panels) => panels.iter().map(bar_panel_height).collect(),
        Body::Map(_) => vec![map_height(width)],
    };
    let title_height = if place == Place::File { ROW + 8 } else { 0 };
    let height = title_height + panels.iter().sum::<i32>() + 4;
    let size = (width, u32::try_from(height)?);
    let mut drawn = String::new();
    let root = SVGBackend::with_string(&mut drawn, size).into_drawing_area();
    root.fill(&Role::Paper.color())?;
    if place == Place::File {
        root.draw(&Text::new(figure.title, (MARGIN, 8), text_style(TITLE)))?;
    }
    let (_, mut rest) = root.split_vertically(title_height);
    for (at, height) in panels.into_iter().enumerate() {
        let (area, below) = rest.split_vertically(height);
        match &figure.body {
            Body::Lines { x, panels } => draw_lines(&area, x, x_range(x, panels), &panels[at], width)?,
            Body::Bars(panels) => draw_bars(&area, &panels[at], width)?,
            Body::Map(map) => draw_map(&area, map, width)?,
        }
        rest = below;
    }
    root.present()?;
    drop(rest);
    drop(root);
    Ok(with_words(figure, place, size, &restyle(&drawn)))
}

/// The drawn elements in an `svg` element that says what it shows.
fn with_words(figure: &Figure, place: Place, (width, height): (u32, u32), drawn: &str) -> String {
    let (_, elements) = drawn.split_once('>').unwrap_or(("", drawn));
    let id = format!("{}-{}", figure.id, place.width());
    let elements = elements.trim();
    let elements = if matches!(figure.body, Body::Map(_)) { hatched(&id, elements) } else { elements.to_owned() };
    let style = if place == Place::File { format!("<style>\n{}</style>\n", css()) } else { String::new() };
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"{}\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" role=\"img\" aria-labelledby=\"{id}-title {id}-words\">\n\
         <title id=\"{id}-title\">{}</title>\n<desc id=\"{id}-words\">{}</desc>\n{style}{elements}\n",
        place.class(),
        escaped(figure.title),
        escaped(&figure.description)
    )
}

/// Hatches what is in flight. The pattern has a name of its own in each figure: one that is in a hidden figure is not drawn.
fn hatched(id: &str, elements: &str) -> String {
    let fill = format!("fill=\"url(#{id}-hatch)\"");
    format!(
        "<defs><pattern id=\"{id}-hatch\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" \
         patternTransform=\"rotate(45)\"><rect class=\"f-paper\" width=\"5\" height=\"5\"/><rect class=\"f-m3\" width=\"3\" \
         height=\"5\"/></pattern></defs>\n{}",
        elements.replace("class=\"f-m3\"", &fill)
    )
}

fn text_style(size: f64) -> TextStyle<'static> {
    let mut style = TextStyle::from(("sans-serif", size).into_font());
    style.color = Role::Ink.color().to_backend_color();
    style
}

fn anchored(h_pos: HPos) -> TextStyle<'static> {
    text_style(TEXT).pos(Pos::new(h_pos, VPos::Center))
}

/// Width of a text; glyphs are at most about this wide on average.
fn text_width(text: &str) -> i32 {
    i32::try_from(text.chars().count()).unwrap_or(i32::MAX / 16).saturating_mul(7)
}

/// A line of the legend: series, marks or states with their names.
#[derive(Clone, Copy)]
enum Sample {
    Line(u8),
    Triangle,
    Cross,
    State(u8),
}

fn samples(panel: &LinePanel) -> Vec<(Sample, &str)> {
    let series = (0..).zip(&panel.series).map(|(number, series)| (Sample::Line(number), series.name.as_str()));
    let marks = panel.marks.iter().filter(|marks| !marks.points.is_empty());
    let marks = marks.map(|marks| {
        let sample = if marks.are_crosses { Sample::Cross } else { Sample::Triangle };
        (sample, marks.name.as_str())
    });
    series.chain(marks).collect()
}

/// Where each sample stands, and the height of all.
fn legend(samples: &[(Sample, &str)], width: u32) -> (Vec<(i32, i32)>, i32) {
    let width = i32::try_from(width).unwrap_or(i32::MAX);
    let (mut x, mut y) = (MARGIN, ROW / 2);
    let mut places = Vec::new();
    for (_, name) in samples {
        let needed = 34 + text_width(name) + 14;
        if x > MARGIN && x + needed > width {
            (x, y) = (MARGIN, y + ROW);
        }
        places.push((x, y));
        x += needed;
    }
    (places, y + ROW / 2)
}

fn draw_legend(area: &Area<'_>, samples: &[(Sample, &str)], width: u32) -> Drawn {
    let (places, _) = legend(samples, width);
    for (&(sample, name), (x, y)) in samples.iter().zip(places) {
        match sample {
            Sample::Line(number) => {
                let style = Role::Series(number).color().stroke_width(2);
                area.draw(&PathElement::new(vec![(x, y), (x + 28, y)], style))?;
            }
            Sample::Triangle => area.draw(&TriangleMarker::new((x + 14, y), 5, Role::Mark.color().filled()))?,
            Sample::Cross => area.draw(&Cross::new((x + 14, y), 4, Role::Mark.color().stroke_width(2)))?,
            Sample::State(number) => {
                let corners = [(x + 6, y - 6), (x + 26, y + 6)];
                area.draw(&Rectangle::new(corners, Role::State(number).color().filled()))?;
            }
        }
        area.draw(&Text::new(name.to_owned(), (x + 34, y), anchored(HPos::Left)))?;
    }
    Ok(())
}

fn line_panel_height(panel: &LinePanel, width: u32) -> i32 {
    ROW + legend(&samples(panel), width).1 + PLOT_HEIGHT + X_LABELS_HEIGHT
}

/// From 0, or of a logarithmic axis from the first point after it, to the last point.
fn x_range(x: &Axis, panels: &[LinePanel]) -> (f64, f64) {
    let series = panels.iter().flat_map(|panel| panel.series.iter().map(|series| &series.points));
    let marks = panels.iter().flat_map(|panel| panel.marks.iter().map(|marks| &marks.points));
    let values = || series.clone().chain(marks.clone()).flatten().map(|point| point.0);
    let largest = values().fold(0.0, f64::max);
    let largest = if largest > 0.0 { largest } else { 1.0 };
    let least = values().filter(|&value| value > 0.0).fold(largest / 10.0, f64::min);
    (if x.is_logarithmic { least } else { 0.0 }, largest)
}

fn y_range(panel: &LinePanel) -> (f64, f64) {
    let values = || panel.series.iter().flat_map(|series| &series.points).map(|point| point.1);
    let (least, most) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
    if panel.y.unit == super::figure::Unit::Percent {
        // Near 100 % small differences count.
        return if least > 90.0 && least <= 100.0 { (least.floor().min(99.0), 100.0) } else { (0.0, 100.0) };
    }
    (0.0, if most > 0.0 { most * 1.08 } else { 1.0 })
}

fn draw_lines(area: &Area<'_>, x: &Axis, x_range: (f64, f64), panel: &LinePanel, width: u32) -> Drawn {
    let y_scale = panel.y.unit.scale(y_range(panel).1);
    area.draw(&Text::new(panel.y.label(y_scale), (MARGIN, ROW / 2), anchored(HPos::Left)))?;
    let samples = samples(panel);
    let (_, below) = area.split_vertically(ROW);
    draw_legend(&below, &samples, width)?;
    let (_, plot) = below.split_vertically(legend(&samples, width).1);
    if x.is_logarithmic {
        let label = format!("{}, logarithmic", x.name);
        let range = (x_range.0..x_range.1).log_scale();
        draw_chart(&plot, range, &XAxis { factor: 1.0, label, text: short }, x_range, panel, width)
    } else {
        let scale = x.unit.scale(x_range.1);
        let range = x_range.0 / scale.factor..x_range.1 / scale.factor;
        let axis = XAxis { factor: scale.factor, label: x.label(scale), text: number };
        draw_chart(&plot, range, &axis, x_range, panel, width)
    }
}

/// How the x axis is written.
struct XAxis {
    factor: f64,
    label: String,
    text: fn(f64) -> String,
}

fn draw_chart<X>(plot: &Area<'_>, range: X, x: &XAxis, (begin, end): (f64, f64), panel: &LinePanel, width: u32) -> Drawn
where
    X: AsRangedCoord<Value = f64>,
    X::CoordDescType: ValueFormatter<f64>,
{
    let (low, high) = y_range(panel);
    let y_factor = panel.y.unit.scale(high).factor;
    let mut chart = chart(plot).build_cartesian_2d(range, low / y_factor..high / y_factor)?;
    chart
        .configure_mesh()
        .x_labels(if width < 500 { 4 } else { 9 })
        .y_labels(5)
        .max_light_lines(0)
        .bold_line_style(Role::Grid.color())
        .axis_style(Role::Ink.color())
        .label_style(text_style(TEXT))
        .axis_desc_style(text_style(TEXT))
        .x_label_formatter(&|value: &f64| (x.text)(*value))
        .y_label_formatter(&|value: &f64| number(*value))
        .x_desc(x.label.clone())
        .draw()?;
    // What is before the beginning of a logarithmic axis is drawn there.
    let scaled = |&(x_value, y): &(f64, f64)| (x_value.max(begin) / x.factor, y / y_factor);
    for (number, series) in (0..).zip(&panel.series) {
        let points = points_of(series, end, width as usize / 2);
        let style = Role::Series(number).color().stroke_width(2);
        chart.draw_series(LineSeries::new(points.iter().map(scaled), style))?;
        // A line of one point has no length.
        if let [point] = points.as_slice() {
            chart.draw_series([Circle::new(scaled(point), 3, Role::Series(number).color().filled())])?;
        }
    }
    for Marks { points, are_crosses, .. } in &panel.marks {
        let points = points.iter().take(MARKS_MAX).map(scaled);
        if *are_crosses {
            chart.draw_series(points.map(|point| Cross::new(point, 4, Role::Mark.color().stroke_width(2))))?;
        } else {
            chart.draw_series(points.map(|point| TriangleMarker::new(point, 5, Role::Mark.color().filled())))?;
        }
    }
    Ok(())
}

fn chart<'a, 'b>(plot: &'a Area<'b>) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut chart = ChartBuilder::on(plot);
    chart.margin_top(8).margin_right(22).margin_left(4).x_label_area_size(X_LABELS_HEIGHT).y_label_area_size(54);
    chart
}

/// What is drawn of a series: with the corners of its steps, up to `end`, and not more points than can be seen.
fn points_of(series: &Series, end: f64, buckets: usize) -> Vec<(f64, f64)> {
    let points: Vec<_> = series.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect();
    if !series.is_step {
        return thinned(&points, buckets);
    }
    let mut steps: Vec<(f64, f64)> = Vec::new();
    for (x, y) in points {
        if let Some(&(_, before)) = steps.last() {
            steps.push((x, before));
        }
        steps.push((x, y));
    }
    if let Some(&(_, last)) = steps.last() {
        steps.push((end, last));
    }
    thinned(&steps, buckets)
}

fn bar_panel_height(panel: &BarPanel) -> i32 {
    ROW + ROW * i32::try_from(panel.bars.len()).unwrap_or(i32::MAX / 64) + MARGIN
}

fn draw_bars(area: &Area<'_>, panel: &BarPanel, width: u32) -> Drawn {
    let longest = |text: fn(&super::figure::Bar) -> &str| panel.bars.iter().map(|bar| text_width(text(bar))).max();
    let left = MARGIN + longest(|bar| &bar.name).unwrap_or(0) + 8;
    let right = longest(|bar| &bar.text).unwrap_or(0) + 8 + MARGIN;
    let room = (i32::try_from(width)? - left - right).max(40);
    let most = panel.bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
    area.draw(&Text::new(panel.name.clone(), (MARGIN, ROW / 2), anchored(HPos::Left)))?;
    for (at, bar) in (1..).zip(&panel.bars) {
        let y = ROW * at + ROW / 2;
        #[allow(clippy::cast_possible_truncation)] // Saturates; at most `room`.
        let end = left + if most > 0.0 { (bar.value / most * f64::from(room)) as i32 } else { 0 };
        area.draw(&Text::new(bar.name.clone(), (left - 8, y), anchored(HPos::Right)))?;
        // What is there is seen.
        let end = if bar.value > 0.0 { end.max(left + 1) } else { end };
        if end > left {
            let style = Role::Series(0).color().filled();
            area.draw(&Rectangle::new([(left, y - 6), (end, y + 6)], style))?;
        }
        area.draw(&Text::new(bar.text.clone(), (end + 8, y), anchored(HPos::Left)))?;
    }
    Ok(())
}

const STATES: [(Sample, MapState); 4] = [
    (Sample::State(0), MapState::Free),
    (Sample::State(1), MapState::Idle),
    (Sample::State(2), MapState::InUse),
    (Sample::State(3), MapState::InFlight),
];

fn map_samples() -> Vec<(Sample, &'static str)> {
    STATES.iter().map(|&(sample, state)| (sample, state.name())).collect()
}

fn map_height(width: u32) -> i32 {
    ROW + legend(&map_samples(), width).1 + PLOT_HEIGHT * 2 + X_LABELS_HEIGHT
}

fn draw_map(area: &Area<'_>, map: &Map, width: u32) -> Drawn {
    area.draw(&Text::new(map.rows_name.clone(), (MARGIN, ROW / 2), anchored(HPos::Left)))?;
    let (_, below) = area.split_vertically(ROW);
    let samples = map_samples();
    draw_legend(&below, &samples, width)?;
    let (_, plot) = below.split_vertically(legend(&samples, width).1);
    let scale = map.x.unit.scale(map.x_max);
    let rows = map.columns.iter().map(Vec::len).max().unwrap_or(0).max(1) as f64;
    let x_max = if map.x_max > 0.0 { map.x_max / scale.factor } else { 1.0 };
    let mut chart = chart(&plot).build_cartesian_2d(0.0..x_max, 0.0..rows)?;
    let formatted = |value: &f64| number(*value);
    chart
        .configure_mesh()
        .disable_mesh()
        .x_labels(if width < 500 { 4 } else { 9 })
        .y_labels(5)
        .axis_style(Role::Ink.color())
        .label_style(text_style(TEXT))
        .axis_desc_style(text_style(TEXT))
        .x_label_formatter(&formatted)
        .y_label_formatter(&formatted)
        .x_desc(map.x.label(scale))
        .draw()?;
    let column_width = x_max / map.columns.len().max(1) as f64;
    for (row, from, to, state) in runs(&map.columns) {
        let number = STATES.iter().position(|&(_, known)| known == state).unwrap_or(0);
        let style = Role::State(u8::try_from(number)?).color().filled();
        let corners = [(from as f64 * column_width, row as f64), (to as f64 * column_width, row as f64 + 1.0)];
        chart.draw_series([Rectangle::new(corners, style)])?;
    }
    Ok(())
}

/// Columns next to each other with the same state: row, first column, column behind, state.
fn runs(columns: &[Vec<Option<MapState>>]) -> Vec<(usize, usize, usize, MapState)> {
    let rows = columns.iter().map(Vec::len).max().unwrap_or(0);
    let state = |row: usize, column: usize| columns.get(column).and_then(|states| states.get(row).copied().flatten());
    let mut runs = Vec::new();
    for row in 0..rows {
        let mut from = 0;
        for column in 1..=columns.len() {
            if column < columns.len() && state(row, column) == state(row, from) {
                continue;
            }
            if let Some(state) = state(row, from) {
                runs.push((row, from, column, state));
            }
            from = column;
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::super::figure::Unit;
    use super::*;

    fn panel(points: Vec<(f64, f64)>, marks: Vec<(f64, f64)>) -> LinePanel {
        LinePanel {
            y: Axis::new("limit", Unit::Count),
            series: vec![Series { name: "pool <1>".to_owned(), points, is_step: true }],
            marks: vec![Marks { name: "raise".to_owned(), points: marks, are_crosses: false }],
        }
    }

    fn figure(body: Body) -> Figure {
        Figure { id: "x", title: "A & B", description: "words < more".to_owned(), body }
    }

    #[test]
    fn a_figure_has_its_words_axes_names_and_marks() {
        let x = Axis::new("gets", Unit::Count);
        let panels = vec![panel(vec![(0.0, 100.0), (50_000.0, 110.0)], vec![(10_000.0, 110.0), (50_000.0, 121.0)])];
        let figure = figure(Body::Lines { x, panels });
        for place in [Place::Wide, Place::Narrow, Place::File] {
            let svg = svg(&figure, place).unwrap();
            for text in [
                "<title id=\"x-",
                ">A &amp; B</title>",
                ">words &lt; more</desc>",
                "pool &lt;1&gt;",
                "gets (thousands)",
            ] {
                assert!(svg.contains(text), "no {text} in {svg}");
            }
            // The two and the one of the legend.
            assert_eq!(svg.matches("class=\"f-mark\"").count(), 3);
            assert_eq!(svg.contains("<style>"), place == Place::File);
        }
    }

    #[test]
    fn a_logarithmic_axis_begins_at_the_first_point_and_has_all_marks() {
        let mut x = Axis::new("gets", Unit::Count);
        x.is_logarithmic = true;
        let marks = vec![(0.0, 110.0), (2_000.0, 121.0), (8e8, 133.0)];
        let figure = figure(Body::Lines { x, panels: vec![panel(vec![(0.0, 100.0), (8e8, 133.0)], marks)] });
        let svg = svg(&figure, Place::Wide).unwrap();
        assert_eq!(svg.matches("class=\"f-mark\"").count(), 4);
        for text in ["\ngets, logarithmic\n", "\n10k\n", "\n100M\n"] {
            assert!(svg.contains(text), "no {text} in {svg}");
        }
    }

    #[test]
    fn a_figure_without_points_is_drawn_empty() {
        let x = Axis::new("time", Unit::Seconds);
        let empty = figure(Body::Lines { x: x.clone(), panels: vec![panel(Vec::new(), Vec::new())] });
        assert!(svg(&empty, Place::Wide).unwrap().contains("time (ms)"));
        let map = Map { x, x_max: 0.0, rows_name: "granules".to_owned(), columns: Vec::new() };
        assert!(svg(&figure(Body::Map(map)), Place::Narrow).unwrap().contains("granules"));
        let bars = vec![BarPanel { name: "none".to_owned(), bars: Vec::new() }];
        assert!(svg(&figure(Body::Bars(bars)), Place::Wide).unwrap().contains("none"));
    }

    #[test]
    fn equal_cells_of_a_map_are_one_rectangle() {
        let (free, used) = (Some(MapState::Free), Some(MapState::InUse));
        let columns = [vec![free, None], vec![free, used], vec![used, used]];
        assert_eq!(runs(&columns), [(0, 0, 2, MapState::Free), (0, 2, 3, MapState::InUse), (1, 1, 3, MapState::InUse)]);
    }
}
