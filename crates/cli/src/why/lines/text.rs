//! Log text in pieces: the text between two line ends, `\n` or the `\r` of a progress bar.

use std::io::{self, BufRead, BufReader, Read};

/// Longer pieces are split, so that memory use is bounded.
const PART_BYTES: usize = 1 << 20;
/// A file with longer lines is not a log: a saved notebook has a line for each line of its output.
const LONGEST_PIECE_BYTES: u64 = 64 << 20;

/// Reads pieces.
#[derive(Debug)]
pub(super) struct Pieces<R> {
    text: BufReader<R>,
    line: u64,
    is_inside_line: bool,
    /// Length of the piece so far.
    piece_bytes: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Number of its line, from 1; only `\n` ends a line.
    pub(super) line: u64,
    pub(super) bytes: Vec<u8>,
}

impl<R: Read> Pieces<R> {
    pub(super) fn new(text: R) -> Self {
        Self { text: BufReader::with_capacity(64 << 10, text), line: 0, is_inside_line: false, piece_bytes: 0 }
    }

    /// Lines so far.
    pub(super) fn lines(&self) -> u64 {
        self.line
    }

    /// The next piece, or a part of it; `None` at the end.
    ///
    /// # Errors
    ///
    /// The errors of the underlying reader, and an error for a piece that is too long for a log.
    pub(super) fn next(&mut self) -> io::Result<Option<Piece>> {
        let mut bytes = Vec::new();
        let mut ended_by = None;
        while ended_by.is_none() && bytes.len() < PART_BYTES {
            let chunk = match self.text.fill_buf() {
                Ok([]) => break,
                Ok(chunk) => chunk,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
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
        self.piece_bytes += bytes.len() as u64;
        if self.piece_bytes > LONGEST_PIECE_BYTES {
            let (line, most) = (self.line, LONGEST_PIECE_BYTES >> 20);
            return Err(io::Error::other(format!(
                "line {line} is longer than {most} MiB, the longest line that is read; split a notebook on one line with \
                 `jq . FILE | pinpool why --lines -`"
            )));
        }
        if ended_by.is_some() {
            self.piece_bytes = 0;
        }
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
        let pieces = pieces(io::repeat(b'x').take(60 << 20).chain("\ny".as_bytes()));
        assert_eq!(pieces.iter().map(|&(_, bytes)| bytes).sum::<usize>(), (60 << 20) + 1);
        assert!(pieces.iter().all(|&(_, bytes)| bytes <= PART_BYTES + (64 << 10)), "{pieces:?}");
        let (last, others) = pieces.split_last().unwrap();
        assert!(others.iter().all(|&(line, _)| line == 1) && last.0 == 2);
    }
}
