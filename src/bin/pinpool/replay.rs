//! `pinpool replay`: a trace, played through the public pool on `sim`.

use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use pinpool::trace::{Reader, expected_text};

/// Plays a trace of gets and puts on simulated memory
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// The trace, plain or packed by gzip
    trace: PathBuf,
    /// What to print
    #[arg(long, value_enum, default_value_t = Format::Conformance)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// The diagnostics, the figures of each pool as JSON, and the digests of the two outcome streams
    Conformance,
}

pub(crate) fn run(args: &ReplayArgs) -> Result<(), Box<dyn Error>> {
    let named = |error| format!("{}: {error}", args.trace.display());
    let mut reader = Reader::open(&args.trace).map_err(named)?;
    match args.format {
        Format::Conformance => io::stdout().write_all(expected_text(&mut reader).map_err(named)?.as_bytes())?,
    }
    Ok(())
}
