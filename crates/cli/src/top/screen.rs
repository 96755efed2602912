//! One pool on a screen.

use std::time::Duration;

use pinpool_observe::diagnosis::Snapshot;
use pinpool_observe::diagnosis::words::counted;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Paragraph, Sparkline, Wrap};

use crate::series::{PoolSeries, Series};
use pinpool_cli::table::grouped;
use pinpool_cli::terminal::one_line;
use pinpool_os::format::{Size, Time};

/// Width of the names before the bars.
const NAME: usize = 12;
/// Width of the byte counts after the names.
const BYTES: usize = 12;

/// Minimum height without diagnosis and holders.
const HEIGHT: u16 = 20;
/// Prefix of the recommendation.
const TO_DO: &str = "  to do: ";

/// Draws the pool at index `at` of a process. The index may be too large, because pools end: it wraps around.
pub(super) fn draw(frame: &mut Frame<'_>, series: &Series, at: usize) {
    let (no_pool, nothing) = (PoolSeries::default(), Snapshot::default());
    let at = at % series.pools.len().max(1);
    let pool = series.pools.get(at).unwrap_or(&no_pool);
    let (elapsed, now) = pool.points.last().map_or((0.0, &nothing), |(x, now)| (*x, now));
    let (place, keys) = match series.pools.len() {
        ..=1 => (String::new(), "q or Ctrl-C ends"),
        pools => (format!(", pool {} of {pools}", at + 1), "n: next pool; a: all pools; q or Ctrl-C ends"),
    };
    let diagnosis = series.diagnoses.iter().find(|one| one.pool == pool.name);
    let lines = diagnosis.map_or(&[][..], |one| &one.lines);
    let holders = holders(now);
    let area = frame.area();
    let room = usize::from(area.height.saturating_sub(HEIGHT)).saturating_sub(holders.len()).max(1);
    let color = if diagnosis.is_some_and(|one| one.is_alarm) { Color::Red } else { Color::Green };
    let paragraph = |is_shown: &dyn Fn(usize, &str) -> bool| {
        let shown = lines.iter().enumerate().filter(|(at, line)| is_shown(*at, line));
        let line = |(at, line): (usize, &String)| match at {
            // Only the cause is colored.
            0 => Line::from(one_line(line)).bold().fg(color),
            _ => Line::from(one_line(line)),
        };
        Paragraph::new(shown.map(line).collect::<Vec<_>>()).wrap(Wrap { trim: false })
    };
    let rows = |of: &Paragraph<'_>| of.line_count(area.width);
    let (cause, mut others) = (paragraph(&|at, _| at == 0), paragraph(&|at, _| at > 0));
    if rows(&cause) + rows(&others) > room {
        others = paragraph(&|at, line| at > 0 && line.starts_with(TO_DO));
    }
    // If there are two rows, one is for the recommendation.
    let of_cause = rows(&cause).min(room.saturating_sub(rows(&others)).max(room - room / 2));
    let of_others = rows(&others).min(room - of_cause);
    // The curves take the remaining rows.
    let length = |lines: usize| Constraint::Length(u16::try_from(lines).unwrap_or(u16::MAX));
    let [head, why, more, bytes, curves, rates, rest, foot] = Layout::vertical([
        Constraint::Length(1),
        length(of_cause),
        length(of_others),
        Constraint::Length(8),
        Constraint::Min(3),
        Constraint::Length(7),
        length(holders.len()),
        Constraint::Length(1),
    ])
    .areas(area);
    let elapsed = Time(Duration::from_secs_f64(elapsed));
    let process = series.process.unwrap_or(0);
    let title = format!(" {}: {}  process {process}{place}  observed for {elapsed}", pool.name, one_line(&pool.kind));
    frame.render_widget(Line::from(vec!["pinpool top".bold(), title.into()]), head);
    frame.render_widget(cause, why);
    frame.render_widget(others, more);
    draw_bytes(frame, bytes, now);
    draw_curves(frame, curves, pool, now);
    draw_rates(frame, rates, pool, now);
    frame.render_widget(Paragraph::new(holders.join("\n")), rest);
    frame.render_widget(Paragraph::new(keys), foot);
}

