//! The log of RMM's `logging_resource_adaptor`: `Thread,Time,Action,Pointer,Size,Stream`.
//!
//! An allocation is a get, a free a put; addresses are the ids of the memory, and sizes are the classes.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, Read};

use super::format::TraceError;
use pinpool_observe::record::{Event, PoolDescription, Record, Recording};

/// What the file begins with.
pub(super) const HEAD: &str = "Thread,Time,Action,Pointer,Size,Stream";
/// Most lines.
const LINES_MAX: u64 = 16_000_000;
/// Longest line.
const LINE_BYTES_MAX: u64 = 4096;
const DAY_NS: u64 = 24 * 3600 * 1_000_000_000;
/// Threads write their lines at most so much later than others whose times are later.
const LATE_NS: u64 = 3600 * 1_000_000_000;

pub(super) fn read(mut lines: impl BufRead) -> Result<Recording, TraceError> {
    let facts = vec![("backend".to_owned(), "rmm".to_owned())];
    let mut recording = Recording { pools: vec![PoolDescription { number: 0, facts }], ..Recording::default() };
    let mut threads = HashMap::new();
    // A line of the day before the first is possible, too.
    let (mut line, mut begun_ns, mut last_ns, mut days_ns) = (0_u64, None, 0, DAY_NS);
    loop {
        let mut text = Vec::new();
        let read = (&mut lines).take(LINE_BYTES_MAX).read_until(b'\n', &mut text)?;
        if read == 0 {
            // In the file's order where times are equal.
            recording.records.sort_by_key(|record| record.time_ns);
            let begun_ns = begun_ns.unwrap_or(0);
            recording.records.iter_mut().for_each(|record| record.time_ns -= begun_ns);
            recording.warning = unmatched(&recording.records);
            return Ok(recording);
        }
        line += 1;
        let text = String::from_utf8_lossy(&text);
        let text = text.trim_end();
        let fail = |why: &str| TraceError::Line { line, text: text.chars().take(60).collect(), why: why.to_owned() };
        if line > LINES_MAX {
            return Err(fail(&format!("a log of RMM has at most {LINES_MAX} lines")));
        }
        if text.is_empty() || text == HEAD {
            continue;
        }
        let fields: Vec<&str> = text.split(',').map(|field| field.trim().trim_matches('"')).collect();
        let [thread, time, action, pointer, size, _stream] = fields[..] else {
            return Err(fail(&format!("not the six fields {HEAD}")));
        };
        let of_day_ns = time_of_day_ns(time).ok_or_else(|| fail("the time is not HH:MM:SS.micros"))?;
        if of_day_ns + DAY_NS / 2 < last_ns {
            // Past midnight.
            days_ns = days_ns.saturating_add(DAY_NS);
        } else if of_day_ns > last_ns + DAY_NS - LATE_NS && begun_ns.is_some() {
            // This line is of another thread, from before midnight.
            days_ns = days_ns.saturating_sub(DAY_NS);
        }
        last_ns = of_day_ns;
        let time_ns = days_ns.saturating_add(of_day_ns);
        begun_ns = Some(begun_ns.map_or(time_ns, |begun_ns: u64| begun_ns.min(time_ns)));
        let bytes = size.parse().map_err(|_| fail("the size is no number"))?;
        let hex = pointer.trim_start_matches("0x");
        let address = || u64::from_str_radix(hex, 16).map_err(|_| fail("the pointer is no hexadecimal number"));
        let next = u32::try_from(threads.len()).unwrap_or(u32::MAX);
        let thread = *threads.entry(thread.to_owned()).or_insert(next);
        let event = match action {
            "allocate" => Event::Get { id: address()?, bytes, class_bytes: bytes, tag: 0, took_ns: 0 },
            "free" | "deallocate" => Event::Put { id: address()?, in_flight: false },
            "allocate failure" => Event::Refused { bytes, class_bytes: bytes, tag: 0, took_ns: 0 },
            _ => return Err(fail("the action is neither allocate, allocate failure nor free")),
        };
        recording.records.push(Record { time_ns, thread, pool: 0, event });
    }
}

/// How many gets and puts do not match each other, as of a log that begins late or has lost lines; `None` if all do.
fn unmatched(records: &[Record]) -> Option<String> {
    let mut held = HashSet::new();
    let (mut twice, mut unknown) = (0_u64, 0_u64);
    for record in records {
        match record.event {
            Event::Get { id, bytes: 1.., .. } => twice += u64::from(!held.insert(id)),
            Event::Get { id, .. } => _ = held.insert(id),
            Event::Put { id, .. } => unknown += u64::from(!held.remove(&id)),
            _ => {}
        }
    }
    let told = [
        (twice, "allocations of a pointer that is held already (as if it had been freed before)"),
        (unknown, "frees of a pointer that is not held (left out)"),
    ];
    let told: Vec<_> =
        told.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    (!told.is_empty()).then(|| format!("the log of RMM is not whole: {}", told.join(", ")))
}

/// `14:03:59.123456`, or with a colon before the microseconds as older versions print it.
fn time_of_day_ns(text: &str) -> Option<u64> {
    let mut parts = text.split([':', '.']);
    let mut number = |most: u64| parts.next()?.parse().ok().filter(|&number: &u64| number <= most);
    let seconds = number(23)? * 3600 + number(59)? * 60 + number(60)?;
    let micros = match parts.next() {
        None => 0,
        Some(digits) => format!("{digits:0<6}").get(..6)?.parse().ok()?,
    };
    Some((seconds * 1_000_000 + micros) * 1_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_and_frees_are_gets_and_puts_past_midnight_too() {
        let log = "Thread,Time,Action,Pointer,Size,Stream\n\
                   7,23:59:59.999000,allocate,0x7f00,1024,0x0\n\
                   8,00:00:00:001000,free,0x7f00,1024,0x0\n\
                   8,00:00:00:001500,allocate failure,0x0,99,0x0\n";
        let recording = read(log.as_bytes()).unwrap();
        let times: Vec<_> = recording.records.iter().map(|record| (record.time_ns, record.thread)).collect();
        assert_eq!(times, [(0, 0), (2_000_000, 1), (2_500_000, 1)]);
        assert_eq!(
            recording.records[0].event,
            Event::Get { id: 0x7f00, bytes: 1024, class_bytes: 1024, tag: 0, took_ns: 0 }
        );
        assert_eq!(recording.records[1].event, Event::Put { id: 0x7f00, in_flight: false });
        assert_eq!(recording.records[2].event, Event::Refused { bytes: 99, class_bytes: 99, tag: 0, took_ns: 0 });
    }

    #[test]
    fn a_line_that_is_none_is_named() {
        let cases = [
            ("1,2", "six fields"),
            ("1,25:00:00.0,allocate,0x1,1,0", "HH:MM:SS"),
            ("1,01:00:00.0,allocate,zz,1,0", "hexadecimal"),
            ("1,01:00:00.0,allocate,0x1,many,0", "size"),
            ("1,01:00:00.0,resize,0x1,1,0", "neither"),
        ];
        for (line, why) in cases {
            let error = read(format!("{HEAD}\n{line}\n").as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("line 2:") && error.contains(why), "{error}");
        }
    }
}
