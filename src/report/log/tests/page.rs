//! docs/log-lines.md, made of the comments of the rows, and docs/data/log-lines.txt, the lines that they print:
//! `UPDATE_DOCS=1 cargo test --lib log_lines` writes both.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use super::emit::captured;
use super::lines::COMMENTS;
use super::*;
use crate::error::{Error, ErrorKind, UsageReport};
use crate::report::{Dump, FailedRequest, Refused, RefusedBy};
use crate::shared_limit::Loss;
use crate::stats::Stats;
use pinpool_observe::diagnosis::{Monitor, Snapshot};

const MIB: u64 = 1 << 20;

/// Every line once: the method that logs it, and the line.
fn examples() -> Vec<(&'static str, captured::Line)> {
    let log = PoolLog { name: Some("loader".to_owned()), ..PoolLog::new() };
    let path = Path::new("/tmp/t.gz");
    let usage = UsageReport {
        held_bytes: 24 * MIB,
        in_use_bytes: 24 * MIB,
        max_bytes: Some(24 * MIB),
        ..UsageReport::default()
    };
    let facts = "preset=adaptive backend=mlock pinned=yes max=24.0MiB granule=128.0KiB thp=madvise numa_node=1 version=0.1.0 \
                 pid=18721; PINPOOL_MAX_BYTES=24MiB (builder) (skipped vmm, cuda: no GPU)";
    let growth = Growth {
        asked_bytes: 15_728_640,
        held_before_bytes: 0,
        held_bytes: 16 * MIB,
        pin_calls: 1,
        took: Duration::from_micros(36_100),
        max_bytes: Some(24 * MIB),
    };
    let diagnosed = |now: Snapshot| {
        let mut monitor = Monitor::default();
        monitor.add(10_000_000, now).expect("a window ends").clone()
    };
    let healthy = diagnosed(Snapshot {
        gets: 1000,
        is_pinned: true,
        held_bytes: MIB,
        most_held_bytes: MIB,
        ..Default::default()
    });
    let too_small = diagnosed(Snapshot {
        gets: 21_397,
        short_gets: 3_327,
        failed_gets: 1,
        waiting_ns: 6_400_000_000,
        needed_bytes: 27 * MIB,
        max_bytes: Some(24 * MIB),
        limit: Some("PINPOOL_MAX_BYTES".into()),
        ..Default::default()
    });
    let dump = Dump {
        device: "host".to_owned(),
        allocator: "mlock (adaptive)".to_owned(),
        owners: Vec::new(),
        usage,
        longest_free_bytes: 0,
        peak_bytes: 24 * MIB,
        oldest_copy: None,
        host: None,
        request: Some(FailedRequest {
            asked_bytes: 4 * MIB,
            tag: Some("labels".to_owned()),
            is_reserve: false,
            refused: Refused {
                by: RefusedBy::Limit { could_fit: true },
                needed_bytes: 4 * MIB,
                found: "the pool limit of 24.0MiB is reached (PINPOOL_MAX_BYTES)".to_owned(),
                remedy: String::new(),
            },
        }),
        limit: "PINPOOL_MAX_BYTES",
        diagnosis: None,
    };
    let refused = SourceError::new("cuMemFreeHost", "unspecified launch failure").with_code(719);
    let mlock = SourceError::new("mlock", "out of memory").with_code(12);
    let unknown =
        Error::from(ErrorKind::Device { why: "cuEventQuery failed: unspecified launch failure (code 719)".to_owned() });
    let mut ended = Stats::default();
    (ended.requests.served, ended.requests.misses, ended.memory.peak_held_bytes) = (2, 2, 24 * MIB);
    let mut lines = Vec::new();
    let mut add = |method: &'static str, call: &dyn Fn()| {
        let found = captured::lines_of(call);
        let [captured::Line { level, target, text }] = found.as_slice() else {
            panic!("{method} prints one line: {found:?}")
        };
        let text = text.lines().next().expect("a line").to_owned();
        lines.push((method, captured::Line { level: *level, target, text }));
    };
    add("started", &|| log.started(facts));
    add("lock_limited", &|| log.lock_limited(8 * MIB));
    add("found_warning", &|| {
        log.found_warning(
            &Finding::warning("pinning", "memory is not pinned: mlock is limited").remedy("raise `ulimit -l`"),
        )
    });
    add("found_error", &|| {
        log.found_error(&Finding::error("gpu", "the GPU is not used: the driver does not start (code 999)"))
    });
    add("unused_variable", &|| log.unused_variable("PINPOOL_NAME=x: unknown setting"));
    add("no_thread_for", &|| log.no_thread_for(&io::ErrorKind::WouldBlock.into()));
    add("grown", &|| log.grown(&growth));
    add("grew", &|| log.grew(&growth));
    add("carved", &|| log.carved(4096));
    add("sizes_vary", &|| log.sizes_vary());
    add("sizes_recur", &|| log.sizes_recur());
    add("pressure_began", &|| log.pressure_began());
    add("pressure_ended", &|| log.pressure_ended());
    add("limit_lowered", &|| log.limit_lowered(110, 100));
    add("limit_changed", &|| log.limit_changed(Some(24 * MIB), Some(64 * MIB), "set_max_bytes"));
    add("partitioned", &|| log.partitioned("eval", 16 * MIB, Some(8 * MIB)));
    add("began_to_wait", &|| log.began_to_wait(500_000, 524_288));
    add("waited", &|| log.waited(500_000, Duration::from_micros(5_130), true));
    add("full", &|| log.full(500_000, "return buffers sooner or raise PINPOOL_MAX_BYTES", &usage));
    add("refused", &|| log.refused(500_000, "return buffers sooner or raise PINPOOL_MAX_BYTES", &usage));
    add("shortage_ended", &|| log.shortage_ended(Duration::from_secs(3), 2, Duration::from_millis(1_500), 0));
    add("got_pageable", &|| log.got_pageable(500_000, 10, 2 * MIB, Some(24 * MIB)));
    add("out_of_memory", &|| log.out_of_memory(&dump));
    add("diagnosed", &|| log.diagnosed(&healthy));
    add("alarmed", &|| log.alarmed(&too_small));
    add("reserve_begun", &|| log.reserve_begun(8 * MIB, 24 * MIB));
    add("reserving", &|| log.reserving(16 * MIB, 24 * MIB, Some(Duration::from_secs(2))));
    add("reserve_done", &|| log.reserve_done(24 * MIB, Duration::from_millis(12), Some(1)));
    add("reserved", &|| log.reserved(24 * MIB, || 16 * MIB, Some(1)));
    add("reserve_waits", &|| log.reserve_waits(8 * MIB, 64 * MIB, Some(24 * MIB)));
    add("reserve_stopped", &|| log.reserve_stopped(8 * MIB, 64 * MIB, &mlock));
    add("few_huge_pages", &|| log.few_huge_pages(&SourceError::new("mmap", "cannot allocate memory").with_code(12)));
    add("joined_shared_limit", &|| log.joined_shared_limit("job", Some(64 * MIB), 0, 0));
    add("shared_limit_differs", &|| log.shared_limit_differs("job", Some(64 * MIB), 24 * MIB));
    add("shared_limit_unused", &|| log.shared_limit_unused("/dev/shm is full"));
    add("released_for_others", &|| log.released_for_others("job", 524_288));
    add("shared_limit_lost", &|| log.shared_limit_lost("job", Loss::Removed));
    add("stuck", &|| log.stuck(1, 4096, Duration::from_secs(40), 0x10));
    add("quarantined", &|| log.quarantined(4096, 1, true, &unknown));
    add("leaked", &|| log.leaked(4096, 1, false, &unknown));
    add("completion_known", &|| log.completion_known(1, 4096));
    add("idle_memory_stays", &|| log.idle_memory_stays(8 * MIB, "cuda"));
    add("release_delayed", &|| log.release_delayed(&refused));
    add("release_failed", &|| log.release_failed(8 * MIB, &refused));
    add("memory_gone", &|| log.memory_gone(&refused));
    add("serving", &|| log.serving(path));
    add("not_serving", &|| log.not_serving(path, "permission denied"));
    add("recording", &|| log.recording(path));
    add("earlier_recording", &|| log.earlier_recording(path, Path::new("/tmp/t.gz.old")));
    add("not_recording", &|| log.not_recording(path, "another process writes it"));
    add("recorded_all", &|| log.recorded_all(path, 120));
    add("records_lost", &|| log.records_lost(path, 120, 3));
    add("recording_failed", &|| log.recording_failed(path, 120, 3, "no space left on device"));
    add("ended", &|| log.ended(&ended));
    add("still_out", &|| log.still_out(&StillOut { buffers: 1, bytes: MIB, tagged: &[] }));
    add("closed_in_flight", &|| log.closed_in_flight(1, 4096, Duration::from_secs(30)));
    add("left_pinned", &|| log.left_pinned(24 * MIB));
    add("left_by_refusal", &|| log.left_by_refusal(24 * MIB, &refused));
    lines
}

