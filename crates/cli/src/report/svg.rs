//! Draws figures as SVG. Colours are classes of `figure.css`, so that one style sheet serves light and dark.

use std::fmt::Write;

use super::escape::escaped;
use super::figure::{Axis, Bar, Figure, Panel, Shape, number, short};

/// The style sheet of the figures.
pub(super) const STYLE: &str = include_str!("figure.css");

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

const ROW: f64 = 20.0;
pub(super) const PLOT_HEIGHT: f64 = 190.0;
const X_LABELS_HEIGHT: f64 = 44.0;
const Y_LABELS_WIDTH: f64 = 58.0;
pub(super) const MARGIN: f64 = 12.0;
/// Lines that look different.
pub(super) const LOOKS: usize = 6;
/// The figure as one `svg` element.
pub(super) fn svg(figure: &Figure, place: Place) -> String {
    let (class, width, style) = match place {
        Place::Wide => ("plot wide", 860.0, String::new()),
        Place::Narrow => ("plot narrow", 380.0, String::new()),
        Place::File => ("plot", 860.0, format!("<style>\n{STYLE}</style>\n")),
    };
    let id = format!("{}-{width}", figure.id);
    let mut canvas =
        Canvas { body: String::new(), width, has_hover: place != Place::File, has_numbers: true, top: 0.0 };
    if place == Place::File {
        canvas.line(format_args!("<text class=\"title\" x=\"{MARGIN}\" y=\"16\">{}</text>", escaped(figure.title)));
        canvas.top = ROW + 8.0;
    }
    let x_range = x_range(figure);
    for (at, panel) in figure.panels.iter().enumerate() {
        canvas.has_numbers = at + 1 == figure.panels.len() || !matches!(panel, Panel::Lines { is_lane: true, .. });
        match panel {
            Panel::Lines { y, series, is_lane } => canvas.lines(&figure.x, x_range, y, series, *is_lane),
            Panel::Bars { name, bars } => canvas.bars(name, bars),
        }
    }
    let Canvas { body, top, .. } = canvas;
    let (title, words, height) = (escaped(figure.title), escaped(&figure.description), (top + 4.0).ceil());
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"{class}\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" role=\"img\" aria-labelledby=\"{id}-title {id}-words\">\n\
         <title id=\"{id}-title\">{title}</title>\n<desc id=\"{id}-words\">{words}</desc>\n{style}\
         <rect class=\"fill paper\" width=\"{width}\" height=\"{height}\"/>\n{body}</svg>\n"
    )
}

/// The elements so far.
pub(super) struct Canvas {
    body: String,
    pub(super) width: f64,
    /// Whether values are shown under the pointer.
    pub(super) has_hover: bool,
    /// Whether the x axis has its numbers: lanes above each other share those of the last.
    has_numbers: bool,
    /// Where the next row or panel begins.
    top: f64,
}

/// Where values are drawn.
pub(super) struct Plot {
    x: (f64, f64),
    y: (f64, f64),
    is_logarithmic: bool,
    pub(super) left: f64,
    pub(super) right: f64,
    pub(super) top: f64,
    pub(super) bottom: f64,
}

impl Plot {
    pub(super) fn at(&self, x: f64, y: f64) -> (f64, f64) {
        let part = |value: f64, (low, high): (f64, f64)| (value - low) / (high - low);
        // What is before the beginning of a logarithmic axis is drawn there.
        let x = match (self.is_logarithmic, self.x) {
            (false, range) => part(x, range),
            (true, (low, high)) => part(x.max(low).ln(), (low.ln(), high.ln())),
        };
        (self.left + x * (self.right - self.left), self.bottom - part(y, self.y) * (self.bottom - self.top))
    }
}

impl Canvas {
    pub(super) fn line(&mut self, element: std::fmt::Arguments<'_>) {
        let _ = writeln!(self.body, "{element}"); // Writing to a string does not fail.
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, text: &str) {
        let text = escaped(text);
        self.line(format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>"));
    }

    pub(super) fn path(&mut self, class: &str, steps: &str) {
        self.line(format_args!("<path class=\"{class}\" d=\"{steps}\"/>"));
    }

    fn rect(&mut self, paint: &str, (x, y): (f64, f64), (width, height): (f64, f64)) {
        self.line(format_args!(
            "<rect {paint} x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\"/>"
        ));
    }

    pub(super) fn mark(&mut self, shape: Shape, (x, y): (f64, f64)) {
        match shape {
            Shape::Crosses => self.path("line mark", &format!("M{:.1} {:.1}l8 8m0 -8l-8 8", x - 4.0, y - 4.0)),
            _ => self.path("fill mark", &format!("M{x:.1} {:.1}l4.3 7.5h-8.6z", y - 5.0)),
        }
    }

    /// What the panel below shows.
    pub(super) fn header(&mut self, text: &str) {
        self.text(MARGIN, self.top + ROW / 2.0, "start", text);
        self.top += ROW;
    }

    /// Each name with a sample before it.
    pub(super) fn legend<'a>(
        &mut self,
        names: impl Iterator<Item = &'a str>,
        sample: impl Fn(&mut Self, usize, f64, f64),
    ) {
        let (mut x, mut y) = (MARGIN, self.top + ROW / 2.0);
        for (at, name) in names.enumerate() {
            let needed = 34.0 + text_width(name) + 14.0;
            if x > MARGIN && x + needed > self.width {
                (x, y) = (MARGIN, y + ROW);
            }
            sample(self, at, x, y);
            self.text(x + 34.0, y, "start", name);
            x += needed;
        }
        self.top = y + ROW / 2.0;
    }

