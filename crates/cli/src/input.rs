//! The kind of a file, by its first bytes.

use std::path::Path;

use pinpool_replay::{Input, Recording, Workload};

use crate::files::{in_file, named};

/// The first byte of a pickle of protocol 2 or later, which is refused like an invalid trace.
const PICKLE: u8 = 0x80;
/// The first bytes of a recording.
pub(crate) const RECORDING: &[u8] = b"PINPOOLT";
const HEADERS: [&str; 4] = ["# limit ", "# auto_resize ", "# rounder ", "# pools "];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A recording of what a pool did.
    Recording,
    /// Requests and returns only.
    Workload,
    Log,
}

/// The kind of a file that begins with `first`.
pub(crate) fn kind(first: &[u8]) -> Kind {
    match () {
        () if first.starts_with(RECORDING) => Kind::Recording,
        () if first.first() == Some(&PICKLE) || begins_a_workload(first) => Kind::Workload,
        () => Kind::Log,
    }
}

/// Opens the file at `path` for one reader.
///
/// # Errors
///
/// If the file cannot be read.
pub(crate) fn open(path: &Path) -> Result<Input, String> {
    Input::open(path).map_err(|error| in_file(path, &error))
}

/// The recording in the open file at `path`.
///
/// # Errors
///
/// If the file is another one, or cannot be read.
pub(crate) fn read_recording(path: &Path, input: Input) -> Result<Recording, String> {
    let why = match kind(input.first()) {
        Kind::Recording => return Recording::read(input.into_bytes()).map_err(|error| in_file(path, &error)),
        Kind::Workload => match Workload::read_file(input) {
            Ok(_) => "this is a trace of requests alone, which `pinpool advise` replays".to_owned(),
            Err(error) => error.to_string(),
        },
        Kind::Log => "PINPOOL_TRACE and `pinpool load --record` write one".to_owned(),
    };
    Err(named(path, &format_args!("not a recording: {why}")))
}

/// The workload in the file at `path`.
///
/// # Errors
///
/// If it cannot be read, or has no requests.
pub(crate) fn open_workload(path: &Path) -> Result<Workload, String> {
    read_workload(path, open(path)?)
}

/// The workload in the open file at `path`.
///
/// # Errors
///
/// The errors of [`open_workload`].
pub(crate) fn read_workload(path: &Path, input: Input) -> Result<Workload, String> {
    with_gets(path, Workload::read_file(input).map_err(|error| in_file(path, &error))?)
}

/// The workload of the file at `path`, if it has requests.
pub(crate) fn with_gets(path: &Path, workload: Workload) -> Result<Workload, String> {
    if workload.gets() == 0 {
        let why = workload.warning().map_or_else(String::new, |warning| format!("{warning}; "));
        return Err(named(path, &format_args!("{why}the trace has no requests")));
    }
    Ok(workload)
}

fn begins_a_workload(first: &[u8]) -> bool {
    let text = String::from_utf8_lossy(first);
    let mut lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with("##"));
    lines.next().is_some_and(|line| HEADERS.iter().any(|header| line.starts_with(header)) || is_operation(line))
}

/// A letter and its numbers.
fn is_operation(line: &str) -> bool {
    let mut fields = line.trim_end().split(' ');
    let letter = fields.next().unwrap_or_default();
    let is_number = |field: &str| !field.is_empty() && field.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = fields.clone().count();
    let takes_numbers = matches!(letter, "a" | "f" | "r" | "s" | "p" | "t") && numbers > 0;
    (takes_numbers && fields.all(is_number)) || (letter == "c" && numbers == 0)
}

#[cfg(test)]
mod tests {
    use super::begins_a_workload;

    #[test]
    fn workloads_differ_from_logs() {
        for trace in ["## a comment\n\n# limit 5\n", "a 0 630194176\nt 52000\n", "c\n"] {
            assert!(begins_a_workload(trace.as_bytes()), "{trace}");
        }
        for log in [
            "",
            "# a notebook\n",
            "a 1 step\n",
            "epoch 1\n",
            "Raising pool_size_limit_ from 1 to 2",
            "{\"cells\": []}",
            "c and more\n",
        ] {
            assert!(!begins_a_workload(log.as_bytes()), "{log}");
        }
    }
}
