//! All pools in one table, the one that loses most first.

use pinpool_cli::table::{columns_left, format_about};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;
use serde_json::Value;

use crate::served::{name_of, pools, printable};

const HEAD: [&str; 8] = ["pid", "pool", "lost", "held", "ceiling", "in use", "oldest owner", "cause"];
/// Longest name in a cell.
const CELL: usize = 24;

/// The pools of these processes.
pub(super) fn of(objects: &[Value]) -> String {
    let mut rows: Vec<_> =
        objects.iter().flat_map(|object| pools(object).iter().map(move |pool| (object, pool))).collect();
    if rows.is_empty() {
        return "no process serves a pool: start one with PINPOOL_SOCKET=1\n".to_owned();
    }
    rows.sort_by(|(_, one), (_, other)| {
        let is_alarm = |pool: &Value| pool["why"]["is_alarm"].as_bool().unwrap_or(false);
        let order = is_alarm(other).cmp(&is_alarm(one));
        order.then(lost_share(other).total_cmp(&lost_share(one))).then_with(|| held(other).cmp(&held(one)))
    });
    let cells = rows.iter().map(|(object, pool)| row(object, pool));
    columns_left(&std::iter::once(HEAD.map(str::to_owned).to_vec()).chain(cells).collect::<Vec<_>>())
}

/// The same and the host ledgers.
pub(super) fn of_host(objects: &[Value]) -> String {
    of(objects) + &crate::ledger::all_in_words()
}

/// Seconds lost of each second of the last window, of all threads together.
fn lost_share(pool: &Value) -> f64 {
    let seconds = |name: &str| pool["why"][name].as_f64().unwrap_or(0.0);
    if seconds("of_seconds") > 0.0 { seconds("lost_seconds") / seconds("of_seconds") } else { 0.0 }
}

fn held(pool: &Value) -> u64 {
    pool["pinned_bytes"].as_u64().unwrap_or(0)
}

fn row(object: &Value, pool: &Value) -> Vec<String> {
    let bytes = |name: &str| pool[name].as_u64().map_or_else(|| "none".to_owned(), format_about);
    let oldest = pool["owners"].as_array().into_iter().flatten();
    let oldest = oldest.filter_map(|owner| Some((owner["oldest_seconds"].as_f64()?, owner["tag"].as_str()?)));
    let oldest = oldest.max_by(|one, other| one.0.total_cmp(&other.0));
    let cause = pool["why"]["lines"][0].as_str().or(pool["why"]["cause"].as_str()).unwrap_or("unknown");
    vec![
        object["process"].to_string(),
        cut(&name_of(pool)),
        format!("{:.1} %", lost_share(pool) * 100.0),
        bytes("pinned_bytes"),
        bytes("max_bytes"),
        bytes("in_use_bytes"),
        oldest.map_or_else(|| "-".to_owned(), |(age, tag)| format!("{age:.0} s {}", cut(tag))),
        printable(cause),
    ]
}

fn cut(name: &str) -> String {
    let name = printable(name);
    if name.chars().count() <= CELL { name } else { name.chars().take(CELL - 1).chain(['~']).collect() }
}

pub(super) fn draw(frame: &mut Frame<'_>, text: &str, message: &str, keys: &str) {
    let [head, rest, foot] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)]).areas(frame.area());
    frame.render_widget(
        Line::styled(
            "pinpool top: all pools, the one that loses most first",
            Style::new().add_modifier(Modifier::BOLD),
        ),
        head,
    );
    frame.render_widget(Paragraph::new(text), rest);
    frame.render_widget(Line::raw(if message.is_empty() { keys } else { message }), foot);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_come_first_then_the_pools_that_lose_most() {
        let pool = |name: &str, is_alarm: bool, lost: f64| {
            serde_json::json!({
                "name": name, "pinned_bytes": 3 << 20, "in_use_bytes": 1 << 20, "max_bytes": null,
                "why": { "cause": "x", "is_alarm": is_alarm, "lost_seconds": lost, "of_seconds": 10.0, "lines": [format!("x: of {name}")] },
                "owners": [{ "tag": "a\nb", "oldest_seconds": 9.6 }, { "tag": "(untagged)", "oldest_seconds": null }],
            })
        };
        let one = serde_json::json!({ "process": 1, "pools": [pool("calm", false, 0.1), pool("slow", false, 5.0)] });
        let other = serde_json::json!({ "process": 22, "pools": [pool("leaky", true, 0.0)] });
        let text = of(&[one, other]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "pid  pool   lost    held   ceiling  in use  oldest owner  cause");
        assert_eq!(lines[1], "22   leaky  0.0 %   3 MiB  none     1 MiB   10 s a?b      x: of leaky");
        assert!(lines[2].starts_with("1    slow   50.0 %") && lines[3].starts_with("1    calm   1.0 %"), "{text}");
        assert!(of(&[]).contains("start one with PINPOOL_SOCKET=1"));
    }
}
