//! Trace events as JSON: a track of bytes for each pool, and a slice of its thread for each driver call and slow request.

use std::collections::BTreeSet;
use std::io::{self, Write};

use pinpool_observe::diagnosis::Snapshot;
use pinpool_observe::record::TimedSnapshot;
use pinpool_replay::{Event, Record, Recording};
use serde_json::{Value, json};

use super::{described, name_of};

pub(super) fn write(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    let mut events = Events { out, is_first: true };
    events.out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
    let tracks: BTreeSet<_> = recording.records.iter().map(|record| (record.pool, record.thread)).collect();
    let mut named = BTreeSet::new();
    for (pool, thread) in tracks {
        if named.insert(pool) {
            let name = recording.pool(pool).map_or_else(|| format!("pool {pool}"), name_of);
            events.add(&json!({"ph": "M", "pid": pool, "tid": 0, "name": "process_name", "args": {"name": name}}))?;
        }
        let name = format!("thread {thread}");
        events.add(&json!({"ph": "M", "pid": pool, "tid": thread, "name": "thread_name", "args": {"name": name}}))?;
    }
    for slice in recording.records.iter().filter_map(|record| slice(record, recording)) {
        events.add(&slice)?;
    }
    for TimedSnapshot { time_ns, pool, snapshot, .. } in &recording.snapshots {
        let Snapshot { used_bytes, in_flight_bytes, idle_bytes, held_bytes, .. } = **snapshot;
        let args = json!({"in use": used_bytes - in_flight_bytes.min(used_bytes), "in flight": in_flight_bytes, "idle": idle_bytes});
        events.add(&json!({"ph": "C", "pid": pool, "ts": micros(*time_ns), "name": "buffer bytes", "args": args}))?;
        let args = json!({"pinned": held_bytes});
        events.add(&json!({"ph": "C", "pid": pool, "ts": micros(*time_ns), "name": "pinned bytes", "args": args}))?;
    }
    events.out.write_all(b"\n]}\n")
}

struct Events<'a> {
    out: &'a mut dyn Write,
    is_first: bool,
}

impl Events<'_> {
    fn add(&mut self, event: &Value) -> io::Result<()> {
        let comma = if std::mem::take(&mut self.is_first) { "" } else { "," };
        write!(self.out, "{comma}\n{event}")
    }
}

fn micros(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// The event of a record that is more than a change of bytes: a slice or an instant.
fn slice(record: &Record, recording: &Recording) -> Option<Value> {
    let Record { time_ns, thread, pool, event } = *record;
    if event.buffer().is_some()
        && !matches!(event, Event::Get { took_ns: 1.., .. } | Event::Sampled { .. } | Event::Leaked { .. })
    {
        return None;
    }
    let (name, fields) = described(&event, recording);
    // A record has the time of the end.
    Some(match fields.get("took_ns").and_then(Value::as_u64) {
        Some(took_ns) => {
            let begun = micros(time_ns.saturating_sub(took_ns));
            json!({"ph": "X", "pid": pool, "tid": thread, "ts": begun, "dur": micros(took_ns), "name": name, "args": fields})
        }
        None => {
            json!({"ph": "i", "s": "p", "pid": pool, "tid": thread, "ts": micros(time_ns), "name": name, "args": fields})
        }
    })
}
