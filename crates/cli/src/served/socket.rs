//! The socket of a process that serves its statistics, line by line.

use std::error::Error;
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use pinpool_cli::exit::ExitError;
use pinpool_loader::StopFlag;
use pinpool_observe::stats_socket::{PATH_BYTES_MAX, connect, path_of};
use serde_json::Value;

/// Maximum length of a line, enough for thousands of pools.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// Longest time to wait for a line.
const SILENCE: Duration = Duration::from_secs(5);
/// Time between two checks for an interrupt.
const PAUSE: Duration = Duration::from_millis(10);

/// The statistics that a process sends. An error is the last item.
pub(crate) type Objects = Receiver<Result<Value, String>>;

/// Returns the first object that the process sends (its ID and the statistics of its pools), and a channel for later objects.
///
/// # Errors
///
/// If no process of this user serves statistics there, none arrive in time, or `stop` is raised first.
pub(crate) fn first(target: &str, stop: &StopFlag) -> Result<(Value, Objects), Box<dyn Error>> {
    let path = target.parse().map_or_else(|_| PathBuf::from(target), path_of);
    let in_socket = |why: String| format!("{}: {why}", path.display());
    let length = path.as_os_str().len();
    if length > PATH_BYTES_MAX {
        let why = format!("the path has {length} bytes; a socket path has at most {PATH_BYTES_MAX}");
        return Err(in_socket(why).into());
    }
    if path.is_file() {
        return Err(in_socket("a file, not a process: `pinpool why` and `pinpool report` read it".to_owned()).into());
    }
    // If the channel is full, the sending process waits.
    let (sender, objects) = mpsc::sync_channel(1);
    let of = path.clone();
    thread::Builder::new().name("pinpool-top".to_owned()).spawn(move || send_all(&of, &sender))?;
    let begun = Instant::now();
    while !stop.is_raised() {
        match objects.recv_timeout(PAUSE) {
            Ok(object) => return Ok((object.map_err(in_socket)?, objects)),
            // The process may not have accepted the connection yet.
            Err(RecvTimeoutError::Timeout) if begun.elapsed() < SILENCE => {}
            Err(_) => return Err(in_socket(silent()).into()),
        }
    }
    Err(ExitError::Interrupted.because("interrupted"))
}

/// Sends the objects from the socket at `path` until an error, the end of the process, or a dropped receiver.
fn send_all(path: &Path, objects: &SyncSender<Result<Value, String>>) {
    let sent = connected(path).and_then(|socket| {
        let mut lines = BufReader::new(socket);
        while objects.send(Ok(next(&mut lines)?)).is_ok() {}
        Ok(())
    });
    if let Err(why) = sent {
        // If the receiver is gone, the reason is not needed.
        let _ = objects.send(Err(why));
    }
}

fn connected(path: &Path) -> Result<UnixStream, String> {
    let socket = connect(path).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied if error.raw_os_error().is_none() => error.to_string(),
        io::ErrorKind::PermissionDenied => {
            format!("{error}: it belongs to another user; run this command as that user")
        }
        _ => format!(
            "{error}: no process serves its statistics there; start it with PINPOOL_SOCKET=1, or with this path"
        ),
    })?;
    socket.set_read_timeout(Some(SILENCE)).map_err(|error| error.to_string())?;
    Ok(socket)
}

fn silent() -> String {
    format!("the process has sent no whole line for {} s", SILENCE.as_secs())
}

fn not_statistics(why: impl std::fmt::Display) -> String {
    format!("the socket sent something other than statistics of pinpool: {why}")
}

/// Reads the object in the next line.
fn next(lines: &mut BufReader<UnixStream>) -> Result<Value, String> {
    let mut line = Vec::new();
    match lines.take(LINE_BYTES_MAX).read_until(b'\n', &mut line) {
        Ok(0) => Err("the process has ended".to_owned()),
        Ok(_) if line.ends_with(b"\n") => statistics(&line),
        Ok(read) if read as u64 == LINE_BYTES_MAX => {
            Err(not_statistics(format_args!("a line has more than {LINE_BYTES_MAX} bytes")))
        }
        Ok(_) => Err(not_statistics("it is truncated in the middle of a line")),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(silent()),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses the object in a line.
pub(crate) fn statistics(line: &[u8]) -> Result<Value, String> {
    let mut object: Value = serde_json::from_slice(line).map_err(not_statistics)?;
    super::mark_unpinned_in(&mut object);
    if object["pools"].is_array() { Ok(object) } else { Err(not_statistics("it has no list of pools")) }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_reader_that_has_its_line_ends_its_connection() {
        use std::os::unix::net::UnixListener;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let line = b"{\"process\":5,\"pools\":[]}\n";
        let serving = thread::spawn(move || {
            let (mut reader, _) = listener.accept().unwrap();
            reader.write_all(line).unwrap();
            // Only the reader closes the connection.
            (0..1000).any(|_| {
                thread::sleep(PAUSE);
                reader.write_all(line).is_err()
            })
        });
        assert_eq!(first(path.to_str().unwrap(), &StopFlag::new()).unwrap().0["process"], 5);
        assert!(serving.join().unwrap());
    }

    #[test]
    fn other_lines_are_refused_with_the_reason() {
        let long = vec![b' '; 17 << 20];
        for (bytes, why) in [
            (&b"not json\n"[..], "other than statistics of pinpool"),
            (b"{\"pools\":1}\n", "no list of pools"),
            (b"{\"pools\":[]}", "truncated in the middle of a line"),
            (b"\xff\n", "other than statistics of pinpool"),
            (&long, "more than 16777216 bytes"),
            (b"", "the process has ended"),
        ] {
            let (mut there, here) = UnixStream::pair().unwrap();
            let error = thread::scope(|scope| {
                scope.spawn(move || there.write_all(bytes).is_ok());
                next(&mut BufReader::new(here)).unwrap_err()
            });
            assert!(error.contains(why), "{error}");
        }
    }
}
