//! A recording as text: requests and returns as operations, everything else in comments.
//!
//! If a buffer is returned while copies are in flight, its `f` is placed at the end of the copies.

use std::collections::HashMap;
use std::io::{self, Write};

use pinpool_replay::{Event, PoolDescription, Recording};

use serde_json::{Map, Value};

use pinpool_cli::terminal::one_line;

pub(super) fn write(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    head(recording, out)?;
    // The name of each held buffer, and whether it has copies in flight.
    let (mut held, mut last_name) = (HashMap::new(), 0_u64);
    let (mut pool, mut time_us) = (0, recording.records.first().map_or(0, |record| record.time_ns / 1000));
    for record in &recording.records {
        let key = record.event.buffer().map(|id| (record.pool, id));
        let freed = match record.event {
            Event::Put { in_flight: true, .. } => {
                key.and_then(|key| held.get_mut(&key)).into_iter().for_each(|(_, in_flight)| *in_flight = true);
                None
            }
            Event::Completed { .. } if !key.and_then(|key| held.get(&key)).is_some_and(|(_, in_flight)| *in_flight) => {
                None
            }
            Event::Get { .. } | Event::Put { .. } | Event::Completed { .. } | Event::Gone { .. } => {
                key.and_then(|key| held.remove(&key))
            }
            _ => None,
        };
        let mut lines: Vec<_> = freed.map(|(name, _)| format!("f {name}")).into_iter().collect();
        match (record.event, key) {
            (Event::Get { bytes, .. }, Some(key)) => {
                last_name += 1;
                held.insert(key, (last_name, false));
                lines.push(format!("a {last_name} {bytes}"));
            }
            (Event::Cleared, _) => lines.push("c".to_owned()),
            _ => {}
        }
        let now_us = (record.time_ns / 1000).max(time_us);
        if !lines.is_empty() && now_us > time_us {
            writeln!(out, "t {}", now_us - time_us)?;
            time_us = now_us;
        }
        if !lines.is_empty() && record.pool != pool {
            pool = record.pool;
            writeln!(out, "p {pool}")?;
        }
        lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
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
    let rounder = fact("PINPOOL_ROUNDING").filter(|rounding| matches!(*rounding, "pow2" | "exact"));
    for (name, value) in [
        ("limit", fact("PINPOOL_POOL_SIZE_LIMIT")),
        ("auto_resize", fact("PINPOOL_AUTO_RESIZE")),
        ("rounder", rounder.map(|rounding| if rounding == "exact" { "noop" } else { rounding })),
    ] {
        value.map_or(Ok(()), |value| writeln!(out, "# {name} {value}"))?;
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

/// Returns the name of an event, and its fields with the names of the tag and of the place of a sampled request.
fn described(event: &Event, recording: &Recording) -> (String, Map<String, Value>) {
    let (name, mut fields) = match serde_json::to_value(event) {
        Ok(Value::Object(mut event)) => match event.iter_mut().next() {
            Some((name, Value::Object(fields))) => (name.clone(), std::mem::take(fields)),
            _ => Default::default(),
        },
        Ok(Value::String(name)) => (name, Map::new()),
        _ => Default::default(),
    };
    let number = |value: Option<&Value>| value.and_then(Value::as_u64).and_then(|number| u32::try_from(number).ok());
    if let Some(tag) = number(fields.get("tag")) {
        fields.insert("tag".to_owned(), recording.tag(tag).into());
    }
    if let Some(stack) = number(fields.get("stack")) {
        fields.insert("place".to_owned(), recording.place(stack).into());
    }
    (name, fields)
}
