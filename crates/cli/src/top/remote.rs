//! The pools of another process, which serves their statistics on a socket.

use std::error::Error;
use std::io::{self, BufRead, BufReader, IsTerminal};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use pinpool_loader::StopFlag;
use pinpool_observe::stats_socket::{PATH_BYTES_MAX, connect, path_of};
use ratatui::crossterm::event::{Event, KeyCode, KeyEventKind};
use serde_json::Value;

use super::session::Session;
use super::snapshot::{History, Snapshot};
use super::{ends, screen};
use crate::interrupt::stop_at_interrupt;
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;

/// Longest line that is read: thousands of pools.
const LINE_BYTES_MAX: usize = 16 << 20;
/// A process whose next line takes longer has ended or hangs.
const SILENCE: Duration = Duration::from_secs(5);
/// Between two looks for the first line.
const PAUSE: Duration = Duration::from_millis(10);

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
    if !args.json && !io::stdout().is_terminal() {
        return Err("stdout is no terminal: nothing can be shown live; --json prints the figures once".into());
    }
    let Some((lines, first, object)) = first_line(&args.target, stop)? else { return Ok(()) };
    if args.json {
        return Ok(pinpool_cli::terminal::to_stdout(&first)?);
    }
    show(&object, &lines, stop)
}

/// The object that the process sends at once: its number, and the statistics of its pools.
///
/// # Errors
///
/// If no process of this user serves its statistics there, or sends none in time.
pub(crate) fn statistics_of(target: &str) -> Result<Value, Box<dyn Error>> {
    let first = first_line(target, &StopFlag::new())?;
    first.map(|(.., object)| object).ok_or_else(|| format!("{target}: interrupted").into())
}

/// The lines of the socket, and the first of them with its object; `None` if `stop` was raised before it came.
#[allow(clippy::type_complexity)] // A triple that is taken apart at once.
fn first_line(target: &str, stop: &StopFlag) -> Result<Option<(Arc<Newest>, String, Value)>, Box<dyn Error>> {
    let path = target.parse().map_or_else(|_| PathBuf::from(target), path_of);
    let length = path.as_os_str().len();
    if length > PATH_BYTES_MAX {
        return Err(format!(
            "{}: the path has {length} bytes, and that of a socket at most {PATH_BYTES_MAX}",
            path.display()
        )
        .into());
    }
    let lines = follow(path.clone())?;
    let in_socket = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
    let begun = Instant::now();
    let first = loop {
        if stop.is_raised() {
            return Ok(None);
        }
        match lines.take() {
            Some(line) => break line?.ok_or_else(|| in_socket(&"the process ended before it sent anything"))?,
            // A connection may wait for a process that accepts none.
            None if begun.elapsed() > SILENCE => return Err(in_socket(&silent()).into()),
            None => thread::sleep(PAUSE),
        }
    };
    let object = statistics(&first).map_err(|why| in_socket(&why))?;
    Ok(Some((lines, first, object)))
}

/// The newest line; `None` is the end of the process.
type Line = Result<Option<String>, String>;

/// What another thread has read last. Older lines that nobody took are gone, so a process that floods them fills no memory.
#[derive(Default)]
struct Newest(Mutex<Untaken>);

#[derive(Default)]
struct Untaken {
    line: Option<String>,
    /// What came after all lines: an error, or the end.
    end: Option<Line>,
}

impl Newest {
    fn put(&self, line: Line) {
        let mut untaken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match line {
            Ok(Some(line)) => untaken.line = Some(line),
            end => untaken.end = Some(end),
        }
    }

    fn take(&self) -> Option<Line> {
        let mut untaken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        untaken.line.take().map(|line| Ok(Some(line))).or_else(|| untaken.end.take())
    }
}

/// Reads the socket at `path` on a thread, which ends after the first line that is an error or the end.
fn follow(path: PathBuf) -> io::Result<Arc<Newest>> {
    let newest = Arc::new(Newest::default());
    let read = newest.clone();
    thread::Builder::new().name("pinpool-top".to_owned()).spawn(move || {
        let in_socket = |why: String| format!("{}: {why}", path.display());
        let mut lines = match connected(&path) {
            Ok(socket) => BufReader::new(socket),
            Err(why) => return read.put(Err(in_socket(why))),
        };
        loop {
            let line = next_line(&mut lines).map_err(in_socket);
            let is_last = !matches!(line, Ok(Some(_)));
            read.put(line);
            if is_last {
                return;
            }
        }
    })?;
    Ok(newest)
}

fn connected(path: &Path) -> Result<UnixStream, String> {
    connect(path).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => error.to_string(),
        _ => format!(
            "{error}: no process serves its statistics there; start it with PINPOOL_SOCKET=1, or with this path"
        ),
    })
}

fn silent() -> String {
    format!("the process has sent no whole line for {} s", SILENCE.as_secs())
}

fn no_statistics(why: impl std::fmt::Display) -> String {
    format!("what came from the socket is no statistics of pinpool: {why}")
}

