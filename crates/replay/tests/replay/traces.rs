//! Traces as text: the operations, the counts of a workload, and line numbers in errors.

use pinpool::Rounding;
use pinpool_replay::{Event, Record, Trace, TraceError, TraceHeader, Workload};

fn read(text: &str) -> Result<(TraceHeader, Vec<Record>), TraceError> {
    let trace = Trace::read(text.as_bytes())?;
    Ok((trace.header, trace.records))
}

fn workload(text: &str) -> Result<Workload, TraceError> {
    Workload::of_trace(Trace::read(text.as_bytes())?)
}

#[test]
fn a_trace_is_read_as_written() {
    let text = "## about\n# limit 7\n# auto_resize 0\n# rounder pow2\n# pools 2\n\na 1 48\n## between\na 2 7 64\nf 1\nr 2 9\ns 2 8 4\nc\np 1\nt 50\nf 2\na 1 0\n";
    let (header, records) = read(text).unwrap();
    assert_eq!(header, TraceHeader { limit: 7, auto_resize: false, rounding: Rounding::Pow2, pools: 2 });
    let read: Vec<_> = records
        .iter()
        .map(|record| match record.event {
            Event::Get { bytes, .. } => ('a', record.pool, record.time_ns, bytes),
            Event::Put { .. } => ('f', record.pool, record.time_ns, 0),
            _ => ('c', record.pool, record.time_ns, 0),
        })
        .collect();
    let repeated = [9, 9, 8, 12].iter().flat_map(|&bytes| [('a', 0, 0, bytes), ('f', 0, 0, 0)]);
    let first = [('a', 0, 0, 48), ('a', 0, 0, 7), ('f', 0, 0, 0)].into_iter();
    let last = [('c', 0, 0, 0), ('f', 0, 50_000, 0), ('a', 1, 50_000, 0)];
    assert_eq!(read, first.chain(repeated).chain(last).collect::<Vec<_>>());
}

#[test]
fn an_empty_trace_has_the_default_header_and_no_records() {
    let (header, records) = read("").unwrap();
    assert_eq!(header, TraceHeader { limit: 100, auto_resize: true, rounding: Rounding::Exact, pools: 1 });
    assert!(records.is_empty());
}

#[test]
fn syntax_errors_are_reported_with_their_line() {
    for (text, line) in [
        ("a 1 5\nx 2\n", "line 2: `x 2`"),
        ("a 1\n", "line 1"),
        ("# pools 0\n", "line 1"),
        ("# size 5\n", "line 1"),
        ("a 1 99999999999999999999\n", "line 1"),
        ("f -1\n", "line 1"),
    ] {
        let error = read(text).unwrap_err().to_string();
        assert!(error.contains(line), "{error}");
    }
}

#[test]
fn requests_and_the_peak_match_the_trace() {
    let workload = workload("# limit 3\na 1 10\na 2 0\nt 5\nf 1\na 1 30\na 3 5\nf 3\nf 1\nf 2\n").unwrap();
    assert_eq!((workload.requests, workload.peak_requested_bytes()), (3, 35));
}

#[test]
fn steps_count_as_their_requests() {
    for (text, gets, peak_requested_bytes) in [
        ("r 4 9\n", 4, 9),
        ("s 4 0 2\n", 3, 6),
        ("s 4 1 2\n", 4, 7),
        ("r 4 0\n", 0, 0),
        ("r 0 7\n", 0, 0),
        ("s 1 0 7\n", 0, 0),
        ("a 1 100\ns 3 5 5\nf 1\n", 4, 115),
    ] {
        let workload = workload(text).unwrap();
        assert_eq!((workload.requests, workload.peak_requested_bytes()), (gets, peak_requested_bytes), "{text}");
    }
}

#[test]
fn contradictions_are_reported_with_their_line() {
    for (text, why) in [
        ("a 1 5\na 1 5\n", "line 2: `a 1 5`: buffer 1 is held already"),
        ("\nf 3\n", "line 2: `f 3`: no buffer 3 is held"),
        ("a 18446744073709551615 5\n", "use a smaller number"),
        ("a 1 18446744073709551615\na 2 1\n", "line 2"),
        ("s 3 18446744073709551615 1\n", "2^64"),
        ("t 99999999999999999\n", "the trace lasts longer than a year"),
        ("t 18446744073709551615\n", "a year"),
        ("# pools 2\np 2\n", "line 2: `p 2`: there is no pool 2"),
    ] {
        let error = workload(text).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}
