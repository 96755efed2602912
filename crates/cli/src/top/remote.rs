//! The pools of another process, which serves their statistics on a socket.

use std::error::Error;
use std::io::{self, IsTerminal};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use pinpool_loader::StopFlag;
use ratatui::crossterm::event::{Event, KeyCode, KeyEventKind};
use serde_json::Value;

use super::session::Session;
use super::snapshot::{History, Snapshot};
use super::{ends, overview, screen};
use crate::interrupt::stop_at_interrupt;
use crate::served::socket::{Newest, first_line, statistics};
use crate::served::{is_alarm, on_host, pools};
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;

/// Between two looks at all processes.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Between two looks for a line.
const PAUSE: Duration = Duration::from_millis(10);

/// Show the pools of running processes live: the cause of what they cost, seconds lost, bytes by state, who holds them
///
/// The processes must have been started with PINPOOL_SOCKET=1, or with a path there, and a pinpool built with the feature `observe`.
/// Without a terminal the screen of each pool is printed once. Where a process has several pools, their table comes first, the one that
/// loses most at its top. The keys: a shows one pool in place of the table, and the table again, n the next pool; q or Ctrl-C ends.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Number of the process, or its socket
    #[arg(value_name = "PID|SOCKET", required_unless_present = "all")]
    target: Option<String>,

    /// The pools of all processes of this user and host that were started with PINPOOL_SOCKET=1, and the host ledgers, in one table
    #[arg(long, conflicts_with_all = ["target", "json"])]
    all: bool,

    /// Print the statistics once, as the JSON object that the process sends
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &TopArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let is_live = !args.json && io::stdout().is_terminal();
    // A signal ends it like a key, so that the terminal is given back.
    let stop = if is_live { stop_at_interrupt(terminal) } else { StopFlag::new() };
    let shown = match &args.target {
        Some(target) => show_target(target, args.json, is_live, &stop, terminal),
        None if is_live => show_host(&stop),
        None => print_host(terminal),
    };
    terminal.report(shown)?;
    if stop.is_raised() { Err(ExitError::Interrupted) } else { Ok(()) }
}

fn show_target(
    target: &str,
    is_json: bool,
    is_live: bool,
    stop: &StopFlag,
    terminal: &Terminal,
) -> Result<(), Box<dyn Error>> {
    let Some((lines, first, object)) = first_line(target, stop)? else { return Ok(()) };
    if is_json {
        return Ok(pinpool_cli::terminal::to_stdout(&first)?);
    }
    // A screen may wait for a pool.
    if is_live {
        return show(&object, &lines, stop);
    }
    if pools(&object).is_empty() {
        return Err(format!("{target}: the process has no pool now").into());
    }
    print_once((&object, Instant::now()), &lines, terminal)
}

/// The screen of each pool, alarms first, with the rates of one second.
fn print_once((first, first_at): (&Value, Instant), lines: &Newest, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let second = loop {
        match lines.take() {
            Some(Ok(Some(line))) => break statistics(&line)?,
            // It ended meanwhile: what it sent first stands.
            Some(Ok(None)) => break first.clone(),
            Some(Err(why)) => return Err(why.into()),
            None => thread::sleep(PAUSE),
        }
    };
    let second_at = Instant::now();
    let mut order: Vec<_> = (0..pools(first).len()).collect();
    order.sort_by_key(|&at| !is_alarm(&pools(first)[at]));
    for pool in order {
        let mut seen = Seen { pool, ..Seen::default() };
        seen.add(first, first_at);
        seen.add(&second, second_at);
        print(terminal, &screen::text(&seen.history, &seen.progress()))?;
    }
    Ok(())
}

/// The first pool with an alarm, else the first.
fn worst(object: &Value) -> usize {
    pools(object).iter().position(is_alarm).unwrap_or(0)
}

fn print(terminal: &Terminal, text: &str) -> Result<(), Box<dyn Error>> {
    terminal.print(text.trim_end()).map_err(|_| "stdout: it is closed".into())
}

fn print_host(terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let (objects, silent) = on_host();
    print(terminal, &overview::of_host(&objects))?;
    if silent.is_empty() { Ok(()) } else { Err(silent.join("; ").into()) }
}

