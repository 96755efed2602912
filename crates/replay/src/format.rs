//! The text format of traces: one item per line, fields separated by one space, decimal numbers.
//!
//! [`Trace`] contains the records of one thread, as a recording does, and each line is checked.
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
//! A trace has at most [`LINES_MAX`] lines and [`RECORDS_MAX`] records, so that a small compressed file or a large number cannot
//! exhaust the memory or the time of the machine.

use std::collections::HashMap;
use std::io::{self, BufRead, Read};
use std::path::Path;

use super::input::Input;
use pinpool::Rounding;
use pinpool_observe::record::{Event, Record};

/// The alignment of a request that names none.
pub(crate) const UNSPECIFIED_ALIGN: usize = 4;
/// The buffer of `r` and `s` lines; no other line may name it.
const REPEATED_ID: u64 = u64::MAX;

/// A trace as it was written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    /// The settings in the header.
    pub header: TraceHeader,
    /// The requests, returns and clears.
    pub records: Vec<Record>,
    /// Line number of each record, from 1, and the alignment of its request.
    pub lines: Vec<(u64, usize)>,
    /// The time after the last line, in nanoseconds.
    pub(super) ended_ns: u64,
}

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

impl Default for TraceHeader {
    fn default() -> Self {
        Self { limit: 100, auto_resize: true, rounding: Rounding::Exact, pools: 1 }
    }
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
    /// A Python pickle, probably a PyTorch memory snapshot.
    #[error("this is a pickle, such as a PyTorch memory snapshot; record a trace instead: PINPOOL_TRACE=FILE")]
    Pickle,
    /// A pool could not be built, or refused a request.
    #[error("{0}")]
    Pool(#[from] pinpool::Error),
}

/// Maximum number of lines of a trace: 20 times the longest trace of this repository, about 300 MB in memory.
const LINES_MAX: u64 = 4_000_000;
/// Maximum number of records of a trace.
const RECORDS_MAX: u64 = 16_000_000;
/// Longest line, with its end.
const LINE_BYTES_MAX: u64 = 4096;
/// Largest number of pools in a header.
const POOLS_MAX: usize = 1024;
/// Longest duration of a workload: a replay polls the pool once a second.
pub(super) const DURATION_US_MAX: u64 = 366 * 24 * 3_600 * 1_000_000;

impl Trace {
    /// Reads the trace at `path`; `-` is stdin. The first bytes tell whether it is compressed by gzip.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or a line has an error.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        Self::from_input(Input::open(path)?)
    }

    /// Reads a trace from a file that is open.
    ///
    /// # Errors
    ///
    /// The errors of [`Trace::open`].
    pub fn from_input(input: Input) -> Result<Self, TraceError> {
        if input.first().starts_with(&[0x80]) {
            return Err(TraceError::Pickle);
        }
        Self::read(input.into_reader())
    }

    /// Reads a trace from `lines`.
    ///
    /// # Errors
    ///
    /// If it cannot be read, or a line has an error.
    pub fn read(mut lines: impl BufRead) -> Result<Self, TraceError> {
        let mut parser = Parser::default();
        loop {
            let mut bytes = Vec::new();
            // Bounds the memory that a file without line ends takes.
            if (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut bytes)? == 0 {
                return Ok(parser.trace);
            }
            let text = String::from_utf8_lossy(&bytes);
            let text = text.trim_end();
            parser.line += 1;
            let begin = text.chars().take(60).collect();
            parser.add(&bytes, text).map_err(|why| TraceError::Line { line: parser.line, text: begin, why })?;
        }
    }
}

/// A trace while it is read.
#[derive(Default)]
struct Parser {
    /// The part that was read so far.
    trace: Trace,
    /// `true` after the header.
    has_begun: bool,
    /// Number of the last line.
    line: u64,
    pool: u32,
    /// The pool and the bytes of each held buffer.
    held: HashMap<u64, (u32, u64)>,
    held_bytes: u64,
}

impl Parser {
    /// Adds a line, which is passed as bytes, and as text without its end.
    fn add(&mut self, bytes: &[u8], text: &str) -> Result<(), String> {
        let whole = bytes.len() as u64 != LINE_BYTES_MAX || bytes.ends_with(b"\n");
        require(self.line <= LINES_MAX, || format!("a trace has at most {LINES_MAX} lines"))?;
        require(whole, || "too long for a line of a trace".to_owned())?;
        require(std::str::from_utf8(bytes).is_ok(), || "not UTF-8 text".to_owned())?;
        match text.strip_prefix('#') {
            _ if text.is_empty() || text.starts_with("##") => Ok(()),
            Some(setting) if !self.has_begun => self.set(setting.trim()),
            _ => self.perform(text),
        }
    }

