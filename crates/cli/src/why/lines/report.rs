//! Prints the messages of a log, as a table and as JSON, one object per line.

use std::io::{self, Write};
use std::path::Path;

use serde_json::json;

use super::curve::diagnoses;
use super::history::{History, MessageContext, PoolHistory};
use super::message::{Counters, LogContent, Message, Numbers};
use super::trend::trend;
use crate::diagnosis::DiagnosisText;
use pinpool_cli::table::{columns, grouped};
use pinpool_observe::diagnosis::words::counted;

const INFORMATION: &str = "These lines are information, not errors.";

/// Writes one object for each message, then the summary. Unknown values are null.
///
/// # Errors
///
/// If writing to `out` fails.
pub(super) fn json(out: &mut dyn Write, path: &Path, found: &LogContent, history: &History) -> io::Result<()> {
    let log = path.to_string_lossy();
    for (message, entry) in found.messages.iter().zip(&history.entries) {
        let kind = if matches!(message.numbers, Numbers::Raise { .. }) { "raise" } else { "after" };
        let mut row = json!({
            "log": log, "line": message.line, "kind": kind, "pool": entry.pool,
            "time": message.time, "limit": entry.limit, "allocated": entry.allocated, "silent_raises": entry.silent_raises,
        });
        let numbers = json!(message.numbers);
        for (name, number) in numbers.as_object().into_iter().flatten() {
            row[name] = number.clone();
        }
        writeln!(out, "{row}")?;
    }
    let (raise, raises_silent) = history.raises();
    let after = found.messages.len() as u64 - raise;
    // The pool of the last message.
    let last = history.entries.last().and_then(|entry| history.pools.get(entry.pool - 1));
    let pool = |pool: &PoolHistory| {
        let (name, advice) = trend(pool);
        json!({
            "pool": pool.number, "origin": pool.origin, "verdict": name, "limit": pool.limit,
            "raises_printed": pool.printed_raises, "raises_silent": pool.silent_raises, "advice": advice,
        })
    };
    let summary = json!({
        "log": log, "kind": "summary", "lines": found.lines, "after": after, "raise": raise, "cut": found.cut,
        "stopped": found.stopped, "raises_printed": raise,
        "raises_silent": raises_silent, "verdict": last.map_or("unknown", |pool| trend(pool).0),
        "limit": last.and_then(|pool| pool.limit), "pools": history.pools.iter().map(pool).collect::<Vec<_>>(),
    });
    writeln!(out, "{summary}")
}

/// Returns a table with a row for each message, and the conclusion.
pub(super) fn table(path: &Path, found: &LogContent, history: &History) -> String {
    let head =
        ["line", "pool", "requests", "allocated", "returns", "evicted", "missed", "limit", "raised to", "not printed"];
    let messages = found.messages.iter().zip(&history.entries).map(|(message, entry)| table_row(message, entry));
    let rows: Vec<_> = std::iter::once(head.map(str::to_owned).to_vec()).chain(messages).collect();
    format!("{}\n{}{}", path.display(), columns(&rows), conclusion(found, history))
}

fn table_row(message: &Message, entry: &MessageContext) -> Vec<String> {
    let known = |count: Option<u64>| count.map_or("?".to_owned(), grouped);
    let silent = if entry.silent_raises > 0 { counted(entry.silent_raises, "raise") } else { String::new() };
    let mut row = vec![message.line.to_string(), entry.pool.to_string()];
    let (counters, raised_to) = match message.numbers {
        Numbers::After(Counters { get, put, evicted, unsatisfied_rate, .. }) => {
            let missed = format!("{:.3} %", unsatisfied_rate * 100.0);
            ([known(get), known(entry.allocated), grouped(put), grouped(evicted), missed], String::new())
        }
        Numbers::Raise { to, .. } => (Default::default(), grouped(to)),
    };
    row.extend(counters);
    row.extend([known(entry.limit), raised_to, silent]);
    row
}

fn conclusion(found: &LogContent, history: &History) -> String {
    let (printed, silent) = history.raises();
    let mut text = format!(
        "\n{INFORMATION}\n{} in {}; {} printed, {silent} not printed\n",
        counted(found.messages.len() as u64, "message"),
        counted(found.lines, "line"),
        counted(printed, "raise"),
    );
    if found.cut > 0 {
        text += &format!("truncated or damaged, and not used: {}\n", counted(found.cut, "message"));
    }
    for DiagnosisText { pool, lines, .. } in diagnoses(found, history) {
        text += &format!("{pool}: {}\n", lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" "));
    }
    text
}
