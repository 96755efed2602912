//! Traces as text: the operations, the counts of a workload, and line numbers in errors.

use pinpool::unstable::Rounding;
use pinpool_replay::{TraceError, TraceHeader, TraceOp, TraceReader, Workload};

fn read(text: &'static str) -> Result<(TraceHeader, Vec<TraceOp>), TraceError> {
    let mut reader = TraceReader::new(text.as_bytes())?;
    let operations = reader.by_ref().collect::<Result<_, _>>()?;
    Ok((reader.header().clone(), operations))
}

fn workload(text: &'static str) -> Result<Workload, TraceError> {
    Workload::read(&mut TraceReader::new(text.as_bytes())?)
}

#[test]
fn a_trace_is_read_as_written() {
    let text = "## about\n# limit 7\n# auto_resize 0\n# rounder pow2\n# pools 2\n\na 1 48\n## between\na 2 7 64\nf 1\nr 3 9\ns 2 8 4\nc\np 1\nt 50\n";
    let (header, operations) = read(text).unwrap();
    assert_eq!(header, TraceHeader { limit: 7, auto_resize: false, rounding: Rounding::Pow2, pools: 2 });
    assert_eq!(
        operations,
        [
            TraceOp::Get { id: 1, bytes: 48, align: 4 },
            TraceOp::Get { id: 2, bytes: 7, align: 64 },
            TraceOp::Put { id: 1 },
            TraceOp::Steps { count: 3, bytes: 9, step: 0 },
            TraceOp::Steps { count: 2, bytes: 8, step: 4 },
            TraceOp::Clear,
            TraceOp::Pool { index: 1 },
            TraceOp::Advance { micros: 50 },
        ]
    );
}

#[test]
fn an_empty_trace_has_the_default_header_and_no_operations() {
    let (header, operations) = read("").unwrap();
    assert_eq!(header, TraceHeader { limit: 100, auto_resize: true, rounding: Rounding::Exact, pools: 1 });
    assert!(operations.is_empty());
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
    assert_eq!((workload.gets, workload.peak_requested_bytes()), (3, 35));
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
        assert_eq!((workload.gets, workload.peak_requested_bytes()), (gets, peak_requested_bytes), "{text}");
    }
}

#[test]
fn contradictions_are_reported_with_their_line() {
    for (text, why) in [
        ("a 1 5\na 1 5\n", "line 2: `a 1 5`: buffer 1 is held already"),
        ("f 3\n", "no buffer 3"),
        ("a 1 18446744073709551615\na 2 1\n", "line 2"),
        ("s 3 18446744073709551615 1\n", "2^64"),
        ("t 18446744073709551615\n", "a year"),
    ] {
        let error = workload(text).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}
