//! `pinpool trace`: prints a trace, or converts it.
//!
//! | file | owns |
//! | --- | --- |
//! | `text.rs` | the text form, which readers of conformance traces read |
//! | `csv.rs` | a line for each record |
//! | `chrome.rs` | trace events as JSON, for Perfetto and `chrome://tracing` |
//! | `snapshot.rs` | a snapshot for PyTorch's memory_viz |
//! | `pickle.rs` | the encoding of that snapshot |

mod chrome;
mod csv;
mod pickle;
mod snapshot;
mod text;

use std::error::Error;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use pinpool::trace::{PoolDescription, Recording, open_recording};

use crate::ExitError;
use crate::terminal::Terminal;

/// Print a recorded trace, or convert it
///
/// Takes what PINPOOL_TRACE or `load --record` wrote, a workload or conformance trace, or a log of RMM
/// (Thread,Time,Action,Pointer,Size,Stream), plain or compressed. Exits with 1 if the trace is not whole: then what is left of
/// it is printed.
#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// The trace
    trace: PathBuf,

    /// What to print
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,

    /// File to write, in place of stdout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Gets and puts as a conformance trace, everything else in comments
    Text,
    /// A line for each record
    Csv,
    /// Trace events as JSON, for Perfetto and chrome://tracing
    Chrome,
    /// A pickled snapshot for PyTorch's memory_viz
    Pytorch,
}

pub(crate) fn run(args: &TraceArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let converted = convert(args);
    let warning = match converted {
        Ok(warning) => warning,
        Err(error) => return terminal.report(Err(error)),
    };
    match warning {
        None => Ok(()),
        Some(warning) => {
            terminal.message(format_args!("{}: {warning}", args.trace.display()));
            Err(ExitError::Failure)
        }
    }
}

/// Writes the trace; returns why it is not whole, if it is not.
fn convert(args: &TraceArgs) -> Result<Option<String>, Box<dyn Error>> {
    let recording = open_recording(&args.trace).map_err(|error| in_file(&args.trace, &error))?;
    match &args.output {
        Some(path) => {
            refuse_to_overwrite(&args.trace, path)?;
            let file = File::create(path).map_err(|error| in_file(path, &error))?;
            let mut out = BufWriter::new(file);
            write(&recording, args.format, &mut out)
                .and_then(|()| out.flush())
                .map_err(|error| in_file(path, &error))?;
        }
        None => {
            let mut out = BufWriter::new(io::stdout().lock());
            let written = write(&recording, args.format, &mut out).and_then(|()| out.flush());
            // Keeps the kind, by which a closed pipe is told from a full disk.
            written.map_err(|error| io::Error::new(error.kind(), format!("stdout: {error}")))?;
        }
    }
    Ok(recording.warning)
}

fn write(recording: &Recording, format: Format, out: &mut dyn Write) -> io::Result<()> {
    match format {
        Format::Text => text::write(recording, out),
        Format::Csv => csv::write(recording, out),
        Format::Chrome => chrome::write(recording, out),
        Format::Pytorch => snapshot::write(recording, out),
    }
}

/// An output that is the input would be empty before it was read.
pub(crate) fn refuse_to_overwrite(input: &Path, output: &Path) -> Result<(), String> {
    let same = matches!((input.canonicalize(), output.canonicalize()), (Ok(input), Ok(output)) if input == output);
    if same { Err(format!("{}: is the input; name another file", output.display())) } else { Ok(()) }
}

fn in_file(path: &Path, error: &dyn std::fmt::Display) -> String {
    format!("{}: {error}", path.display())
}

/// What to call a pool.
fn name_of(pool: &PoolDescription) -> String {
    pool.fact("name").map_or_else(|| format!("pool {}", pool.number), ToOwned::to_owned)
}