fn show_host(stop: &StopFlag) -> Result<(), Box<dyn Error>> {
    let mut session = Session::begin()?;
    while !stop.is_raised() {
        let (objects, silent) = on_host();
        let text = overview::of_host(&objects);
        session.screen.draw(|frame| overview::draw(frame, &text, &silent.join("; "), "q or Ctrl-C ends"))?;
        if let Some(Event::Key(key)) = session.next_event(LOOK_EVERY)?
            && ends(key)
        {
            return Ok(());
        }
    }
    Ok(())
}

/// Until a key, a signal or the process ends it.
fn show(first: &Value, lines: &Newest, stop: &StopFlag) -> Result<(), Box<dyn Error>> {
    let mut session = Session::begin()?;
    let (mut seen, mut last) = (Seen { pool: worst(first), ..Seen::default() }, first.clone());
    seen.add(first, Instant::now());
    let mut has_table = seen.pools > 1;
    while !stop.is_raised() {
        match lines.take() {
            Some(Ok(Some(line))) => {
                last = statistics(&line)?;
                seen.add(&last, Instant::now());
            }
            Some(Ok(None)) => return Err("the process has ended".into()),
            Some(Err(why)) => return Err(why.into()),
            None => {}
        }
        let progress = seen.progress();
        session.screen.draw(|frame| {
            if has_table {
                overview::draw(frame, &overview::of(std::slice::from_ref(&last)), "", "a: one pool; q or Ctrl-C ends");
            } else {
                screen::draw(frame, &seen.history, &progress, seen.keys());
            }
        })?;
        if let Some(Event::Key(key)) = session.next_event(Duration::from_millis(100))? {
            if ends(key) {
                return Ok(());
            }
            match key.code {
                KeyCode::Char('n') if key.kind == KeyEventKind::Press => seen.next_pool(),
                KeyCode::Char('a') if key.kind == KeyEventKind::Press => has_table = !has_table,
                _ => {}
            }
        }
    }
    Ok(())
}

/// What came so far of one pool.
#[derive(Default)]
struct Seen {
    history: History,
    process: u64,
    pool: usize,
    pools: usize,
    last: Option<Instant>,
}

impl Seen {
    /// `now` is when the object came.
    fn add(&mut self, object: &Value, now: Instant) {
        let pools = pools(object);
        (self.process, self.pools) = (object["process"].as_u64().unwrap_or(0), pools.len());
        if let Some(stats) = pools.get(self.pool).or(pools.first()) {
            let between = self.last.replace(now).map_or(Duration::ZERO, |last| now - last);
            self.history.add(Snapshot::of_json(stats), between);
        }
    }

    fn next_pool(&mut self) {
        let pool = (self.pool + 1) % self.pools.max(1);
        (self.pool, self.history, self.last) = (pool, History::default(), None);
    }

    fn keys(&self) -> &'static str {
        if self.pools > 1 { "n: next pool; a: all pools; q or Ctrl-C ends" } else { "q or Ctrl-C ends" }
    }

    fn progress(&self) -> String {
        let which = if self.pools > 1 { format!(", pool {} of {}", self.pool + 1, self.pools) } else { String::new() };
        format!("process {}{which}", self.process)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_with_an_alarm_is_shown_before_others() {
        let calm = r#"{"why":{"is_alarm":false}}"#;
        let alarming = r#"{"why":{"is_alarm":true}}"#;
        for (pools, at) in [(format!("{calm},{{}},{alarming},{alarming}"), 2), (calm.to_owned(), 0), (String::new(), 0)]
        {
            assert_eq!(worst(&statistics(&format!("{{\"pools\":[{pools}]}}")).unwrap()), at, "{pools}");
        }
    }

    #[test]
    fn the_next_pool_begins_a_history_of_its_own() {
        let mut seen = Seen::default();
        let object = statistics(r#"{"process":5,"pools":[{"gets":10,"hits":5},{"gets":3,"name":"b"}]}"#).unwrap();
        let begun = Instant::now();
        seen.add(&object, begun);
        assert_eq!((seen.history.now.gets, seen.progress()), (10, "process 5, pool 1 of 2".to_owned()));
        seen.next_pool();
        seen.add(&object, begun);
        let later = statistics(r#"{"process":5,"pools":[{},{"gets":7,"name":"b"}]}"#).unwrap();
        seen.add(&later, begun + Duration::from_secs(2));
        assert!((seen.history.rate(|now| now.gets) - 2.0).abs() < 1e-9, "of the time between the objects");
        assert_eq!((seen.history.now.gets, seen.history.now.name.as_str()), (7, "b"));
        seen.next_pool();
        assert_eq!(seen.pool, 0);
    }
}
