//! The text format of traces: one item a line, fields separated by one space, numbers decimal.
//!
//! Owns the syntax and line numbers; the code that plays a trace checks its meaning.
//!
//! | header | meaning | default |
//! | --- | --- | --- |
//! | `# limit N` | starting limit | 100 |
//! | `# auto_resize 0\|1` | whether the limit may grow | 1 |
//! | `# rounder noop\|pow2` | how size classes are rounded | noop |
//! | `# pools N` | number of pools | 1 |
//! | `## text` | a comment, anywhere | |
//!
//! | operation | meaning |
//! | --- | --- |
//! | `a ID BYTES [ALIGN]` | request a buffer and name it ID |
//! | `f ID` | return buffer ID |
//! | `r COUNT BYTES` | COUNT times: request and return |
//! | `s COUNT BYTES STEP` | the same with BYTES growing by STEP |
//! | `c` | clear |
//! | `p K` | continue with pool K |
//! | `t MICROSECONDS` | the clock advances |
//!
//! A trace has at most [`MAX_LINES`] lines and [`MAX_REPEATS`] repetitions, so that a small compressed file or a large number cannot
//! exhaust the memory or the time of the machine.

use std::io::{self, BufRead, Read};
use std::path::Path;

use super::input::Input;
use pinpool::unstable::Rounding;

/// The alignment of a request that names none.
pub(crate) const DEFAULT_ALIGN: usize = 4;

/// Settings in the header of a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceHeader {
    /// Limit of idle buffers at the start.
    pub limit: u64,
    /// `true` if the limit may grow.
    pub auto_resize: bool,
    /// Rounding of sizes to classes.
    pub rounding: Rounding,
    /// Number of pools, all with the settings above.
    pub pools: usize,
}

/// One line of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // The table of the module documents them.
pub enum TraceOp {
    Get { id: u64, bytes: usize, align: usize },
    Put { id: u64 },
    Steps { count: u64, bytes: usize, step: usize },
    Clear,
    Pool { index: usize },
    Advance { micros: u64 },
}

/// The reason why a trace cannot be read or played, with its line number.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file could not be read.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A line has an error.
    #[error("line {line}: `{text}`: {why}")]
    Line {
        /// Line number, from 1.
        line: u64,
        /// The first characters of that line.
        text: String,
        /// The reason.
        why: String,
    },
    /// A recording could not be read.
    #[error("{0}")]
    Recording(#[from] pinpool_observe::record::RecordingError),
    /// A Python pickle, probably a PyTorch memory snapshot.
    #[error("this is a pickle, such as a PyTorch memory snapshot; record a trace instead: PINPOOL_TRACE=FILE")]
    Pickle,
    /// A pool could not be built, or refused a request.
    #[error("{0}")]
    Pool(#[from] pinpool::Error),
}

/// Most lines of a trace: 20 times the longest trace of this repository, about 300 MB in memory.
pub(super) const MAX_LINES: u64 = 4_000_000;
/// Largest sum of the counts of `r` and `s` lines, which takes minutes to replay.
pub(super) const MAX_REPEATS: u64 = 1_000_000_000;
/// Largest number of pools in a header.
const MAX_POOLS: usize = 1024;

/// Reads a trace line by line: the header first, then the operations as an iterator.
pub struct TraceReader {
    lines: Box<dyn BufRead>,
    header: TraceHeader,
    pending: Option<String>,
    line: u64,
    repeats: u64,
    /// The last returned operation.
    text: String,
}

impl std::fmt::Debug for TraceReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TraceReader").field("header", &self.header).field("line", &self.line).finish_non_exhaustive()
    }
}

