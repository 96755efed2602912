//! A file that is read once, from its first byte to its last, so that a pipe works like a file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

/// Number of first bytes, which are enough to recognize a format.
const FIRST_BYTES: u64 = 8;

/// The contents of a file, decompressed if it is gzip, with its first bytes.
pub struct Input {
    first: Vec<u8>,
    bytes: Box<dyn BufRead>,
}

impl Input {
    /// Opens the file at `path`; `-` is stdin.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened or read. Damaged compressed data mostly fails a later read instead.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file: Box<dyn Read> =
            if path == Path::new("-") { Box::new(io::stdin()) } else { Box::new(File::open(path)?) };
        let (magic, file) = peek(BufReader::new(file), 2)?;
        let bytes: Box<dyn BufRead> =
            if magic == [0x1f, 0x8b] { Box::new(BufReader::new(MultiGzDecoder::new(file))) } else { Box::new(file) };
        let (first, bytes) = peek(bytes, FIRST_BYTES)?;
        Ok(Self { first, bytes: Box::new(bytes) })
    }

    /// Returns the first bytes of the contents, at most 8.
    pub fn first(&self) -> &[u8] {
        &self.first
    }

    /// Returns the contents from the first byte on.
    pub fn into_reader(self) -> Box<dyn BufRead> {
        self.bytes
    }
}

/// Returns the first `len` bytes, and a reader of all bytes. Reads until it has them, since the first read of a pipe may return one byte.
fn peek(mut bytes: impl BufRead, len: u64) -> io::Result<(Vec<u8>, impl BufRead)> {
    let mut first = Vec::new();
    (&mut bytes).take(len).read_to_end(&mut first)?;
    Ok((first.clone(), Cursor::new(first).chain(bytes)))
}
