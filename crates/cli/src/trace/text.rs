//! A recording as text: requests and returns as operations, everything else in comments.
//!
//! The `f` of a buffer in flight is placed at the end of its copies.

use std::io::{self, Write};

use pinpool_replay::{Event, PoolDescription, Recording, TraceOp, Workload};

use super::described;
use pinpool_cli::terminal::one_line;

/// Writes `recording` and its `workload`.
pub(super) fn write(recording: &Recording, workload: &Workload, out: &mut dyn Write) -> io::Result<()> {
    head(recording, out)?;
    let mut operations = workload.lines().iter().peekable();
    let mut pool = 0;
    for (line, record) in (1..).zip(&recording.records) {
        while let Some((_, operation)) = operations.next_if(|(of, _)| *of == line) {
            if record.pool != pool && !matches!(operation, TraceOp::Advance { .. }) {
                pool = record.pool;
                writeln!(out, "p {pool}")?;
            }
            match *operation {
                TraceOp::Get { id, bytes, .. } => writeln!(out, "a {id} {bytes}")?,
                TraceOp::Put { id } => writeln!(out, "f {id}")?,
                TraceOp::Clear => writeln!(out, "c")?,
                TraceOp::Advance { micros } => writeln!(out, "t {micros}")?,
                // Recordings have none of these.
                TraceOp::Steps { .. } | TraceOp::Pool { .. } => {}
            }
        }
        let is_operation = matches!(
            record.event,
            Event::Get { tag: 0, took_ns: 0, .. } | Event::Cleared | Event::Put { in_flight: false, .. }
        );
        if !is_operation {
            let (name, fields) = described(&record.event, recording);
            let fields: Vec<_> = fields.iter().map(|(name, value)| format!("{name}={value}")).collect();
            writeln!(out, "## {name}: {}, pool {}, thread {}", fields.join(" "), record.pool, record.thread)?;
        }
    }
    Ok(())
}

fn head(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    let first = recording.pools.first();
    let fact = |name: &str| first.and_then(|pool| pool.fact(name));
    if let Some(limit) = fact("PINPOOL_POOL_SIZE_LIMIT") {
        writeln!(out, "# limit {limit}")?;
    }
    if let Some(on) = fact("PINPOOL_AUTO_RESIZE") {
        writeln!(out, "# auto_resize {on}")?;
    }
    match fact("PINPOOL_ROUNDING") {
        Some("pow2") => writeln!(out, "# rounder pow2")?,
        Some("exact") => writeln!(out, "# rounder noop")?,
        _ => {}
    }
    let pools = recording.records.iter().map(|record| record.pool).max().map_or(1, |most| u64::from(most) + 1);
    writeln!(out, "# pools {pools}")?;
    for PoolDescription { number, facts } in &recording.pools {
        for (name, value) in facts {
            writeln!(out, "## pool {number}: {}={}", one_line(name), one_line(value))?;
        }
    }
    for (number, name) in &recording.tags {
        writeln!(out, "## tag {number}: {}", one_line(name))?;
    }
    Ok(())
}
