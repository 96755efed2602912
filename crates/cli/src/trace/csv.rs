//! A line for each record; a column that a record does not have is empty.

use std::io::{self, Write};

use pinpool_replay::{Event, Recording};

const HEAD: &str = "time_ns,thread,pool,event,id,bytes,class_bytes,tag,took_ns,address,to,failed,place";

/// The columns behind `event`.
#[derive(Default)]
struct Columns {
    id: Option<u64>,
    bytes: Option<u64>,
    class_bytes: Option<u64>,
    tag: Option<String>,
    took_ns: Option<u64>,
    address: Option<u64>,
    to: Option<u64>,
    failed: Option<bool>,
    place: Option<String>,
}

pub(super) fn write(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{HEAD}")?;
    for record in &recording.records {
        let (name, columns) = columns(&record.event, recording);
        let number = |number: Option<u64>| number.map_or_else(String::new, |number| number.to_string());
        let Columns { id, bytes, class_bytes, tag, took_ns, address, to, failed, place } = columns;
        writeln!(
            out,
            "{},{},{},{name},{},{},{},{},{},{},{},{},{}",
            record.time_ns,
            record.thread,
            record.pool,
            number(id),
            number(bytes),
            number(class_bytes),
            tag.unwrap_or_default(),
            number(took_ns),
            address.map_or_else(String::new, |address| format!("{address:#x}")),
            number(to),
            failed.map_or("", |failed| if failed { "1" } else { "0" }),
            place.unwrap_or_default(),
        )?;
    }
    Ok(())
}

fn columns(event: &Event, recording: &Recording) -> (&'static str, Columns) {
    let none = Columns::default();
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let tag_of = |tag: u32| recording.tag(tag).map(quoted);
    match *event {
        Event::Get { id, bytes, class_bytes, tag, took_ns } => (
            "get",
            Columns {
                id: Some(id),
                bytes: Some(bytes),
                class_bytes: Some(class_bytes),
                tag: tag_of(tag),
                took_ns: Some(took_ns),
                ..none
            },
        ),
        Event::Refused { bytes, class_bytes, tag, took_ns } => (
            "refused",
            Columns {
                bytes: Some(bytes),
                class_bytes: Some(class_bytes),
                tag: tag_of(tag),
                took_ns: Some(took_ns),
                ..none
            },
        ),
        Event::Sampled { id, stack } => {
            let place = recording.place(stack).as_deref().map(quoted);
            ("sampled", Columns { id: Some(id), place, ..none })
        }
        Event::Put { id, in_flight: true } => ("put_in_flight", Columns { id: Some(id), ..none }),
        Event::Put { id, in_flight: false } => ("put", Columns { id: Some(id), ..none }),
        Event::Completed { id } => ("completed", Columns { id: Some(id), ..none }),
        Event::Leaked { id } => ("leaked", Columns { id: Some(id), ..none }),
        Event::New { id, address, class_bytes, .. } => {
            ("new", Columns { id: Some(id), address: Some(address), class_bytes: Some(class_bytes), ..none })
        }
        Event::Gone { id } => ("gone", Columns { id: Some(id), ..none }),
        Event::Pin { address, bytes, took_ns, failed } => ("pin", call(address, bytes, took_ns, failed)),
        Event::Unpin { address, bytes, took_ns, failed } => ("unpin", call(address, bytes, took_ns, failed)),
        Event::Move { from, to, bytes, took_ns } => {
            ("move", Columns { address: Some(from), to: Some(to), bytes: Some(bytes), took_ns: Some(took_ns), ..none })
        }
        Event::Limit { from, to } => ("limit", Columns { bytes: Some(from), to: Some(to), ..none }),
        Event::Ceiling { bytes } => ("ceiling", Columns { bytes: Some(bytes), ..none }),
        Event::Cleared => ("clear", none),
        Event::Waited => ("waited", none),
        Event::Missing { records } => ("missing", Columns { bytes: Some(records), ..none }),
        Event::End => ("end", none),
    }
}

fn call(address: u64, bytes: u64, took_ns: u64, failed: bool) -> Columns {
    Columns {
        address: Some(address),
        bytes: Some(bytes),
        took_ns: Some(took_ns),
        failed: Some(failed),
        ..Columns::default()
    }
}
