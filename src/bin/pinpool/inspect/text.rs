//! Log text in pieces: what lies between two line ends, `\n` or the `\r` of a progress bar.

use std::io::{self, BufRead, BufReader, Read};

/// Longer lines come in parts, so that a file without line ends needs no more memory than this. A message that such a cut
/// goes through is not found.
const LONGEST_PIECE_BYTES: usize = 64 << 20;

/// Reads pieces.
#[derive(Debug)]
pub(super) struct Pieces<R> {
    text: BufReader<R>,
    line: u64,
    is_inside_line: bool,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Number of its line, from 1; only `\n` ends a line.
    pub(super) line: u64,
    pub(super) bytes: Vec<u8>,
}

impl<R: Read> Pieces<R> {
    pub(super) fn new(text: R) -> Self {
        Self { text: BufReader::new(text), line: 0, is_inside_line: false }
    }

    /// Lines so far.
    pub(super) fn lines(&self) -> u64 {
        self.line
    }

    /// The next piece; `None` at the end.
    ///
    /// # Errors
    ///
    /// As the reader beneath.
    pub(super) fn next(&mut self) -> io::Result<Option<Piece>> {
        let mut bytes = Vec::new();
        let mut ended_by = None;
        while ended_by.is_none() && bytes.len() < LONGEST_PIECE_BYTES {
            let chunk = match self.text.fill_buf() {
                Ok(chunk) => chunk,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if chunk.is_empty() {
                break;
            }
            let end = chunk.iter().position(|byte| matches!(byte, b'\n' | b'\r'));
            ended_by = end.map(|end| chunk[end]);
            bytes.extend_from_slice(&chunk[..end.unwrap_or(chunk.len())]);
            let used = end.map_or(chunk.len(), |end| end + 1);
            self.text.consume(used);
        }
        if bytes.is_empty() && ended_by.is_none() {
            return Ok(None);
        }
        self.line += u64::from(!self.is_inside_line);
        self.is_inside_line = ended_by != Some(b'\n');
        Ok(Some(Piece { line: self.line, bytes }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: impl Read) -> Vec<(u64, usize)> {
        let mut pieces = Pieces::new(text);
        std::iter::from_fn(|| pieces.next().unwrap()).map(|piece| (piece.line, piece.bytes.len())).collect()
    }

    #[test]
    fn a_carriage_return_ends_a_piece_and_a_line_feed_a_line() {
        assert_eq!(pieces("a\rbb\n\nccc\r\nd".as_bytes()), [(1, 1), (1, 2), (2, 0), (3, 3), (3, 0), (4, 1)]);
        assert_eq!(pieces("".as_bytes()), []);
    }

    #[test]
    fn a_file_without_line_ends_comes_in_parts_of_one_line() {
        let pieces = pieces(io::repeat(b'x').take(100 << 20).chain("\ny".as_bytes()));
        assert_eq!(pieces.iter().map(|&(_, bytes)| bytes).sum::<usize>(), (100 << 20) + 1);
        assert!(pieces.iter().all(|&(_, bytes)| bytes <= LONGEST_PIECE_BYTES + (64 << 10)), "{pieces:?}");
        assert_eq!(pieces.iter().map(|&(line, _)| line).collect::<Vec<_>>(), [1, 1, 2]);
    }
}
