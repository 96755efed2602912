//! The pools of another process, which serves their statistics on a socket.

use std::error::Error;
use std::io::{self, BufRead, BufReader, IsTerminal, Read};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use pinpool::loader::StopFlag;
use pinpool::stats_socket::{PATH_BYTES_MAX, path_of};
use ratatui::crossterm::event::{Event, KeyCode, KeyEventKind};
use serde_json::Value;

use super::session::Session;
use super::snapshot::{History, Snapshot};
use super::{ends, screen};
use crate::ExitError;
use crate::interrupt::stop_at_interrupt;
use crate::terminal::Terminal;

/// Longest line that is read: thousands of pools.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// A process that is silent for longer has ended or hangs.
const SILENCE: Duration = Duration::from_secs(5);

/// Show the pools of a running process live: bytes by state, hit rate, page-locks, the oldest copy
///
/// The process must have been started with PINPOOL_SOCKET=1, or with a path there, and a pinpool built with the feature `serve`.
/// The keys: n shows the next of its pools; q or Ctrl-C ends.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Number of the process, or its socket
    #[arg(value_name = "PID|SOCKET")]
    target: String,

    /// Print the statistics once, as the JSON object that the process sends
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &TopArgs, terminal: &Terminal) -> Result<(), ExitError> {
    // A signal ends it like a key, so that the terminal is given back.
    let stop = if args.json { StopFlag::new() } else { stop_at_interrupt(terminal) };
    terminal.report(show_target(args, &stop))?;
    if stop.is_raised() { Err(ExitError::Interrupted) } else { Ok(()) }
}

fn show_target(args: &TopArgs, stop: &StopFlag) -> Result<(), Box<dyn Error>> {
    let path = args.target.parse().map_or_else(|_| PathBuf::from(&args.target), path_of);
    if !args.json && !io::stdout().is_terminal() {
        return Err("stdout is no terminal: nothing can be shown live; --json prints the figures once".into());
    }
    let length = path.as_os_str().len();
    if length > PATH_BYTES_MAX {
        return Err(format!(
            "{}: the path has {length} bytes, and that of a socket at most {PATH_BYTES_MAX}",
            path.display()
        )
        .into());
    }
    let socket = UnixStream::connect(&path).map_err(|error| {
        let path = path.display();
        format!(
            "{path}: {error}: no process serves its statistics there; start it with PINPOOL_SOCKET=1, or with this path"
        )
    })?;
    socket.set_read_timeout(Some(SILENCE))?;
    let mut lines = BufReader::new(socket);
    if args.json {
        let in_socket = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
        let line = next_line(&mut lines).map_err(|error| in_socket(&error))?;
        let line = line.ok_or_else(|| in_socket(&"the process ended before it sent anything"))?;
        statistics(&line).map_err(|error| in_socket(&error))?;
        return Ok(crate::terminal::to_stdout(&line)?);
    }
    let (send, lines_read) = mpsc::channel();
    thread::Builder::new().name("pinpool-top".to_owned()).spawn(move || {
        loop {
            let line = next_line(&mut lines).map_err(|error| error.to_string());
            let is_last = !matches!(line, Ok(Some(_)));
            if send.send(line).is_err() || is_last {
                return;
            }
        }
    })?;
    show(&lines_read, stop)
}

/// The object in a line.
fn statistics(line: &str) -> Result<Value, String> {
    let object: Value = serde_json::from_str(line)
        .map_err(|error| format!("what came from the socket is no statistics of pinpool: {error}"))?;
    if object["pools"].is_array() {
        Ok(object)
    } else {
        Err("what came from the socket is no statistics of pinpool: it has no list of pools".to_owned())
    }
}

fn next_line(lines: &mut BufReader<UnixStream>) -> io::Result<Option<String>> {
    let mut line = String::new();
    let read = lines.take(LINE_BYTES_MAX).read_line(&mut line);
    let read = read.map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            io::Error::other(format!("the process has sent nothing for {} s", SILENCE.as_secs()))
        }
        io::ErrorKind::InvalidData => {
            io::Error::other("what came from the socket is no statistics of pinpool: it is not UTF-8")
        }
        _ => error,
    })?;
    Ok((read > 0).then_some(line))
}

/// Until a key, a signal or the process ends it.
fn show(lines: &Receiver<Result<Option<String>, String>>, stop: &StopFlag) -> Result<(), Box<dyn Error>> {
    let mut session = Session::begin()?;
    let mut seen = Seen::default();
    while !stop.is_raised() {
        match lines.try_recv() {
            Ok(Ok(Some(line))) => seen.add(&line)?,
            Ok(Ok(None)) | Err(TryRecvError::Disconnected) => return Err("the process has ended".into()),
            Ok(Err(why)) => return Err(why.into()),
            Err(TryRecvError::Empty) => {}
        }
        let progress = seen.progress();
        session.screen.draw(|frame| screen::draw(frame, &seen.history, &progress, ""))?;
        if let Some(Event::Key(key)) = session.next_event(Duration::from_millis(100))? {
            if ends(key) {
                return Ok(());
            }
            if key.kind == KeyEventKind::Press && key.code == KeyCode::Char('n') {
                seen.next_pool();
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
    fn add(&mut self, line: &str) -> Result<(), Box<dyn Error>> {
        let object = statistics(line)?;
        let pools = object["pools"].as_array().map_or(&[][..], Vec::as_slice);
        (self.process, self.pools) = (object["process"].as_u64().unwrap_or(0), pools.len());
        if let Some(stats) = pools.get(self.pool).or(pools.first()) {
            let now = Instant::now();
            let between = self.last.replace(now).map_or(Duration::ZERO, |last| now - last);
            self.history.add(Snapshot::of_json(stats), between);
        }
        Ok(())
    }

    fn next_pool(&mut self) {
        let pool = (self.pool + 1) % self.pools.max(1);
        (self.pool, self.history, self.last) = (pool, History::default(), None);
    }

    fn progress(&self) -> String {
        let which = if self.pools > 1 {
            format!(", pool {} of {} (n: next)", self.pool + 1, self.pools)
        } else {
            String::new()
        };
        format!("process {}{which}", self.process)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_pool_begins_a_history_of_its_own() {
        let mut seen = Seen::default();
        let line = r#"{"process":5,"pools":[{"gets":10,"hits":5},{"gets":3,"name":"b"}]}"#;
        seen.add(line).unwrap();
        assert_eq!((seen.history.now.gets, seen.progress()), (10, "process 5, pool 1 of 2 (n: next)".to_owned()));
        seen.next_pool();
        seen.add(line).unwrap();
        assert_eq!((seen.history.now.gets, seen.history.now.name.as_str()), (3, "b"));
        seen.next_pool();
        assert_eq!(seen.pool, 0);
        assert!(seen.add("not json").is_err());
    }
}
