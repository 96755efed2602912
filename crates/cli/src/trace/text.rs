//! A recording as text: gets and puts as operations, everything else in comments.
//!
//! A put whose copies were in flight is an `f` where they were over.

use std::io::{self, Write};

use pinpool_replay::{Event, PoolDescription, Recording, TraceOp, Workload};

/// Writes `recording`, of which `workload` is.
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
                // No record is one of these.
                TraceOp::Steps { .. } | TraceOp::Pool { .. } => {}
            }
        }
        if let Some(comment) = comment(&record.event, recording) {
            writeln!(out, "## {comment}, pool {}, thread {}", record.pool, record.thread)?;
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

/// Names are the program's own, and may hold line ends.
pub(super) fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// What is no operation of a text.
fn comment(event: &Event, recording: &Recording) -> Option<String> {
    let failed = |failed: bool| if failed { ", refused" } else { "" };
    Some(match *event {
        Event::Get { tag, took_ns, .. } if tag > 0 || took_ns > 0 => format!("the get took {took_ns} ns, tag {tag}"),
        Event::Get { .. } | Event::Cleared | Event::Put { in_flight: false, .. } => return None,
        Event::Sampled { id, stack } => {
            format!("sampled: memory {id} was got at {}", one_line(&recording.place(stack).unwrap_or_default()))
        }
        Event::Refused { bytes, took_ns, tag, .. } => {
            format!("refused: a get of {bytes} bytes after {took_ns} ns, tag {tag}")
        }
        Event::Put { id, .. } => format!("put in flight: memory {id}"),
        Event::Completed { id } => format!("copies over: memory {id}"),
        Event::Leaked { id } => format!("leaked: memory {id}"),
        Event::New { id, address, class_bytes, from_source } => {
            let kind = if from_source { "" } else { ", not pinned" };
            format!("new: memory {id} of {class_bytes} bytes at {address:#x}{kind}")
        }
        Event::Gone { id } => format!("gone: memory {id}"),
        Event::Pin { address, bytes, took_ns, failed: refused } => {
            format!("pin: {bytes} bytes at {address:#x} in {took_ns} ns{}", failed(refused))
        }
        Event::Unpin { address, bytes, took_ns, failed: refused } => {
            format!("unpin: {bytes} bytes at {address:#x} in {took_ns} ns{}", failed(refused))
        }
        Event::Move { from, to, bytes, took_ns } => {
            format!("move: {bytes} bytes from {from:#x} to {to:#x} in {took_ns} ns")
        }
        Event::Limit { from, to } => format!("limit: from {from} to {to}"),
        Event::Ceiling { bytes: u64::MAX } => "ceiling: none".to_owned(),
        Event::Ceiling { bytes } => format!("ceiling: {bytes} bytes"),
        Event::Missing { records } => format!("missing: {records} records"),
        Event::End => "end".to_owned(),
        Event::Waited => "the next get of this thread waited".to_owned(),
    })
}
