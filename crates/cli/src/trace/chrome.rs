//! Trace events as JSON: a track of bytes for each pool, calls of the back-end and gets that took time as slices of their threads.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

use pinpool_replay::{Event, Record, Recording, Usage};
use serde_json::{Value, json};

use super::name_of;

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
    let mut usages: BTreeMap<u32, (Usage, [u64; 4])> = BTreeMap::new();
    for record in &recording.records {
        if let Some(slice) = slice(record, recording) {
            events.add(&slice)?;
        }
        let (usage, shown) = usages.entry(record.pool).or_default();
        usage.apply(record);
        let now = [usage.in_use_bytes, usage.in_flight_bytes, usage.idle_bytes, usage.pinned_bytes];
        if now != *shown {
            *shown = now;
            let args = json!({"in use": now[0], "in flight": now[1], "idle": now[2]});
            events.add(&json!({"ph": "C", "pid": record.pool, "ts": micros(record.time_ns), "name": "buffer bytes", "args": args}))?;
            let args = json!({"pinned": now[3]});
            events.add(&json!({"ph": "C", "pid": record.pool, "ts": micros(record.time_ns), "name": "pinned bytes", "args": args}))?;
        }
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

/// What a record is beside a change of bytes.
fn slice(record: &Record, recording: &Recording) -> Option<Value> {
    let Record { time_ns, thread, pool, event } = *record;
    // Times are those of the end.
    let took = |name: &str, took_ns: u64, args: Value| {
        let begun = micros(time_ns.saturating_sub(took_ns));
        json!({"ph": "X", "pid": pool, "tid": thread, "ts": begun, "dur": micros(took_ns), "name": name, "args": args})
    };
    let moment = |name: &str, args: Value| json!({"ph": "i", "s": "p", "pid": pool, "tid": thread, "ts": micros(time_ns), "name": name, "args": args});
    let call = |name: &str, address: u64, bytes: u64, took_ns: u64, failed: bool| {
        took(name, took_ns, json!({"bytes": bytes, "address": format!("{address:#x}"), "failed": failed}))
    };
    Some(match event {
        Event::Get { id, bytes, class_bytes, tag, took_ns } if took_ns > 0 => {
            took("get", took_ns, json!({"memory": id, "bytes": bytes, "class": class_bytes, "tag": recording.tag(tag)}))
        }
        Event::Refused { bytes, class_bytes, tag, took_ns } => {
            took("refused get", took_ns, json!({"bytes": bytes, "class": class_bytes, "tag": recording.tag(tag)}))
        }
        Event::Pin { address, bytes, took_ns, failed } => call("pin", address, bytes, took_ns, failed),
        Event::Unpin { address, bytes, took_ns, failed } => call("unpin", address, bytes, took_ns, failed),
        Event::Move { from, bytes, took_ns, .. } => call("move", from, bytes, took_ns, false),
        Event::Limit { from, to } => moment("limit", json!({"from": from, "to": to})),
        Event::Ceiling { bytes } => moment("ceiling", json!({"bytes": bytes})),
        Event::Missing { records } => moment("missing records", json!({"records": records})),
        Event::Leaked { id } => moment("leaked", json!({"memory": id})),
        Event::Cleared => moment("clear", json!({})),
        Event::End => moment("end", json!({})),
        Event::Sampled { id, stack } => moment("sampled get", json!({"memory": id, "place": recording.place(stack)})),
        Event::Get { .. }
        | Event::Put { .. }
        | Event::Completed { .. }
        | Event::New { .. }
        | Event::Gone { .. }
        | Event::Waited => {
            return None;
        }
    })
}