    /// The axes of a plot, with their numbers. Values on the y axis are written in units of `y_factor`.
    pub(super) fn axes(&mut self, axis: &Axis, x: (f64, f64), y: (f64, f64), y_factor: f64, height: f64) -> Plot {
        let (top, bottom, right) = (self.top + 8.0, self.top + height, self.width - 22.0);
        let plot = Plot { x, y, is_logarithmic: axis.is_logarithmic, left: Y_LABELS_WIDTH, right, top, bottom };
        let scale = axis.unit.scale(x.1);
        let powers = powers_of_ten(x);
        let has_powers = axis.is_logarithmic && powers.len() > 1;
        let at_x = if has_powers { powers } else { ticks(x, scale.factor, self.width / 75.0) };
        for value in at_x {
            let place = plot.at(value, y.0).0;
            self.path("line grid", &format!("M{place:.1} {top:.1}V{bottom:.1}"));
            let text = if axis.is_logarithmic { short(value) } else { number(value / scale.factor) };
            if !self.has_numbers {
                continue;
            }
            self.text(place, bottom + 14.0, "middle", &text);
            if let Some(begun) = axis.clock {
                let text = clock(begun + value);
                self.text(place.min(self.width - text_width(&text) / 2.0), bottom + 29.0, "middle", &text);
            }
        }
        for value in ticks(y, y_factor, 5.0) {
            let place = plot.at(x.1, value).1;
            self.path("line grid", &format!("M{Y_LABELS_WIDTH} {place:.1}H{right:.1}"));
            self.text(Y_LABELS_WIDTH - 6.0, place, "end", &number(value / y_factor));
        }
        self.path("line ink", &format!("M{Y_LABELS_WIDTH} {top:.1}V{bottom:.1}H{right:.1}"));
        let name = if axis.is_logarithmic { format!("{}, logarithmic", axis.name) } else { axis.label(scale) };
        if !self.has_numbers {
            self.top = bottom + MARGIN;
            return plot;
        }
        let clock_height = if axis.clock.is_some() { 15.0 } else { 0.0 };
        let name = if axis.clock.is_some() { format!("{name}, and the clock (UTC)") } else { name };
        self.text((plot.left + right) / 2.0, bottom + 33.0 + clock_height, "middle", &name);
        self.top = bottom + X_LABELS_HEIGHT + clock_height;
        plot
    }

    fn bars(&mut self, name: &str, bars: &[Bar]) {
        let longest = |text: fn(&Bar) -> &str| bars.iter().map(|bar| text_width(text(bar))).fold(0.0, f64::max);
        let left = MARGIN + longest(|bar| &bar.name) + 8.0;
        let room = (self.width - left - longest(|bar| &bar.text) - 8.0 - MARGIN).max(40.0);
        let most = bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
        self.header(name);
        for bar in bars {
            let y = self.top + ROW / 2.0;
            // What is there is seen.
            let len = if bar.value > 0.0 { (bar.value / most * room).max(1.0) } else { 0.0 };
            self.text(left - 8.0, y, "end", &bar.name);
            if len > 0.0 {
                self.rect("class=\"fill s0\"", (left, y - 6.0), (len, 12.0));
            }
            self.text(left + len + 8.0, y, "start", &bar.text);
            self.top += ROW;
        }
        self.top += MARGIN;
    }
}

/// What a clock shows, in UTC, at so many seconds since 1970.
fn clock(seconds: f64) -> String {
    #[allow(clippy::cast_possible_truncation)] // Saturates.
    let time = jiff::Timestamp::from_millisecond((seconds * 1e3) as i64);
    time.map_or_else(|_| String::new(), |time| time.strftime("%H:%M:%S").to_string())
}

/// Width of a text; glyphs are at most about this wide on average.
fn text_width(text: &str) -> f64 {
    text.chars().count() as f64 * 7.0
}

/// From 0, or of a logarithmic axis from the first point after it, to the last point.
fn x_range(figure: &Figure) -> (f64, f64) {
    let of_panel = |panel: &Panel| match panel {
        Panel::Lines { series, .. } => series.iter().flat_map(|one| &one.points).map(|point| point.0).collect(),
        Panel::Bars { .. } => Vec::new(),
    };
    let values: Vec<f64> = figure.panels.iter().flat_map(of_panel).collect();
    let largest = values.iter().copied().fold(0.0, f64::max);
    let largest = if largest > 0.0 { largest } else { 1.0 };
    let least = values.into_iter().filter(|&value| value > 0.0).fold(largest / 10.0, f64::min);
    (if figure.x.is_logarithmic { least } else { 0.0 }, largest)
}

