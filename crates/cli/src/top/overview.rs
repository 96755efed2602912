//! All pools in one table, the pool that loses most first.

use pinpool::unstable::shared_limit::{self, SharedLimitMember, SharedLimitReport};
use pinpool_cli::table::{columns, columns_left};
use pinpool_cli::terminal::one_line;
use pinpool_os::format::{Size, Time};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::Stylize;
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use crate::diagnosis::DiagnosisText;
use crate::series::Series;

const HEAD: [&str; 9] = ["pid", "pool", "lost", "cause", "held", "limit", "in use", "oldest holder", "why"];
/// Shown for a value that a process does not send because it runs another version.
const UNKNOWN: &str = "?";
/// Maximum length of a name in a cell.
const CELL: usize = 24;

/// Returns a table of the pools of these processes.
pub(super) fn of(processes: &[Series]) -> String {
    let mut rows: Vec<_> = processes.iter().flat_map(|of| of.diagnoses.iter().map(move |one| (of, one))).collect();
    if rows.is_empty() {
        return "no process serves a pool: start one with PINPOOL_SOCKET=1\n".to_owned();
    }
    rows.sort_by(|(_, one), (_, other)| one.worst_first(other));
    let cells = rows.into_iter().filter_map(|(series, of)| row(series, of));
    columns_left(&std::iter::once(HEAD.map(str::to_owned).to_vec()).chain(cells).collect::<Vec<_>>())
}

/// Returns the pools of these processes, and the shared limits, each after an empty line.
pub(super) fn of_host(processes: &[Series], limits: &[SharedLimitReport]) -> String {
    of(processes) + &limits.iter().map(|limit| format!("\n{}", text(limit))).collect::<String>()
}

/// Returns the shared limits of this user that have a member, and errors for limits that cannot be read.
pub(super) fn shared_limits() -> (Vec<SharedLimitReport>, Vec<String>) {
    let (mut limits, mut unreadable) = (Vec::new(), Vec::new());
    for name in shared_limit::names() {
        match shared_limit::report(&name) {
            Ok(report) => limits.extend(report.filter(|report| !report.members.is_empty())),
            Err(error) => unreadable.push(error.to_string()),
        }
    }
    (limits, unreadable)
}

fn text(report: &SharedLimitReport) -> String {
    let limit = in_words(report.max_bytes);
    let title = ["pool", "process", "held", "idle", "wanted"].map(str::to_owned).to_vec();
    let row = |member: &SharedLimitMember| {
        let pool = if member.pool.is_empty() { "-" } else { &member.pool };
        let away = if member.is_in_other_namespace { " (another namespace)" } else { "" };
        let bytes = [member.held_bytes, member.idle_bytes, member.wanted_bytes].map(|bytes| Size(bytes).to_string());
        [vec![pool.to_owned(), format!("{}{away}", member.pid)], bytes.to_vec()].concat()
    };
    let rows: Vec<_> = std::iter::once(title).chain(report.members.iter().map(row)).collect();
    format!("shared limit {}: {limit}, held {}\n", report.name, Size(report.held_bytes)) + &columns(&rows)
}

fn row(series: &Series, of: &DiagnosisText) -> Option<Vec<String>> {
    let (_, now) = series.latest(of)?;
    let oldest = now.holders.iter().filter_map(|holder| Some((holder.oldest_age?, &holder.tag))).max();
    let line = of.lines.first().map_or("", String::as_str);
    let found = line.strip_prefix(&of.cause).and_then(|found| found.strip_prefix(": ")).unwrap_or(line);
    Some(vec![
        series.process.unwrap_or(0).to_string(),
        cut(&of.pool),
        of.lost_share.map_or_else(|| UNKNOWN.to_owned(), |share| format!("{:.1} %", share * 100.0)),
        of.cause.clone(),
        Size(now.held_bytes).to_string(),
        in_words(now.max_bytes),
        Size(now.used_bytes).to_string(),
        oldest.map_or_else(|| "-".to_owned(), |(age, tag)| format!("{} {}", cut(tag), Time(age))),
        found.to_owned(),
    ])
}

fn in_words(max_bytes: Option<u64>) -> String {
    max_bytes.map_or_else(|| "none".to_owned(), |bytes| Size(bytes).to_string())
}

fn cut(name: &str) -> String {
    let name = one_line(name);
    if name.chars().count() <= CELL { name } else { name.chars().take(CELL - 1).chain(['~']).collect() }
}

pub(super) fn draw(frame: &mut Frame<'_>, text: &str, message: &str, keys: &str) {
    let [head, rest, foot] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)]).areas(frame.area());
    frame.render_widget(Line::from("pinpool top: all pools, alarms first, then by time lost").bold(), head);
    frame.render_widget(Paragraph::new(text), rest);
    frame.render_widget(Line::raw(if message.is_empty() { keys } else { message }), foot);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_come_first_then_the_pools_that_lose_most() {
        let pool = |name: &str, is_alarm: bool, lost: f64| {
            let oldest_age = serde_json::json!({ "secs": 9, "nanos": 0 });
            let holders = serde_json::json!([{ "tag": "a\nb", "oldest_age": oldest_age }, { "tag": "(untagged)", "oldest_age": null }]);
            serde_json::json!({
                "name": name,
                "why": { "cause": "x", "is_alarm": is_alarm, "lost_seconds": lost, "window_seconds": 10.0, "lines": [format!("x: of {name}")] },
                "snapshot": { "held_bytes": 3 << 20, "used_bytes": 1 << 20, "holders": holders },
            })
        };
        let one = serde_json::json!({ "process": 1, "pools": [pool("calm", false, 0.1), pool("slow", false, 5.0)] });
        let other = serde_json::json!({ "process": 22, "pools": [pool("leaky", true, 0.0)] });
        let text = of(&[one, other].map(|object| Series::once(&object)));
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "pid  pool   lost    cause  held    limit  in use  oldest holder  why");
        assert_eq!(lines[1], "22   leaky  0.0 %   x      3.0MiB  none   1.0MiB  a\\nb 9.0s      of leaky");
        assert!(lines[2].starts_with("1    slow   50.0 %") && lines[3].starts_with("1    calm   1.0 %"), "{text}");
        assert!(of(&[]).contains("start one with PINPOOL_SOCKET=1"));
    }
}