    fn set(&mut self, setting: &str) -> Result<(), String> {
        let header = &mut self.trace.header;
        match setting.split_once(' ') {
            Some(("limit", n)) => header.limit = number(n)?,
            Some(("auto_resize", "0")) => header.auto_resize = false,
            Some(("auto_resize", "1")) => header.auto_resize = true,
            Some(("rounder", "noop")) => header.rounding = Rounding::Exact,
            Some(("rounder", "pow2")) => header.rounding = Rounding::Pow2,
            Some(("pools", n)) => {
                header.pools = number(n).unwrap_or(0);
                require((1..=POOLS_MAX).contains(&header.pools), || format!("a trace has 1 to {POOLS_MAX} pools"))?;
            }
            _ => return Err("unknown setting; use limit N, auto_resize 0|1, rounder noop|pow2 or pools N".to_owned()),
        }
        Ok(())
    }

    fn perform(&mut self, text: &str) -> Result<(), String> {
        self.has_begun = true;
        match *text.split(' ').collect::<Vec<_>>() {
            ["a", id, bytes] => self.request(number(id)?, number(bytes)?, UNSPECIFIED_ALIGN),
            ["a", id, bytes, align] => self.request(number(id)?, number(bytes)?, number(align)?),
            ["f", id] => self.put(number(id)?),
            ["r", count, bytes] => self.repeat(number(count)?, number(bytes)?, 0),
            ["s", count, bytes, step] => self.repeat(number(count)?, number(bytes)?, number(step)?),
            ["c"] => self.record(self.pool, UNSPECIFIED_ALIGN, Event::Cleared),
            ["p", index] => {
                self.pool = number(index)?;
                let pools = self.trace.header.pools;
                require((self.pool as usize) < pools, || format!("there is no pool {index}, `# pools {pools}`"))
            }
            ["t", micros] => {
                let now_ns = &mut self.trace.ended_ns;
                *now_ns = now_ns.saturating_add(number::<u64>(micros)?.saturating_mul(1_000));
                require(*now_ns / 1_000 <= DURATION_US_MAX, || "the trace lasts longer than a year".to_owned())
            }
            _ => Err("not a line of a workload (a, f, r, s, c, p or t with the right number of fields)".to_owned()),
        }
    }

    fn request(&mut self, id: u64, bytes: u64, align: usize) -> Result<(), String> {
        let reserved = || format!("buffer {id} is the buffer of `r` and `s` lines; use a smaller number");
        require(id != REPEATED_ID, reserved)?;
        require(!self.held.contains_key(&id), || format!("buffer {id} is held already"))?;
        self.get(id, bytes, align)
    }

    fn repeat(&mut self, count: u64, bytes: u64, step: u64) -> Result<(), String> {
        // Checks the number of records before the first of them takes memory.
        self.check_room(count.saturating_mul(2))?;
        for n in 0..count {
            let bytes = n.checked_mul(step).and_then(|more| bytes.checked_add(more)).ok_or("the sizes exceed 2^64")?;
            self.get(REPEATED_ID, bytes, UNSPECIFIED_ALIGN)?;
            self.put(REPEATED_ID)?;
        }
        Ok(())
    }

    fn get(&mut self, id: u64, bytes: u64, align: usize) -> Result<(), String> {
        self.held_bytes = self.held_bytes.checked_add(bytes).ok_or("the held bytes exceed 2^64")?;
        self.held.insert(id, (self.pool, bytes));
        self.record(self.pool, align, Event::Get { id, bytes, class_bytes: bytes, tag: 0, took_ns: 0 })
    }

    fn put(&mut self, id: u64) -> Result<(), String> {
        let (pool, bytes) = self.held.remove(&id).ok_or_else(|| format!("no buffer {id} is held"))?;
        self.held_bytes -= bytes;
        self.record(pool, UNSPECIFIED_ALIGN, Event::Put { id, in_flight: false })
    }

    fn record(&mut self, pool: u32, align: usize, event: Event) -> Result<(), String> {
        self.check_room(1)?;
        self.trace.records.push(Record { time_ns: self.trace.ended_ns, thread: 0, pool, event });
        self.trace.lines.push((self.line, align));
        Ok(())
    }

    fn check_room(&self, records: u64) -> Result<(), String> {
        let room = RECORDS_MAX - self.trace.records.len() as u64;
        require(records <= room, || format!("the trace has more than {RECORDS_MAX} requests and returns"))
    }
}

/// Fails with the reason unless the condition is met.
fn require(is_met: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if is_met { Ok(()) } else { Err(why()) }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number, or too large"))
}
