//! What a file is, by its first bytes.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;
use pinpool::trace::Workload;

use crate::files::{in_file, named};

/// Longer than the first lines of any trace.
const LOOKED_AT: u64 = 4_096;
/// How a log of RMM begins.
const RMM: &str = "Thread,Time,Action";
/// How a snapshot of PyTorch's memory begins: a pickle of protocol 2 or later.
const PICKLE: u8 = 0x80;
/// How a recording of a pool begins.
pub(crate) const RECORDING: &[u8] = b"PINPOOLT";
const HEADERS: [&str; 4] = ["# limit ", "# auto_resize ", "# rounder ", "# pools "];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Of what a pool did.
    Recording,
    /// Gets and puts alone.
    Workload,
    Log,
}

/// What the file at `path`, plain or compressed with gzip, begins as. Stdin is a log.
///
/// # Errors
///
/// If the file cannot be read.
pub(crate) fn kind(path: &Path) -> io::Result<Kind> {
    if path == Path::new("-") {
        return Ok(Kind::Log);
    }
    let mut file = BufReader::new(File::open(path)?);
    let is_gzip = file.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    let mut first = Vec::new();
    // The reader that follows says what cannot be decompressed.
    let _ = if is_gzip {
        MultiGzDecoder::new(file).take(LOOKED_AT).read_to_end(&mut first)
    } else {
        file.take(LOOKED_AT).read_to_end(&mut first)
    };
    Ok(match () {
        () if first.starts_with(RECORDING) => Kind::Recording,
        () if first.first() == Some(&PICKLE) || begins_a_workload(&first) => Kind::Workload,
        () => Kind::Log,
    })
}

/// The trace at `path`, to be played.
///
/// # Errors
///
/// If it cannot be read, or has no gets.
pub(crate) fn open_workload(path: &Path) -> Result<Workload, String> {
    let workload = Workload::open(path).map_err(|error| in_file(path, &error))?;
    if workload.gets() == 0 {
        let why = workload.warning().map_or_else(String::new, |warning| format!("{warning}; "));
        return Err(named(path, &format_args!("{why}the trace has no gets, so there is nothing to play")));
    }
    Ok(workload)
}

fn begins_a_workload(first: &[u8]) -> bool {
    let text = String::from_utf8_lossy(first);
    let mut lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with("##"));
    lines.next().is_some_and(|line| {
        line.starts_with(RMM) || HEADERS.iter().any(|header| line.starts_with(header)) || is_operation(line)
    })
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
    fn workloads_are_told_from_logs() {
        for trace in ["## a comment\n\n# limit 5\n", "a 0 630194176\nt 52000\n", "c\n", "Thread,Time,Action,Pointer"] {
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
