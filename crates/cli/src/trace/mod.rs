//! `pinpool trace`: prints a trace, or converts it.
//!
//! | file | owns |
//! | --- | --- |
//! | `text.rs` | a conformance trace with comments |
//! | `snapshot.rs` | a snapshot for PyTorch's memory_viz |
//! | `pickle.rs` | the encoding of that snapshot |

mod pickle;
mod snapshot;
mod text;

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use crate::files::{in_file, named};
use crate::input;
use pinpool_cli::terminal::write_stdout;

/// Print a recording, or convert it for PyTorch's memory_viz
///
/// Reads recordings (PINPOOL_TRACE or `load --record`), plain or compressed. If the recording is truncated, prints the intact
/// part and exits with 1.
#[derive(Debug, Args)]
#[command(after_help = "Example: pinpool trace t.gz --format pytorch -o t.pickle
  Open t.pickle at https://pytorch.org/memory_viz")]
pub(crate) struct TraceArgs {
    /// The trace; `-` is stdin
    trace: PathBuf,

    /// text or pytorch
    #[arg(long, value_enum, hide_possible_values = true, default_value_t = Format::Text)]
    format: Format,

    /// File to write instead of stdout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Requests and returns as a conformance trace, everything else as comments
    Text,
    /// A pickled snapshot for PyTorch's memory_viz
    Pytorch,
}

pub(crate) fn run(args: &TraceArgs) -> Result<(), Box<dyn Error>> {
    let recording = input::read_recording(&args.trace, input::open(&args.trace)?)?;
    if recording.records.is_empty() {
        let why = recording.warning.as_deref().unwrap_or("it has no records");
        return Err(named(&args.trace, &format_args!("nothing to print: {why}")).into());
    }
    let write = |out: &mut dyn Write| match args.format {
        Format::Text => text::write(&recording, out),
        Format::Pytorch => snapshot::write(&recording, out),
    };
    match &args.output {
        Some(path) => {
            refuse_to_overwrite(&args.trace, path)?;
            let file = File::create(path).map_err(|error| in_file(path, &error))?;
            let mut out = BufWriter::new(file);
            write(&mut out).and_then(|()| out.flush()).map_err(|error| in_file(path, &error))?;
        }
        None => write_stdout(write)?,
    }
    recording.warning.map_or(Ok(()), |warning| Err(named(&args.trace, &warning).into()))
}

/// Fails if `output` is the input, because writing to the input would truncate it before it is read.
pub(crate) fn refuse_to_overwrite(input: &Path, output: &Path) -> Result<(), String> {
    let same = matches!((input.canonicalize(), output.canonicalize()), (Ok(input), Ok(output)) if input == output);
    if same { Err(format!("{}: this is the input; name another file", output.display())) } else { Ok(()) }
}