fn draw_bytes(frame: &mut Frame<'_>, area: Rect, now: &Snapshot) {
    let pinned = Size(now.held_bytes);
    let title = match now.max_bytes {
        Some(max) if max > 0 => {
            let share = now.held_bytes as f64 / max as f64 * 100.0;
            format!(" Bytes: {pinned} held of the limit {}, {share:.1} % ", Size(max))
        }
        _ => format!(" Bytes: {pinned} held, no limit "),
    };
    let block = Block::bordered().title(title);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    // Each bar has its own character, so that bars differ without colors.
    let rows = [
        ("held", now.held_bytes, '█', Color::Blue),
        ("in use", now.used_bytes.saturating_sub(now.in_flight_bytes), '▓', Color::Green),
        ("in flight", now.in_flight_bytes, '▒', Color::Yellow),
        ("idle", now.idle_bytes, '░', Color::Cyan),
        ("free", now.free_bytes, '·', Color::Gray),
        ("pageable", now.pageable_bytes, '!', Color::Magenta),
    ];
    // Bars are relative to the held bytes, because they would be too short relative to a high limit.
    let full = now.held_bytes.max(now.used_bytes).max(1);
    let room = usize::from(inner.width).saturating_sub(NAME + BYTES + 2);
    let lines = rows.map(|(name, bytes, letter, color)| {
        let text = format!("{name:<NAME$}{:>BYTES$} ", Size(bytes));
        Line::from(vec![text.into(), bar(bytes, full, room, letter).fg(color)])
    });
    frame.render_widget(Paragraph::new(lines.to_vec()), inner);
}

fn bar(bytes: u64, full: u64, room: usize, letter: char) -> String {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // At most `room`.
    let filled = (bytes as f64 / full as f64 * room as f64).round() as usize;
    // Nonzero bytes are always visible.
    let filled = if bytes > 0 { filled.max(1) } else { 0 };
    std::iter::repeat_n(letter, filled.min(room)).collect()
}

fn draw_curves(frame: &mut Frame<'_>, area: Rect, pool: &PoolSeries, now: &Snapshot) {
    let [left, right] = Layout::horizontal([Constraint::Percentage(50); 2]).areas(area);
    let lost = Time(Duration::from_secs_f64(pool.rate(|now| now.lost(0).total_ns()) / 1e9));
    let all = Time(Duration::from_nanos(now.lost(0).total_ns()));
    let title = match now.waiting {
        0 => format!("Lost: {lost} per s, {all} total"),
        waiting => format!("{} waiting, {all} lost", counted(waiting, "thread")),
    };
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 0; saturates.
    let values = pool.rates(|now| now.lost(0).total_ns()).map(|ns| ns.round() as u64).collect();
    draw_curve(frame, left, &title, values, |most| Time(Duration::from_nanos(most)).to_string());
    let held = pool.points.iter().skip(1).map(|(_, of)| of.held_bytes).collect();
    draw_curve(frame, right, &format!("Held: {}", Size(now.held_bytes)), held, |most| Size(most).to_string());
}

fn draw_curve(frame: &mut Frame<'_>, area: Rect, title: &str, mut values: Vec<u64>, text: impl Fn(u64) -> String) {
    values.drain(..values.len().saturating_sub(usize::from(Block::bordered().inner(area).width)));
    let most = values.iter().max().copied().unwrap_or(0).max(1);
    let block = Block::bordered().title(format!(" {title} ")).title_bottom(format!(" 0 to {} ", text(most)));
    frame.render_widget(Sparkline::default().block(block).data(values).max(most), area);
}

fn draw_rates(frame: &mut Frame<'_>, area: Rect, pool: &PoolSeries, now: &Snapshot) {
    let block = Block::bordered().title(" Rates and counts ");
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let percent = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.2} %"));
    let row = |name: &str, counter: fn(&Snapshot) -> u64| {
        format!("{name:<10}{:>9} /s {:>13} total", rate(pool.rate(counter)), grouped(counter(now)))
    };
    let left = [
        row("requests", |now| now.requests),
        row("misses", |now| now.misses),
        row("pins", |now| now.pin_calls),
        row("evictions", |now| now.evicted),
        row("delayed", |now| now.delayed_requests),
    ];
    let served = |now: &Snapshot| now.requests.saturating_sub(now.failed_requests);
    let hit_rate = |hits: f64, served: f64| percent((served > 0.0).then(|| (hits / served * 100.0).min(100.0)));
    let recent = hit_rate(pool.rate(hits), pool.rate(served));
    let all = hit_rate(hits(now) as f64, served(now) as f64);
    let limit = now.pool_size_limit.map_or_else(|| "none".to_owned(), |limit| format!("{} buffers", grouped(limit)));
    let right = [
        format!("hit rate   {recent}, all {all}"),
        format!("max idle   {limit}"),
        format!("failed     {}", grouped(now.failed_requests)),
    ];
    let [left_area, right_area] = Layout::horizontal([Constraint::Length(45), Constraint::Min(0)]).areas(inner);
    frame.render_widget(Paragraph::new(left.join("\n")), left_area);
    frame.render_widget(Paragraph::new(right.join("\n")), right_area);
}

fn hits(now: &Snapshot) -> u64 {
    now.requests.saturating_sub(now.misses + now.failed_requests)
}

/// Returns the oldest copy and the holders.
fn holders(now: &Snapshot) -> Vec<String> {
    let oldest = now.oldest_copy.map(|age| {
        let stream = now.oldest_copy_stream.map_or_else(String::new, |stream| format!(" on stream_id={stream}"));
        format!("oldest copy: {}{stream}", Time(age))
    });
    let holders = now.holders.iter().map(|holder| {
        let age = holder.oldest_age.map_or_else(String::new, |age| format!(", the oldest {}", Time(age)));
        let (bytes, buffers) = (Size(holder.bytes), counted(holder.buffers, "buffer"));
        format!("{bytes:>BYTES$} {} ({buffers}{age})", one_line(&holder.tag))
    });
    oldest.into_iter().chain(holders).collect()
}