/// The object in a line.
fn statistics(line: &str) -> Result<Value, String> {
    let object: Value = serde_json::from_str(line).map_err(no_statistics)?;
    if let Some(why) = object["closed"].as_str() {
        return Err(format!("the process has closed the connection: {why}"));
    }
    if object["pools"].is_array() { Ok(object) } else { Err(no_statistics("it has no list of pools")) }
}

/// The next line, which is to be whole in time; `None` at the end.
fn next_line(socket: &mut BufReader<UnixStream>) -> Line {
    let until = Instant::now() + SILENCE;
    let mut line = Vec::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(silent());
        }
        socket.get_ref().set_read_timeout(Some(left)).map_err(|error| error.to_string())?;
        let part = match socket.fill_buf() {
            Ok(part) => part,
            // The time is looked at above.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => continue,
            Err(error) => return Err(error.to_string()),
        };
        let end = part.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
        line.extend_from_slice(&part[..end.unwrap_or(part.len())]);
        let taken = end.unwrap_or(part.len());
        socket.consume(taken);
        match (end, taken) {
            (Some(_), _) => {
                return String::from_utf8(line).map(Some).map_err(|_| no_statistics("it is not UTF-8"));
            }
            (None, 0) if line.is_empty() => return Ok(None),
            (None, 0) => return Err(no_statistics("it is cut off in the middle of a line")),
            _ if line.len() > LINE_BYTES_MAX => {
                return Err(no_statistics(format!("a line has more than {LINE_BYTES_MAX} bytes")));
            }
            _ => {}
        }
    }
}

/// Until a key, a signal or the process ends it.
fn show(first: &Value, lines: &Newest, stop: &StopFlag) -> Result<(), Box<dyn Error>> {
    let mut session = Session::begin()?;
    let mut seen = Seen::default();
    seen.add(first);
    while !stop.is_raised() {
        match lines.take() {
            Some(Ok(Some(line))) => seen.add(&statistics(&line)?),
            Some(Ok(None)) => return Err("the process has ended".into()),
            Some(Err(why)) => return Err(why.into()),
            None => {}
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
    fn add(&mut self, object: &Value) {
        let pools = object["pools"].as_array().map_or(&[][..], Vec::as_slice);
        (self.process, self.pools) = (object["process"].as_u64().unwrap_or(0), pools.len());
        if let Some(stats) = pools.get(self.pool).or(pools.first()) {
            let now = Instant::now();
            let between = self.last.replace(now).map_or(Duration::ZERO, |last| now - last);
            self.history.add(Snapshot::of_json(stats), between);
        }
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
        let object = statistics(r#"{"process":5,"pools":[{"gets":10,"hits":5},{"gets":3,"name":"b"}]}"#).unwrap();
        seen.add(&object);
        assert_eq!((seen.history.now.gets, seen.progress()), (10, "process 5, pool 1 of 2 (n: next)".to_owned()));
        seen.next_pool();
        seen.add(&object);
        assert_eq!((seen.history.now.gets, seen.history.now.name.as_str()), (3, "b"));
        seen.next_pool();
        assert_eq!(seen.pool, 0);
    }

    #[test]
    fn of_lines_that_nobody_takes_the_newest_stays() {
        let newest = Newest::default();
        (0..1000).for_each(|number| newest.put(Ok(Some(number.to_string()))));
        newest.put(Ok(None));
        assert_eq!(newest.take(), Some(Ok(Some("999".to_owned()))));
        assert_eq!((newest.take(), newest.take()), (Some(Ok(None)), None));
    }

    #[test]
    fn what_is_no_statistics_is_said_to_be_none() {
        for (line, why) in [
            ("not json", "no statistics of pinpool"),
            ("{\"pools\":1}", "no list of pools"),
            ("{\"closed\":\"16 readers have come\"}", "closed the connection: 16 readers have come"),
        ] {
            let error = statistics(line).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn lines_are_whole_bounded_and_in_time() {
        use std::io::Write;
        let lines_of = |bytes: &[u8]| {
            let (mut there, here) = UnixStream::pair().unwrap();
            let bytes = bytes.to_vec();
            let writing = thread::spawn(move || there.write_all(&bytes).is_ok());
            let mut here = BufReader::new(here);
            let lines: Vec<_> = std::iter::from_fn(|| next_line(&mut here).transpose()).take(3).collect();
            drop(here);
            writing.join().unwrap();
            lines
        };
        assert_eq!(lines_of(b"a\nb\n"), [Ok("a\n".to_owned()), Ok("b\n".to_owned())]);
        let cut_off = lines_of(b"a\nb").swap_remove(1).unwrap_err();
        assert!(cut_off.contains("cut off in the middle of a line"), "{cut_off}");
        let long = lines_of(&vec![b' '; LINE_BYTES_MAX + (1 << 20)]).swap_remove(0).unwrap_err();
        assert!(long.contains("more than 16777216 bytes"), "{long}");
        assert!(lines_of(b"\xff\n")[0].as_ref().is_err_and(|why| why.contains("not UTF-8")));
    }
}
