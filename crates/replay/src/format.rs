//! The text format of traces: one item a line, fields separated by one space, numbers decimal.
//!
//! [`TraceReader`] checks each line and yields the records of one thread, as a recording contains them.
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

use std::collections::HashMap;
use std::io::{self, BufRead, Read};
use std::path::Path;

use super::input::Input;
use pinpool::unstable::Rounding;
use pinpool_observe::record::{Event, Record};

/// The alignment of a request that names none.
pub(crate) const DEFAULT_ALIGN: usize = 4;
/// The buffer of `r` and `s` lines; no other line may name it.
const STEPS_ID: u64 = u64::MAX;

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
const MAX_LINES: u64 = 4_000_000;
/// Largest sum of the counts of `r` and `s` lines, which takes minutes to replay.
const MAX_REPEATS: u64 = 1_000_000_000;
/// Largest number of pools in a header.
const MAX_POOLS: usize = 1024;
/// Longest duration of a workload: a replay polls the pool once a second.
pub(super) const MAX_DURATION_US: u64 = 366 * 24 * 3_600 * 1_000_000;

/// Reads a trace line by line: the header first, then its requests, returns and clears as an iterator.
pub struct TraceReader {
    lines: Box<dyn BufRead>,
    /// The settings in the header.
    pub header: TraceHeader,
    /// Number of the last line.
    line: u64,
    /// The last line.
    text: String,
    /// `true` if its operation was not performed yet.
    is_pending: bool,
    repeats: u64,
    steps: Steps,
    time_ns: u64,
    pool: u32,
    /// Alignment of the last request.
    pub align: usize,
    /// The pool and the bytes of each held buffer.
    held: HashMap<u64, (u32, u64)>,
    held_bytes: u64,
}