fn rate(value: f64) -> String {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Saturates.
    if value >= 100.0 { grouped(value.round() as u64) } else { format!("{value:.1}") }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use pinpool_observe::diagnosis::TagUse;

    use super::*;
    use crate::diagnosis::DiagnosisText;

    fn series() -> Series {
        let lines =
            ["leak: 9 buffers of loader/images are out", "  3.0 s lost", "  to do: put them back"].map(str::to_owned);
        let (name, cause) = ("train".to_owned(), "leak".to_owned());
        let diagnosis = DiagnosisText {
            pool: name.clone(),
            cause,
            is_alarm: true,
            lines: lines.to_vec(),
            ..DiagnosisText::default()
        };
        let before = Snapshot { requests: 100, misses: 50, ..Snapshot::default() };
        let oldest_age = Some(Duration::from_secs(125));
        let tag = "loader\nimages".to_owned();
        let now = Snapshot {
            held_bytes: 1 << 30,
            used_bytes: 700 << 20,
            in_flight_bytes: 100 << 20,
            idle_bytes: 200 << 20,
            free_bytes: 124 << 20,
            max_bytes: Some(2 << 30),
            requests: 4200,
            misses: 90,
            failed_requests: 100,
            pin_calls: 12,
            pinning_ns: 250_000_000,
            pool_size_limit: Some(110),
            oldest_copy: Some(Duration::from_millis(1250)),
            oldest_copy_stream: Some(48879),
            holders: vec![TagUse { tag, buffers: 9, bytes: 600 << 20, oldest_age, ..TagUse::default() }],
            ..before.clone()
        };
        let points = vec![(0.0, before), (1.0, now)];
        let pool =
            PoolSeries { name, kind: "adaptive on sim".to_owned(), points, is_running: true, ..PoolSeries::default() };
        Series { process: Some(0), pools: vec![pool], diagnoses: vec![diagnosis], ..Series::default() }
    }

    /// Returns the rows, and all red text.
    fn drawn(width: u16, height: u16, series: &Series, at: usize) -> (Vec<String>, String) {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, series, at)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        let red = buffer.content.iter().filter(|cell| cell.fg == Color::Red).map(|cell| cell.symbol()).collect();
        ((0..height).map(row).collect(), red)
    }

    #[test]
    fn a_screen_shows_all_values_uses_all_rows_and_colors_the_cause_only() {
        for (width, height) in [(80, 24), (200, 50)] {
            let (lines, red) = drawn(width, height, &series(), 0);
            let text = lines.join("\n");
            for words in [
                "pinpool top train: adaptive on sim  process 0  observed for 1.0s",
                "\n  to do: put them back",
                "Bytes: 1.0GiB held of the limit 2.0GiB, 50.0 %",
                "    600.0MiB loader\\nimages (9 buffers, the oldest 2.1min)",
                "in flight       100.0MiB ▒",
                "pageable              0B",
                "hit rate   99.00 %, all 97.80 %",
                "Lost: 250.0ms per s, 250.0ms total",
                "0 to 250.0ms",
                "Held: 1.0GiB",
                "0 to 1.0GiB",
                "requests      4,100 /s         4,200 total",
                "max idle   110 buffers",
                "pins           12.0 /s",
                "oldest copy: 1.2s on stream_id=48879",
                "q or Ctrl-C ends",
            ] {
                assert!(text.contains(words), "no \"{words}\" in {width}x{height}:\n{text}");
            }
            assert_eq!(red, "leak: 9 buffers of loader/images are out", "{text}");
            let held = lines.iter().find(|line| line.starts_with("│held")).unwrap();
            assert_eq!(held.matches('█').count(), usize::from(width) - 2 - NAME - BYTES - 2, "all that is held");
            assert!(lines[usize::from(height) - 2].contains("images"), "all rows are used:\n{text}");
            assert!(lines.iter().all(|line| !line.is_empty()), "all rows are used:\n{text}");
        }
        for (width, height) in [(1, 1), (10, 3), (30, 12)] {
            drawn(width, height, &series(), 0);
        }
    }

    #[test]
    fn after_the_last_pool_has_ended_another_is_shown_under_its_own_number() {
        let mut series = series();
        series.pools.push(PoolSeries { name: "eval".to_owned(), ..PoolSeries::default() });
        for (at, words) in [(1, "top eval: "), (1, ", pool 2 of 2 "), (2, "top train: "), (2, ", pool 1 of 2 ")] {
            let title = &drawn(120, 24, &series, at).0[0];
            assert!(title.contains(words), "{at}: {title}");
        }
    }
}
