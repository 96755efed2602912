//! `pinpool replay`: a trace, played through the public pool on `sim`.

use std::error::Error;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use pinpool::trace::{Conformance, Reader, Streams};
use sha2::{Digest, Sha256};

/// Plays a trace of gets and puts on simulated memory.
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
    match args.format {
        Format::Conformance => conformance(&args.trace),
    }
}

/// A digest that can be written to.
#[derive(Debug, Default)]
struct Hashed(Sha256);

impl Write for Hashed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Hashed {
    fn hex(self) -> String {
        self.0.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

fn conformance(trace: &Path) -> Result<(), Box<dyn Error>> {
    let mut reader = Reader::open(trace).map_err(|error| format!("{}: {error}", trace.display()))?;
    // A line of a stream is a few bytes: collect them, the digest takes 64 at a time.
    let buffered = || io::BufWriter::with_capacity(1 << 16, Hashed::default());
    let streams = Streams { outcome: buffered(), buffers: buffered() };
    let mut conformance = Conformance::new(reader.header(), streams)?;
    conformance.play(&mut reader).map_err(|error| format!("{}: {error}", trace.display()))?;
    let mut out = io::stdout().lock();
    for line in conformance.diagnostics() {
        writeln!(out, "{line}")?;
    }
    for figures in conformance.figures() {
        writeln!(out, "{}", serde_json::to_string(&figures)?)?;
    }
    let Streams { outcome, buffers } = conformance.into_streams();
    writeln!(out, "outcome sha256 {}", outcome.into_inner()?.hex())?;
    writeln!(out, "buffers sha256 {}", buffers.into_inner()?.hex())?;
    Ok(())
}
