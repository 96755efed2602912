//! A line for each record; columns that a record does not have are empty.

use std::io::{self, Write};

use pinpool_replay::Recording;
use serde_json::Value;

use super::described;

/// The columns after time, thread, pool and event: fields of events.
const COLUMNS: &str = "id,bytes,class_bytes,tag,took_ns,address,from,to,in_flight,failed,records,place";

pub(super) fn write(recording: &Recording, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "time_ns,thread,pool,event,{COLUMNS}")?;
    for record in &recording.records {
        let (name, fields) = described(&record.event, recording);
        write!(out, "{},{},{},{name}", record.time_ns, record.thread, record.pool)?;
        for column in COLUMNS.split(',') {
            match fields.get(column) {
                None | Some(Value::Null) => write!(out, ",")?,
                Some(Value::String(text)) => write!(out, ",\"{}\"", text.replace('"', "\"\""))?,
                Some(value) => write!(out, ",{value}")?,
            }
        }
        writeln!(out)?;
    }
    Ok(())
}