impl TraceReader {
    /// Opens a trace, plain or compressed by gzip, which its first bytes tell; `-` is stdin.
    ///
    /// # Errors
    ///
    /// If the file cannot be read or its header has an error.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        Self::new(Input::open(path)?.into_bytes())
    }

    /// Reads a trace from `lines`.
    ///
    /// # Errors
    ///
    /// If it cannot be read or its header has an error.
    pub fn new(lines: impl BufRead + 'static) -> Result<Self, TraceError> {
        let header = TraceHeader { limit: 100, auto_resize: true, rounding: Rounding::Exact, pools: 1 };
        let mut reader =
            Self { lines: Box::new(lines), header, pending: None, line: 0, repeats: 0, text: String::new() };
        while let Some(text) = reader.next_line()? {
            let Some(setting) = text.strip_prefix('#') else {
                reader.pending = Some(text);
                break;
            };
            reader.set(setting.trim()).map_err(|why| reader.error_at(&text, why))?;
        }
        Ok(reader)
    }

    /// The settings of the trace.
    pub fn header(&self) -> &TraceHeader {
        &self.header
    }

    /// Number of the last line read, from 1.
    pub fn line(&self) -> u64 {
        self.line
    }

    /// An error at the last returned operation, for the code that plays the trace.
    pub fn error_here(&self, why: String) -> TraceError {
        self.error_at(&self.text, why)
    }

    /// The next line that is neither empty nor a comment.
    fn next_line(&mut self) -> Result<Option<String>, TraceError> {
        loop {
            let mut bytes = Vec::new();
            // Bounds the memory that a file without line ends takes.
            let limit = 4096;
            let read = (&mut self.lines).take(limit).read_until(b'\n', &mut bytes)?;
            if read == 0 {
                return Ok(None);
            }
            self.line += 1;
            if self.line > MAX_LINES {
                let text = String::from_utf8_lossy(&bytes);
                return Err(self.error_at(&text, format!("a trace has at most {MAX_LINES} lines")));
            }
            if read as u64 == limit && !bytes.ends_with(b"\n") {
                let text = String::from_utf8_lossy(&bytes);
                return Err(self.error_at(&text, "too long for a line of a trace".to_owned()));
            }
            let text = String::from_utf8(bytes).map_err(|error| {
                self.error_at(&String::from_utf8_lossy(error.as_bytes()), "not UTF-8 text".to_owned())
            })?;
            let text = text.trim_end();
            if !text.is_empty() && !text.starts_with("##") {
                return Ok(Some(text.to_owned()));
            }
        }
    }

    fn count_repeats(&mut self, operation: TraceOp) -> Result<TraceOp, String> {
        if let TraceOp::Steps { count, .. } = operation {
            self.repeats = self.repeats.saturating_add(count);
            if self.repeats > MAX_REPEATS {
                return Err(format!("the counts of all `r` and `s` lines add up to at most {MAX_REPEATS}"));
            }
        }
        Ok(operation)
    }

    fn set(&mut self, setting: &str) -> Result<(), String> {
        let header = &mut self.header;
        match setting.split_once(' ') {
            Some(("limit", n)) => header.limit = number(n)?,
            Some(("auto_resize", "0")) => header.auto_resize = false,
            Some(("auto_resize", "1")) => header.auto_resize = true,
            Some(("rounder", "noop")) => header.rounding = Rounding::Exact,
            Some(("rounder", "pow2")) => header.rounding = Rounding::Pow2,
            Some(("pools", n)) => {
                header.pools = number(n)
                    .ok()
                    .filter(|n| (1..=MAX_POOLS).contains(n))
                    .ok_or_else(|| format!("a trace has 1 to {MAX_POOLS} pools"))?;
            }
            _ => {
                return Err("unknown setting; use limit N, auto_resize 0|1, rounder noop|pow2 or pools N".to_owned());
            }
        }
        Ok(())
    }

    fn error_at(&self, text: &str, why: String) -> TraceError {
        TraceError::Line { line: self.line, text: text.chars().take(60).collect(), why }
    }
}

impl Iterator for TraceReader {
    type Item = Result<TraceOp, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.text = match self.pending.take().map_or_else(|| self.next_line(), |text| Ok(Some(text))) {
            Ok(text) => text?,
            Err(error) => return Some(Err(error)),
        };
        let operation = parse(&self.text).and_then(|operation| self.count_repeats(operation));
        Some(operation.map_err(|why| self.error_here(why)))
    }
}

fn parse(text: &str) -> Result<TraceOp, String> {
    let fields: Vec<&str> = text.split(' ').collect();
    Ok(match fields.as_slice() {
        ["a", id, bytes] => TraceOp::Get { id: number(id)?, bytes: number(bytes)?, align: DEFAULT_ALIGN },
        ["a", id, bytes, align] => TraceOp::Get { id: number(id)?, bytes: number(bytes)?, align: number(align)? },
        ["f", id] => TraceOp::Put { id: number(id)? },
        ["r", count, bytes] => TraceOp::Steps { count: number(count)?, bytes: number(bytes)?, step: 0 },
        ["s", count, bytes, step] => {
            TraceOp::Steps { count: number(count)?, bytes: number(bytes)?, step: number(step)? }
        }
        ["c"] => TraceOp::Clear,
        ["p", index] => TraceOp::Pool { index: number(index)? },
        ["t", micros] => TraceOp::Advance { micros: number(micros)? },
        _ => return Err("unknown operation; use a, f, r, s, c, p or t with the right number of fields".to_owned()),
    })
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number, or too large"))
}