/// About `count` values from `low` to `high` that are round in units of `factor`.
fn ticks((low, high): (f64, f64), factor: f64, count: f64) -> Vec<f64> {
    let least = (high - low) / factor / count;
    let power = 10_f64.powf(least.log10().floor());
    let step =
        [1.0, 2.0, 5.0, 10.0].into_iter().map(|times| times * power).find(|step| *step >= least).unwrap_or(least);
    let first = (low / factor / step).ceil();
    let values = (0..100).map(|number| (first + f64::from(number)) * step * factor);
    values.take_while(|value| *value <= high).collect()
}

fn powers_of_ten((low, high): (f64, f64)) -> Vec<f64> {
    (0..20).map(|power| 10_f64.powi(power)).filter(|value| (low..=high).contains(value)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::figure::{Series, Unit};
    use super::*;

    fn panel(points: Vec<(f64, f64)>, marks: Vec<(f64, f64)>) -> Panel {
        let series = vec![Series::new("pool <1>", Shape::Steps, points), Series::new("raise", Shape::Triangles, marks)];
        Panel::Lines { y: Axis::new("limit", Unit::Count), series, is_lane: false }
    }

    fn figure(x: &Axis, panel: Panel) -> Figure {
        Figure { id: "x", title: "A & B", description: "words < more".to_owned(), x: x.clone(), panels: vec![panel] }
    }

    #[test]
    fn a_figure_has_its_words_axes_names_and_marks() {
        let x = Axis::new("gets", Unit::Count);
        let panel = panel(vec![(0.0, 100.0), (50_000.0, 110.0)], vec![(10_000.0, 110.0), (50_000.0, 121.0)]);
        let figure = figure(&x, panel);
        for place in [Place::Wide, Place::Narrow, Place::File] {
            let svg = svg(&figure, place);
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
            assert_eq!(svg.matches("class=\"fill mark\"").count(), 3);
            assert_eq!(svg.contains("<style>"), place == Place::File);
        }
    }

    #[test]
    fn a_logarithmic_axis_begins_at_the_first_point_and_has_all_marks() {
        let mut x = Axis::new("gets", Unit::Count);
        x.is_logarithmic = true;
        let marks = vec![(0.0, 110.0), (2_000.0, 121.0), (8e8, 133.0)];
        let svg = svg(&figure(&x, panel(vec![(0.0, 100.0), (8e8, 133.0)], marks)), Place::Wide);
        assert_eq!(svg.matches("class=\"fill mark\"").count(), 4);
        for text in [">gets, logarithmic<", ">10k<", ">100M<"] {
            assert!(svg.contains(text), "no {text} in {svg}");
        }
        // The first mark stands where the axis begins, and so does the line.
        assert_eq!(svg.matches("\"M58.0 ").count(), 3, "{svg}");
    }

    #[test]
    fn a_figure_without_points_is_drawn_empty() {
        let x = Axis::new("time", Unit::Seconds);
        let empty = svg(&figure(&x, panel(Vec::new(), Vec::new())), Place::Wide);
        assert!(empty.contains("time (ms)") && !empty.contains("NaN"), "{empty}");
        let bars = Panel::Bars { name: "none".to_owned(), bars: Vec::new() };
        assert!(svg(&figure(&x, bars), Place::Wide).contains("none"));
    }

    #[test]
    fn a_value_holds_until_the_next_point_and_to_the_end() {
        let x = Axis::new("gets", Unit::Count);
        let lines = |points| svg(&figure(&x, panel(points, vec![(4.0, 1.0)])), Place::Wide);
        let of_two = lines(vec![(0.0, 1.0), (2.0, 2.0)]);
        assert_eq!(
            of_two.matches("M58.0 ").count(),
            1 + 1,
            "the first point, and no other but the first tick: {of_two}"
        );
        let steps = of_two.lines().find(|line| line.contains("H448.0V")).unwrap();
        assert!(steps.contains("line s0") && steps.ends_with("H838.0\"/>"), "{steps}");
        assert!(lines(vec![(2.0, 1.0)]).contains("<circle class=\"fill s0\" cx=\"448.0\""));
    }

    #[test]
    fn ticks_are_round_in_the_unit_of_the_axis() {
        assert_eq!(ticks((0.0, 100.0), 1.0, 5.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(ticks((99.0, 100.0), 1.0, 2.0), [99.0, 99.5, 100.0]);
        assert_eq!(ticks((0.0, 2e-3), 1e-3, 2.0), [0.0, 1e-3, 2e-3]);
        assert_eq!(ticks((0.0, 3.0 * 1024.0), 1024.0, 3.0), [0.0, 1024.0, 2048.0, 3072.0]);
        assert_eq!(powers_of_ten((2_000.0, 3e5)), [1e4, 1e5]);
    }
}
