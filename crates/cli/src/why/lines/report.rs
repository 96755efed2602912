//! What was found in a log, as a table for people and as JSON, one object a line.

use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use super::history::{Entry, History, PoolHistory};
use super::message::{Figures, Found, Message};
use super::verdict::Verdict;
use pinpool_cli::table::{columns, grouped};
use pinpool_observe::judge::words::counted;

/// Without `--all`, a longer table has its middle left out.
const ROWS: usize = 40;

/// What those who find the lines look for.
const INFORMATION: &str = "These lines are information, not errors.";

/// One message.
#[derive(Serialize)]
struct Row<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<&'a str>,
    line: u64,
    kind: &'static str,
    pool: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<&'a str>,
    #[serde(flatten)]
    figures: RowFigures,
    limit: Option<u64>,
    allocated: Option<u64>,
    silent_raises: u64,
}

#[derive(Serialize)]
#[serde(untagged)]
enum RowFigures {
    After { get: Option<u64>, put: u64, evicted: u64, eviction_rate: f64, unsatisfied_rate: f64 },
    Raise { from: u64, to: u64 },
}

#[derive(Serialize)]
struct Summary<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<&'a str>,
    kind: &'static str,
    lines: u64,
    after: usize,
    raise: usize,
    /// Messages that begin and do not end, or whose figures are damaged.
    cut: u64,
    tensorflow: Option<&'static str>,
    /// Why the log was not read to its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    stopped: Option<&'a str>,
    raises_printed: u64,
    raises_silent: u64,
    verdict: &'static str,
    limit: Option<u64>,
    pools: Vec<PoolRow>,
}

#[derive(Serialize)]
struct PoolRow {
    pool: usize,
    /// What stands before the lines of its process.
    #[serde(skip_serializing_if = "Option::is_none")]
    origin: Option<String>,
    verdict: &'static str,
    limit: Option<u64>,
    raises_printed: u64,
    raises_silent: u64,
    advice: Vec<String>,
}

/// One object for each message, then the summary.
///
/// # Errors
///
/// The errors of `out`.
pub(super) fn json(
    out: &mut impl Write,
    path: &Path,
    is_one_of_many: bool,
    found: &Found,
    history: &History,
) -> io::Result<()> {
    let name = path.to_string_lossy();
    let log = is_one_of_many.then_some(&*name);
    for (message, entry) in found.messages.iter().zip(&history.entries) {
        writeln!(out, "{}", serde_json::to_string(&row(log, message, entry))?)?;
    }
    writeln!(out, "{}", serde_json::to_string(&summary(log, found, history))?)
}

fn row<'a>(log: Option<&'a str>, message: &'a Message, entry: &Entry) -> Row<'a> {
    let (kind, figures) = match message.figures {
        Figures::After(counters) => {
            let get = counters.get;
            let (put, evicted) = (counters.put, counters.evicted);
            let (eviction_rate, unsatisfied_rate) = (counters.eviction_rate, counters.unsatisfied_rate);
            ("after", RowFigures::After { get, put, evicted, eviction_rate, unsatisfied_rate })
        }
        Figures::Raise { from, to } => ("raise", RowFigures::Raise { from, to }),
    };
    Row {
        log,
        line: message.line,
        kind,
        pool: entry.pool + 1,
        time: message.time.as_deref(),
        figures,
        limit: entry.limit,
        allocated: entry.allocated,
        silent_raises: entry.silent_raises,
    }
}

fn summary<'a>(log: Option<&'a str>, found: &'a Found, history: &History) -> Summary<'a> {
    let after = found.messages.iter().filter(|message| matches!(message.figures, Figures::After(_))).count();
    let (raises_printed, raises_silent) = history.raises();
    let last = last_pool(history);
    Summary {
        log,
        kind: "summary",
        lines: found.lines,
        after,
        raise: found.messages.len() - after,
        cut: found.cut,
        tensorflow: found.tensorflow(),
        stopped: found.stopped.as_deref(),
        raises_printed,
        raises_silent,
        verdict: last.map_or("unknown", |pool| Verdict::of(pool).name()),
        limit: last.and_then(|pool| pool.limit),
        pools: history.pools.iter().enumerate().map(|(at, pool)| pool_row(at, pool)).collect(),
    }
}