/// The requests of an `r` or `s` line that are still to come.
#[derive(Default)]
struct Steps {
    left: u64,
    /// Bytes of the next request; `None` if they exceed 2^64.
    bytes: Option<u64>,
    step: u64,
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
        let mut reader = Self {
            lines: Box::new(lines),
            header: TraceHeader { limit: 100, auto_resize: true, rounding: Rounding::Exact, pools: 1 },
            line: 0,
            text: String::new(),
            is_pending: false,
            repeats: 0,
            steps: Steps::default(),
            time_ns: 0,
            pool: 0,
            align: DEFAULT_ALIGN,
            held: HashMap::new(),
            held_bytes: 0,
        };
        while reader.next_line()? {
            let Some(setting) = reader.text.strip_prefix('#').map(|setting| setting.trim().to_owned()) else {
                reader.is_pending = true;
                break;
            };
            reader.set(&setting).map_err(|why| reader.error_here(why))?;
        }
        Ok(reader)
    }

    /// An error at the last line, for the code that plays the trace.
    pub fn error_here(&self, why: String) -> TraceError {
        TraceError::Line { line: self.line, text: self.text.chars().take(60).collect(), why }
    }

    /// Reads the next line that is neither empty nor a comment into `text`; `false` at the end.
    fn next_line(&mut self) -> Result<bool, TraceError> {
        loop {
            let mut bytes = Vec::new();
            // Bounds the memory that a file without line ends takes.
            let limit = 4096;
            let read = (&mut self.lines).take(limit).read_until(b'\n', &mut bytes)?;
            if read == 0 {
                return Ok(false);
            }
            self.line += 1;
            self.text = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            let why = if self.line > MAX_LINES {
                format!("a trace has at most {MAX_LINES} lines")
            } else if read as u64 == limit && !bytes.ends_with(b"\n") {
                "too long for a line of a trace".to_owned()
            } else if std::str::from_utf8(&bytes).is_err() {
                "not UTF-8 text".to_owned()
            } else if self.text.is_empty() || self.text.starts_with("##") {
                continue;
            } else {
                return Ok(true);
            };
            return Err(self.error_here(why));
        }
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

    /// A record at the current time.
    pub(super) fn record(&self, pool: u32, event: Event) -> Record {
        Record { time_ns: self.time_ns, thread: 0, pool, event }
    }

    /// The next request or return of the last `r` or `s` line; `None` at its end.
    fn next_step(&mut self) -> Result<Option<Record>, String> {
        if self.held.contains_key(&STEPS_ID) {
            return self.put(STEPS_ID);
        }
        let Some(left) = self.steps.left.checked_sub(1) else { return Ok(None) };
        let bytes = self.steps.bytes.ok_or("the sizes exceed 2^64")?;
        self.steps = Steps { left, bytes: bytes.checked_add(self.steps.step), ..self.steps };
        self.get(STEPS_ID, bytes)
    }

    /// Performs the operation of the current text line.
    fn perform(&mut self) -> Result<Option<Record>, String> {
        let text = self.text.clone();
        match *text.split(' ').collect::<Vec<_>>() {
            ["a", id, bytes] => self.request(number(id)?, number(bytes)?, DEFAULT_ALIGN),
            ["a", id, bytes, align] => self.request(number(id)?, number(bytes)?, number(align)?),
            ["f", id] => self.put(number(id)?),
            ["r", count, bytes] => self.repeat(number(count)?, number(bytes)?, 0),
            ["s", count, bytes, step] => self.repeat(number(count)?, number(bytes)?, number(step)?),
            ["c"] => Ok(Some(self.record(self.pool, Event::Cleared))),
            ["p", index] => {
                let pool = number(index)?;
                if pool as usize >= self.header.pools {
                    return Err(format!("there is no pool {pool}, `# pools {}`", self.header.pools));
                }
                self.pool = pool;
                Ok(None)
            }
            ["t", micros] => {
                self.time_ns = self.time_ns.saturating_add(number::<u64>(micros)?.saturating_mul(1_000));
                let is_long = self.time_ns / 1_000 > MAX_DURATION_US;
                if is_long { Err("the trace lasts longer than a year".to_owned()) } else { Ok(None) }
            }
            _ => Err("unknown operation; use a, f, r, s, c, p or t with the right number of fields".to_owned()),
        }
    }

    fn request(&mut self, id: u64, bytes: u64, align: usize) -> Result<Option<Record>, String> {
        if id == STEPS_ID {
            return Err(format!("buffer {id} is the buffer of `r` and `s` lines; use a smaller number"));
        }
        if self.held.contains_key(&id) {
            return Err(format!("buffer {id} is held already"));
        }
        self.align = align;
        self.get(id, bytes)
    }

    fn repeat(&mut self, count: u64, bytes: u64, step: u64) -> Result<Option<Record>, String> {
        self.repeats = self.repeats.saturating_add(count);
        if self.repeats > MAX_REPEATS {
            return Err(format!("the counts of all `r` and `s` lines add up to at most {MAX_REPEATS}"));
        }
        (self.align, self.steps) = (DEFAULT_ALIGN, Steps { left: count, bytes: Some(bytes), step });
        self.next_step()
    }

    fn get(&mut self, id: u64, bytes: u64) -> Result<Option<Record>, String> {
        self.held_bytes = self.held_bytes.checked_add(bytes).ok_or("the held bytes exceed 2^64")?;
        self.held.insert(id, (self.pool, bytes));
        Ok(Some(self.record(self.pool, Event::Get { id, bytes, class_bytes: bytes, tag: 0, took_ns: 0 })))
    }

    fn put(&mut self, id: u64) -> Result<Option<Record>, String> {
        let (pool, bytes) = self.held.remove(&id).ok_or_else(|| format!("no buffer {id} is held"))?;
        self.held_bytes -= bytes;
        Ok(Some(self.record(pool, Event::Put { id, in_flight: false })))
    }

    fn advance(&mut self) -> Result<Option<Record>, TraceError> {
        loop {
            let record = if std::mem::take(&mut self.is_pending) { self.perform() } else { self.next_step() };
            if let Some(record) = record.map_err(|why| self.error_here(why))? {
                return Ok(Some(record));
            }
            self.is_pending = self.next_line()?;
            if !self.is_pending {
                return Ok(None);
            }
        }
    }
}

impl Iterator for TraceReader {
    type Item = Result<Record, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.advance().transpose()
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number, or too large"))
}