#[test]
fn the_page_of_the_log_lines_has_each_line_with_its_meaning_and_an_example() {
    let mut comments: BTreeMap<_, _> = COMMENTS.iter().copied().collect();
    let (mut rows, mut lines) = (String::new(), String::new());
    for (method, captured::Line { level, target, text }) in examples() {
        let comment = comments.remove(method).unwrap_or_else(|| panic!("{method} logs no line"));
        let (meaning, to_do) = comment.split_once(" To do: ").unwrap_or_else(|| panic!("{method}: {comment}"));
        let event = text.split(' ').nth(1).expect("an event").trim_end_matches(':');
        let (level, target, meaning) =
            (level.as_str().to_lowercase(), target.trim_start_matches("pinpool::"), meaning.trim());
        let to_do = if to_do == "nothing." { "-" } else { to_do };
        let _ = writeln!(rows, "| `{event}` | {target} | {level} | {meaning} | {to_do} |");
        let _ = writeln!(lines, "{text}");
    }
    assert!(comments.is_empty(), "lines without an example: {comments:?}");
    let made = format!("| event | target | level | meaning | what to do |\n| --- | --- | --- | --- | --- |\n{rows}");
    let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("docs");
    let (path, examples) = (docs.join("log-lines.md"), docs.join("data/log-lines.txt"));
    let page = fs::read_to_string(&path).expect("the page can be read");
    let (begin, end) = ("<!-- made from the code: UPDATE_DOCS=1 cargo test --lib log_lines -->\n", "<!-- end -->");
    let (before, rest) = page.split_once(begin).expect("the page has its marks");
    let (found, behind) = rest.split_once(end).expect("the page has its marks");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, format!("{before}{begin}{made}{end}{behind}")).expect("the page can be written");
        fs::write(&examples, lines).expect("the examples can be written");
    } else {
        let is_current = found == made && fs::read_to_string(&examples).is_ok_and(|found| found == lines);
        assert!(is_current, "docs/log-lines.md or its examples are stale: UPDATE_DOCS=1 cargo test --lib log_lines");
    }
}