fn pool_row(at: usize, pool: &PoolHistory) -> PoolRow {
    let verdict = Verdict::of(pool);
    PoolRow {
        pool: at + 1,
        origin: pool.origin.clone(),
        verdict: verdict.name(),
        limit: pool.limit,
        raises_printed: pool.printed_raises,
        raises_silent: pool.silent_raises,
        advice: verdict.advice(pool),
    }
}

/// The pool of the last message.
fn last_pool(history: &History) -> Option<&PoolHistory> {
    history.pools.get(history.entries.last()?.pool)
}

/// A row for each message, and what they say together.
pub(super) fn table(path: &Path, found: &Found, history: &History, all: bool) -> String {
    let head = ["line", "pool", "gets", "allocated", "puts", "evicted", "missed", "limit", "raised to", "not printed"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let messages = found.messages.iter().zip(&history.entries);
    let left_out = if all { 0 } else { found.messages.len().saturating_sub(ROWS) };
    let (first, last) = (ROWS / 2, found.messages.len() - ROWS / 2 * usize::from(left_out > 0));
    let shown = messages.enumerate().filter(|(at, _)| left_out == 0 || *at < first || *at >= last);
    rows.extend(shown.map(|(_, (message, entry))| table_row(message, entry)));
    let mut text = format!("{}\n", path.display());
    let lines = columns(&rows);
    let is_cut = |at: usize| left_out > 0 && at == first + 1;
    for (at, line) in lines.lines().enumerate() {
        if is_cut(at) {
            text += &format!("... {} more (--all)\n", grouped(left_out as u64));
        }
        text += line.trim_end();
        text.push('\n');
    }
    text + &conclusion(found, history)
}

fn table_row(message: &Message, entry: &Entry) -> Vec<String> {
    let known = |count: Option<u64>| count.map_or("?".to_owned(), grouped);
    let silent = if entry.silent_raises > 0 { counted(entry.silent_raises, "raise") } else { String::new() };
    let (line, pool, limit) = (message.line.to_string(), (entry.pool + 1).to_string(), known(entry.limit));
    match message.figures {
        Figures::After(counters) => vec![
            line,
            pool,
            known(counters.get),
            known(entry.allocated),
            grouped(counters.put),
            grouped(counters.evicted),
            format!("{:.3} %", counters.unsatisfied_rate * 100.0),
            limit,
            String::new(),
            silent,
        ],
        Figures::Raise { to, .. } => {
            let none = || String::new();
            vec![line, pool, none(), none(), none(), none(), none(), limit, grouped(to), silent]
        }
    }
}

fn conclusion(found: &Found, history: &History) -> String {
    let (printed, silent) = history.raises();
    let version = found.tensorflow().map_or(String::new(), |version| format!(", of TensorFlow {version}"));
    let mut text = format!(
        "\n{INFORMATION}\n{} in {}{version}; {} printed, {silent} not printed\n",
        counted(found.messages.len() as u64, "message"),
        counted(found.lines, "line"),
        counted(printed, "raise"),
    );
    if let Some(stopped) = &found.stopped {
        text += &format!("the log was not read to its end: {stopped}\n");
    }
    if found.cut > 0 {
        let is = if found.cut == 1 { "is" } else { "are" };
        text += &format!("{} {is} cut off or damaged and not used\n", counted(found.cut, "message"));
    }
    for said in found.said.values() {
        text += &format!("{}: {}\n", said.pool, said.lines.join("; "));
    }
    // What the pools said themselves counts.
    let pools = if found.said.is_empty() { &*history.pools } else { &[] };
    for (at, pool) in pools.iter().enumerate() {
        let origin = pool.origin.as_ref().map_or_else(String::new, |origin| format!(" ({origin})"));
        let which = if history.pools.len() > 1 { format!("pool {}{origin}: ", at + 1) } else { String::new() };
        let verdict = Verdict::of(pool);
        text += &format!("{which}{}: {}\n", verdict.name(), verdict.advice(pool).join(" "));
    }
    text
}
