//! A file that is read once, from its first byte to its last, so that a pipe works like a file.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::path::Path;

use flate2::bufread::MultiGzDecoder;

/// Enough to recognise a format.
const FIRST_BYTES: u64 = 4_096;

/// The contents of a file, decompressed if it is gzip, with its first bytes.
pub struct Input {
    first: Vec<u8>,
    is_packed: bool,
    bytes: Box<dyn BufRead>,
}

impl Input {
    /// Opens the file at `path`; `-` is stdin.
    ///
    /// # Errors
    ///
    /// If it cannot be opened or read. Damaged compressed data is an error of the later read.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file: Box<dyn Read> =
            if path == Path::new("-") { Box::new(io::stdin()) } else { Box::new(File::open(path)?) };
        let mut file = BufReader::new(file);
        // The first read of a pipe may return one byte.
        let mut magic = Vec::new();
        (&mut file).take(2).read_to_end(&mut magic)?;
        let is_packed = magic == [0x1f, 0x8b];
        let file = Cursor::new(magic).chain(file);
        let mut rest: Box<dyn BufRead> =
            if is_packed { Box::new(BufReader::new(MultiGzDecoder::new(file))) } else { Box::new(file) };
        let mut first = Vec::new();
        let error = match (&mut rest).take(FIRST_BYTES).read_to_end(&mut first) {
            Err(error) if !is_packed => return Err(error),
            read => read.err(),
        };
        let bytes = Box::new(Cursor::new(first.clone()).chain(BufReader::new(Rest { error, bytes: rest })));
        Ok(Self { first, is_packed, bytes })
    }

    /// The first bytes of the contents, at most 4 KiB.
    pub fn first(&self) -> &[u8] {
        &self.first
    }

    /// Returns whether the file is compressed.
    pub fn is_packed(&self) -> bool {
        self.is_packed
    }

    /// The contents from the first byte.
    pub fn into_bytes(self) -> Box<dyn BufRead> {
        self.bytes
    }
}

impl std::fmt::Debug for Input {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Input").field("is_packed", &self.is_packed).finish_non_exhaustive()
    }
}

/// The bytes after the first ones.
struct Rest {
    /// The error that ended the first bytes early.
    error: Option<io::Error>,
    bytes: Box<dyn BufRead>,
}

impl Read for Rest {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.error.take().map_or_else(|| self.bytes.read(into), Err)
    }
}
