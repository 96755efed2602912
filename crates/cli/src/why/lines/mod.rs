//! TensorFlow's lines in a log: the limit at each line, and what to set (`pinpool why LOG`, `--lines`).
//!
//! | file | owns |
//! | --- | --- |
//! | `finder.rs` | the messages in the lines, and the prefixes around them |
//! | `parts.rs` | the parts of a message, and how lines continue |
//! | `message.rs` | the two messages and their numbers |
//! | `origin.rs` | the process of a line, named by a launcher |
//! | `limits.rs` | the limit, from the numbers of one line |
//! | `history.rs` | many lines: the pool of each, the limit in force, unprinted raises |
//! | `trend.rs` | warming up, steady or thrashing, and what to set |
//! | `report.rs` | the result as text and as JSON |
//! | `curve.rs` | the result as a series |

mod curve;
mod finder;
mod history;
mod limits;
mod message;
mod origin;
mod parts;
mod report;
mod trend;

use std::error::Error;
use std::path::{Path, PathBuf};

use encoding_rs_io::DecodeReaderBytes;
use pinpool_observe::diagnosis::words::counted;
use pinpool_replay::{Input, Recording};

use crate::files::named;
use crate::input;
use crate::series::Series;
use history::History;
use message::LogContent;
use pinpool_cli::terminal::{Terminal, write_stdout};

/// Lists the messages of each log.
pub(super) fn run(logs: &[PathBuf], is_json: bool, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    // An error does not prevent the other logs from being read.
    let listed: Vec<_> = logs.iter().map(|path| terminal.report(list(path, is_json))).collect();
    Ok(listed.into_iter().collect::<Result<(), _>>()?)
}

/// Returns the pools of a log.
///
/// # Errors
///
/// If the log cannot be read or has no message.
pub(crate) fn series(input: Input) -> Result<Series, Box<dyn Error>> {
    let (found, history) = find(input, false)?;
    Ok(curve::series(found, history))
}

fn find(input: Input, needs_messages: bool) -> Result<(LogContent, History), Box<dyn Error>> {
    if Recording::is_begun_by(input.first()) {
        let why = "this is a recording, not a log: use `pinpool why` without --lines, or `pinpool trace`";
        return Err(why.into());
    }
    // PowerShell writes UTF-16, with a byte order mark.
    let found = finder::find(DecodeReaderBytes::new(input.into_reader()));
    if found.messages.is_empty() && (needs_messages || found.diagnoses.is_empty()) {
        return Err(none_found(&found).into());
    }
    let history = History::of(&found.messages)?;
    Ok((found, history))
}

fn list(path: &Path, is_json: bool) -> Result<(), Box<dyn Error>> {
    let (found, history) = find(input::open(path)?, true).map_err(|error| named(path, &error))?;
    write_stdout(|out| match is_json {
        true => report::json(out, path, &found, &history),
        false => out.write_all(report::table(path, &found, &history).as_bytes()),
    })?;
    found.stopped.map_or(Ok(()), |stopped| Err(named(path, &stopped).into()))
}

fn none_found(found: &LogContent) -> String {
    let cut = if found.cut > 0 { format!(" ({} are truncated or damaged)", found.cut) } else { String::new() };
    let stopped = found.stopped.as_ref().map_or_else(String::new, |stopped| format!("{stopped}; "));
    let lines = counted(found.lines, "line");
    format!(
        "{stopped}no complete message of the pool in {lines}{cut}: pinpool logs its diagnosis, which --lines does not read, at level info \
         (RUST_LOG=info), and TensorFlow's lines after 1000 evictions; TensorFlow printed them until mid-2017 \
         (TF_CPP_MIN_LOG_LEVEL=0); unpack other compressions than gzip first (`xz -dc FILE | pinpool why --lines -`); `pinpool advise` reads traces of requests",
    )
}
