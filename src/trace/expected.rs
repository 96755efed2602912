//! The text that a conforming pool must produce for a trace: diagnostics, figures, digests of the outcome streams.

use std::fmt::Write as _;
use std::io::{self, BufWriter, Write};

use sha2::{Digest, Sha256};

use super::conformance::{Conformance, Streams};
use super::format::{Reader, TraceError};

/// Plays `reader` and gives the whole text.
///
/// # Errors
///
/// As [`Conformance::new`] and [`Conformance::play`].
pub fn expected_text(reader: &mut Reader) -> Result<String, TraceError> {
    // A line of a stream is a few bytes, a digest takes 64 at a time.
    let buffered = || BufWriter::with_capacity(1 << 16, Hashed::default());
    let mut conformance = Conformance::new(reader.header(), Streams { outcome: buffered(), buffers: buffered() })
        .map_err(|error| TraceError::Io(io::Error::other(error)))?;
    conformance.play(reader)?;
    let mut text = String::new();
    for line in conformance.diagnostics() {
        let _ = writeln!(text, "{line}"); // Writing to a string does not fail.
    }
    for figures in conformance.figures() {
        let json = serde_json::to_string(&figures).map_err(io::Error::from)?;
        let _ = writeln!(text, "{json}");
    }
    let Streams { outcome, buffers } = conformance.into_streams();
    for (name, stream) in [("outcome", outcome), ("buffers", buffers)] {
        let hashed = stream.into_inner().map_err(io::IntoInnerError::into_error)?;
        let _ = writeln!(text, "{name} sha256 {}", hashed.hex());
    }
    Ok(text)
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
        self.0.finalize().iter().fold(String::new(), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}"); // Writing to a string does not fail.
            hex
        })
    }
}
