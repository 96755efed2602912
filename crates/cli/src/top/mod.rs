//! `pinpool top`: the pools of running processes, live in a terminal or printed once.
//!
//! | file | owns |
//! | --- | --- |
//! | `screen.rs` | one pool on a screen |
//! | `overview.rs` | all pools and shared limits in one table |
//! | `session.rs` | the terminal while a screen is drawn |

mod overview;
mod screen;
mod session;

use std::error::Error;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use clap::Args;
use pinpool_loader::StopFlag;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use serde_json::Value;

use self::session::Session;
use crate::diagnosis::DiagnosisText;
use crate::interrupt::stop_at_interrupt;
use crate::series::Series;
use crate::served::on_host;
use crate::served::socket::{Objects, first};
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::{Terminal, one_line, write_stdout};

pub(crate) use self::session::restore;

/// Interval between queries of all processes.
const QUERY_EVERY: Duration = Duration::from_secs(1);
/// Maximum number of points in a curve.
const POINTS_MAX: usize = 200;

/// Show the pools of running processes live
///
/// Shows for each pool the main cause of its costs, the seconds lost, the bytes by state and their holders. The processes must
/// run with PINPOOL_SOCKET=1 (or a path) and a pinpool built with the feature `observe`. A process with several pools is shown as
/// a table first. Keys: a switches between the table and one pool, n shows the next pool, q or Ctrl-C ends. Exits with 1 if a
/// process does not answer.
#[derive(Debug, Args)]
#[command(after_help = "Example: pinpool top 4711 --once
  train: healthy: 600 of 607 requests were served immediately, 64.0MiB held
    all threads lost 21.0ms in 10.0s (pinning 21.0ms)")]
pub(crate) struct TopArgs {
    /// Process ID or socket
    #[arg(value_name = "PID|SOCKET", required_unless_present = "all")]
    target: Option<String>,

    /// Show this user's processes (PINPOOL_SOCKET=1) and shared limits
    #[arg(long, conflicts_with = "target")]
    all: bool,

    /// Print once: diagnosis, statistics and holders of each pool
    #[arg(long)]
    once: bool,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &TopArgs, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let is_live = !args.json && !args.once && io::stdout().is_terminal();
    // A signal ends the screen as a key does, so that the terminal is restored.
    let stop = if is_live { stop_at_interrupt(terminal) } else { StopFlag::new() };
    let shown = match &args.target {
        Some(target) => show_target(target, args.json, is_live, &stop),
        None => show_host(args.json, is_live, &stop, terminal),
    };
    if stop.is_raised() { Err(ExitError::Interrupted.into()) } else { shown }
}

fn show_target(target: &str, is_json: bool, is_live: bool, stop: &StopFlag) -> Result<(), Box<dyn Error>> {
    if !is_json && !is_live {
        let series = Series::of_process(target, Duration::ZERO, stop)?;
        let texts: Vec<_> = series.diagnoses.iter().map(|one| text_of(&series, one)).collect();
        return Ok(write_stdout(|out| out.write_all(texts.join("\n").as_bytes()))?);
    }
    let (object, objects) = first(target, stop)?;
    // A live screen waits for the first pool.
    if is_live { show(object, &objects, stop) } else { Ok(write_stdout(|out| writeln!(out, "{object}"))?) }
}

/// Returns the diagnosis, statistics and holders of one pool, as the process prints them.
fn text_of(series: &Series, of: &DiagnosisText) -> String {
    let statistics = series.latest(of).map_or("", |(pool, _)| &pool.text);
    let text = format!("{}: {}\n\n{statistics}", of.pool, of.lines.join("\n"));
    text.trim_end().lines().map(|line| one_line(line) + "\n").collect()
}

/// Shows all processes: prints them once, or draws them until a key or a signal.
fn show_host(is_json: bool, is_live: bool, stop: &StopFlag, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let mut session = if is_live { Some(Session::begin()?) } else { None };
    loop {
        let (objects, mut silent) = on_host();
        let (limits, unreadable) = overview::shared_limits();
        let text = || overview::of_host(&objects.iter().map(Series::once).collect::<Vec<_>>(), &limits);
        let Some(session) = &mut session else {
            unreadable.iter().for_each(|why| terminal.message(why));
            let json = || serde_json::json!({ "processes": objects, "shared_limits": limits });
            terminal.print(if is_json { json().to_string() } else { text().trim_end().to_owned() })?;
            return if silent.is_empty() { Ok(()) } else { Err(silent.join("; ").into()) };
        };
        silent.extend(unreadable);
        session.screen.draw(|frame| overview::draw(frame, &text(), &silent.join("; "), "q or Ctrl-C ends"))?;
        if session.next_key(QUERY_EVERY)?.is_some_and(ends) || stop.is_raised() {
            return Ok(());
        }
    }
}

/// Draws the pools of a process until a key, a signal or the end of the process.
fn show(object: Value, objects: &Objects, stop: &StopFlag) -> Result<(), Box<dyn Error>> {
    let mut session = Session::begin()?;
    let (begun, mut series) = (Instant::now(), Series::once(&object));
    let (mut pool, mut has_table) = (0, series.pools.len() > 1);
    while !stop.is_raised() {
        if let Ok(next) = objects.try_recv() {
            series.add(begun.elapsed().as_secs_f64(), &next?);
            series.keep_running(POINTS_MAX);
        }
        session.screen.draw(|frame| match has_table {
            true => {
                overview::draw(frame, &overview::of(std::slice::from_ref(&series)), "", "a: one pool; q or Ctrl-C ends")
            }
            false => screen::draw(frame, &series, pool),
        })?;
        if let Some(key) = session.next_key(Duration::from_millis(100))? {
            match key.code {
                _ if ends(key) => return Ok(()),
                KeyCode::Char('n') => pool = (pool + 1) % series.pools.len().max(1),
                KeyCode::Char('a') => has_table = !has_table,
                _ => {}
            }
        }
    }
    Ok(())
}

fn ends(key: KeyEvent) -> bool {
    let is_ctrl_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    is_ctrl_c || matches!(key.code, KeyCode::Char('q') | KeyCode::Esc)
}
