//! The socket of a process that serves its statistics, line by line.

use std::error::Error;
use std::io::{self, BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use pinpool_loader::StopFlag;
use pinpool_observe::stats_socket::{PATH_BYTES_MAX, connect, path_of};
use serde_json::Value;

/// Longest line that is read: thousands of pools.
const LINE_BYTES_MAX: usize = 16 << 20;
/// Timeout of a line.
const SILENCE: Duration = Duration::from_secs(5);
/// Time between two checks for the first line.
const PAUSE: Duration = Duration::from_millis(10);

/// The first object that the process sends: its id and the statistics of its pools.
///
/// # Errors
///
/// If no process of this user serves statistics there, or none arrive in time.
pub(crate) fn statistics_of(target: &str) -> Result<Value, Box<dyn Error>> {
    let first = first_line(target, &StopFlag::new())?;
    first.map(|(.., object)| object).ok_or_else(|| format!("{target}: interrupted").into())
}

/// The lines of the socket, and the first line with its object; `None` if `stop` was raised before it arrived.
#[allow(clippy::type_complexity)] // A triple that is taken apart at once.
pub(crate) fn first_line(
    target: &str,
    stop: &StopFlag,
) -> Result<Option<(Arc<Newest>, String, Value)>, Box<dyn Error>> {
    let path = target.parse().map_or_else(|_| PathBuf::from(target), path_of);
    let length = path.as_os_str().len();
    if length > PATH_BYTES_MAX {
        return Err(format!(
            "{}: the path has {length} bytes; a socket path has at most {PATH_BYTES_MAX}",
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
            // The process may not accept the connection.
            None if begun.elapsed() > SILENCE => return Err(in_socket(&silent()).into()),
            None => thread::sleep(PAUSE),
        }
    };
    let object = statistics(&first).map_err(|why| in_socket(&why))?;
    Ok(Some((lines, first, object)))
}

/// The newest line; `None` at the end of the process.
pub(crate) type Line = Result<Option<String>, String>;

/// The last line read by the thread. Older lines are dropped, so a flood of lines uses no memory.
#[derive(Default)]
pub(crate) struct Newest(Mutex<Untaken>);

#[derive(Default)]
struct Untaken {
    line: Option<String>,
    /// An error or the end, after all lines.
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

    pub(crate) fn take(&self) -> Option<Line> {
        let mut untaken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        untaken.line.take().map(|line| Ok(Some(line))).or_else(|| untaken.end.take())
    }
}

/// Reads the socket at `path` on a thread, which ends after an error, the end of the process, or when the result is dropped.
fn follow(path: PathBuf) -> io::Result<Arc<Newest>> {
    let newest = Arc::new(Newest::default());
    let read = Arc::downgrade(&newest);
    let put = move |line: Line| read.upgrade().map(|read| read.put(line)).is_some();
    thread::Builder::new().name("pinpool-top".to_owned()).spawn(move || {
        let in_socket = |why: String| format!("{}: {why}", path.display());
        let mut lines = match connected(&path) {
            Ok(socket) => BufReader::new(socket),
            Err(why) => {
                put(Err(in_socket(why)));
                return;
            }
        };
        loop {
            let line = next_line(&mut lines).map_err(in_socket);
            let is_last = !matches!(line, Ok(Some(_)));
            if !put(line) || is_last {
                return;
            }
        }
    })?;
    Ok(newest)
}

fn connected(path: &Path) -> Result<UnixStream, String> {
    connect(path).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied if error.raw_os_error().is_none() => error.to_string(),
        io::ErrorKind::PermissionDenied => {
            format!("{error}: it belongs to another user; run this command as that user")
        }
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
pub(crate) fn statistics(line: &str) -> Result<Value, String> {
    let mut object: Value = serde_json::from_str(line).map_err(no_statistics)?;
    super::mark_unpinned(&mut object);
    if let Some(why) = object["closed"].as_str() {
        return Err(format!("the process has closed the connection: {why}"));
    }
    if object["pools"].is_array() { Ok(object) } else { Err(no_statistics("it has no list of pools")) }
}

/// The next line, within the timeout; `None` at the end.
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
            // The loop checks the timeout.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_lines_that_nobody_takes_the_newest_stays() {
        let newest = Newest::default();
        (0..1000).for_each(|number| newest.put(Ok(Some(number.to_string()))));
        newest.put(Ok(None));
        assert_eq!(newest.take(), Some(Ok(Some("999".to_owned()))));
        assert_eq!((newest.take(), newest.take()), (Some(Ok(None)), None));
    }

    #[test]
    fn a_reader_that_has_its_line_ends_its_connection() {
        use std::io::Write;
        use std::os::unix::net::UnixListener;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let line = b"{\"process\":5,\"pools\":[]}\n";
        let serving = thread::spawn(move || {
            let (mut reader, _) = listener.accept().unwrap();
            reader.write_all(line).unwrap();
            // Nobody but the reader closes the connection.
            (0..1000).any(|_| {
                thread::sleep(PAUSE);
                reader.write_all(line).is_err()
            })
        });
        assert_eq!(statistics_of(path.to_str().unwrap()).unwrap()["process"], 5);
        assert!(serving.join().unwrap());
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
