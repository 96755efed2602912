//! Every trace in `tests/data` must come out byte for byte as TensorFlow's pool did.

use std::fs;
use std::path::{Path, PathBuf};

use pinpool::trace::{Conformance, Reader, Streams, expected_text};

fn traces() -> Vec<PathBuf> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let files = fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path());
    let mut traces: Vec<_> =
        files.filter(|path| path.to_string_lossy().trim_end_matches(".gz").ends_with(".trace")).collect();
    traces.sort();
    traces
}

/// The file beside `trace` that has its name and this extension.
fn beside(trace: &Path, extension: &str) -> PathBuf {
    let name = trace.file_name().unwrap().to_string_lossy();
    let stem = name.split('.').next().unwrap();
    trace.with_file_name(format!("{stem}.{extension}"))
}

#[test]
fn every_trace_gives_the_expected_text() {
    let traces = traces();
    assert_eq!(traces.len(), 17, "traces are missing from tests/data");
    for trace in traces {
        let text = expected_text(&mut Reader::open(&trace).unwrap()).unwrap();
        assert_eq!(text, fs::read_to_string(beside(&trace, "expected")).unwrap(), "{}", trace.display());
    }
}

#[test]
fn the_small_traces_give_the_expected_streams_line_by_line() {
    let mut compared = 0;
    for trace in traces().into_iter().filter(|trace| beside(trace, "outcome").exists()) {
        let mut reader = Reader::open(&trace).unwrap();
        let streams = Streams { outcome: Vec::new(), buffers: Vec::new() };
        let mut conformance = Conformance::new(reader.header(), streams).unwrap();
        conformance.play(&mut reader).unwrap();
        let Streams { outcome, buffers } = conformance.into_streams();
        for (stream, extension) in [(outcome, "outcome"), (buffers, "buffers")] {
            let expected = fs::read_to_string(beside(&trace, extension)).unwrap();
            assert_eq!(String::from_utf8(stream).unwrap(), expected, "{} {extension}", trace.display());
        }
        compared += 1;
    }
    assert_eq!(compared, 5);
}

#[test]
fn a_trace_that_makes_no_sense_is_an_error_with_its_line() {
    for (text, why) in [
        ("# limit 0\na 1 5\n", "PINPOOL_POOL_SIZE_LIMIT=0"),
        ("a 1 5\na 1 5\n", "held already"),
        ("f 3\n", "no buffer 3"),
        ("p 1\n", "no pool 1"),
        ("a 1 5 3\n", "power of two"),
        ("## first\n\nf 7\n", "line 3: `f 7`: no buffer 7"),
        ("s 3 18446744073709551615 1\n", "at most"),
    ] {
        let error = Reader::new(text.as_bytes()).and_then(|mut reader| expected_text(&mut reader)).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
}
