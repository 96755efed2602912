//! A whole trace: read once, checked and measured, so that it can be replayed under many settings.
//!
//! Owns what does not depend on a pool: which names are held, how many gets there are, and the peak of the bytes requested.
//! Ignores the settings of the header and the `p` lines, which are for the comparison with TensorFlow's pool: a workload has
//! one pool, and its limit and rounding are settings of the replay.

use std::collections::HashMap;
use std::path::Path;

use super::format::{TraceError, TraceOp, TraceReader};

/// Longest duration of a workload: a replay polls the pool once a second.
const MAX_DURATION_US: u64 = 366 * 24 * 3_600 * 1_000_000;

/// A trace in which every put has its get.
#[derive(Debug, Clone, Default)]
pub struct Workload {
    lines: Vec<(u64, TraceOp)>,
    totals: WorkloadTotals,
}

/// Totals of the lines read so far.
#[derive(Debug, Clone, Default)]
struct WorkloadTotals {
    held_bytes: HashMap<u64, u64>,
    requested_bytes: u64,
    peak_requested_bytes: u64,
    gets: u64,
    duration_us: u64,
}

impl Workload {
    /// Reads the trace at `path`, plain or compressed by gzip.
    ///
    /// # Errors
    ///
    /// As [`Workload::read`]; also if the file cannot be opened.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        Self::read(&mut TraceReader::open(path)?)
    }

    /// Reads all of `reader`.
    ///
    /// # Errors
    ///
    /// If it cannot be read, gets a name that is held, puts one that is not, or lasts longer than a year.
    pub fn read(reader: &mut TraceReader) -> Result<Self, TraceError> {
        let mut workload = Self::default();
        while let Some(operation) = reader.next() {
            let operation = operation?;
            let line = reader.line();
            workload.totals.add(operation).map_err(|why| error_at(line, operation, why))?;
            workload.lines.push((line, operation));
        }
        Ok(workload)
    }

    /// The operations, each with the number of its line.
    pub fn lines(&self) -> &[(u64, TraceOp)] {
        &self.lines
    }

    /// Time of the whole workload; 0 without `t` lines.
    pub fn duration_us(&self) -> u64 {
        self.totals.duration_us
    }

    /// Gets of more than zero bytes.
    pub fn gets(&self) -> u64 {
        self.totals.gets
    }

    /// Peak of the bytes requested and not put back, without rounding.
    pub fn peak_requested_bytes(&self) -> u64 {
        self.totals.peak_requested_bytes
    }
}

/// An error at `operation`.
pub(super) fn error_at(line: u64, operation: TraceOp, why: String) -> TraceError {
    TraceError::Line { line, text: format!("{operation:?}"), why }
}

impl WorkloadTotals {
    fn add(&mut self, operation: TraceOp) -> Result<(), String> {
        match operation {
            TraceOp::Get { id, bytes, .. } => {
                self.request(bytes as u64)?;
                if self.held_bytes.insert(id, bytes as u64).is_some() {
                    return Err(format!("buffer {id} is held already"));
                }
            }
            TraceOp::Put { id } => {
                self.requested_bytes -= self.held_bytes.remove(&id).ok_or_else(|| format!("no buffer {id} is held"))?;
            }
            TraceOp::Steps { count, bytes, step } => {
                let Some(more) = count.checked_sub(1) else { return Ok(()) };
                let last = (step as u64).checked_mul(more).and_then(|grown| grown.checked_add(bytes as u64));
                let last = last.ok_or("the sizes pass 2^64")?;
                self.request(last)?;
                self.requested_bytes -= last;
                // `request` counted one get. Only the first can be empty, unless the size does not grow.
                let empty = if bytes > 0 {
                    0
                } else if step > 0 {
                    1
                } else {
                    count
                };
                let more = count.saturating_sub(empty) - u64::from(last > 0);
                self.gets = self.gets.checked_add(more).ok_or("the gets pass 2^64")?;
            }
            TraceOp::Advance { micros } => {
                self.duration_us = self.duration_us.saturating_add(micros);
                if self.duration_us > MAX_DURATION_US {
                    return Err("the clock passes a year".to_owned());
                }
            }
            TraceOp::Clear | TraceOp::Pool { .. } => {}
        }
        Ok(())
    }

    fn request(&mut self, bytes: u64) -> Result<(), String> {
        self.requested_bytes = self.requested_bytes.checked_add(bytes).ok_or("the bytes held pass 2^64")?;
        self.peak_requested_bytes = self.peak_requested_bytes.max(self.requested_bytes);
        self.gets = self.gets.checked_add(u64::from(bytes > 0)).ok_or("the gets pass 2^64")?;
        Ok(())
    }
}
