//! docs/log-lines.md, generated from the comments of the rows, and docs/data/log-lines.txt, the lines that they print:
//! `UPDATE_DOCS=1 cargo test --lib report::log` writes both.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use super::emit::captured;
use super::lines::COMMENTS;
use super::*;
use crate::error::{Error, ErrorKind, SourceError};
use crate::report::{Dump, ExplainedRefusal, FailedRequest, RefusedBy};
use crate::stats::Stats;
use pinpool_observe::diagnosis::{Monitor, Snapshot};
use pinpool_shared_limit::Loss;

const MIB: u64 = 1 << 20;

/// Every line once.
fn examples() -> Vec<captured::Line> {
    let log = PoolLog { name: Some("loader".to_owned()), ..PoolLog::default() };
    let [path, socket] = ["/tmp/t.gz", "/tmp/pinpool-18721.sock"].map(Path::new);
    let mut usage = Stats::default();
    (usage.memory.held_bytes, usage.memory.in_use_bytes) = (24 * MIB, 24 * MIB);
    usage.limits.max_bytes = Some(24 * MIB);
    let facts = "preset=adaptive backend=mlock pinned=kernel max=24.0MiB granule=128.0KiB thp=madvise numa_node=1 version=0.1.0 \
                 pid=18721; PINPOOL_MAX_BYTES=24MiB (builder) (skipped vmm, cuda: no GPU)";
    let diagnosed = |now: Snapshot| {
        let mut monitor = Monitor::default();
        monitor.add(10_000_000, now).expect("a window ends").clone()
    };
    let healthy = diagnosed(Snapshot {
        requests: 1000,
        is_pinned: true,
        held_bytes: MIB,
        most_held_bytes: MIB,
        ..Default::default()
    });
    let too_small = diagnosed(Snapshot {
        requests: 21_397,
        delayed_requests: 3_327,
        failed_requests: 1,
        waiting_ns: 6_400_000_000,
        needed_bytes: 27 * MIB,
        max_bytes: Some(24 * MIB),
        limit: Some("PINPOOL_MAX_BYTES".into()),
        ..Default::default()
    });
    let dump = Dump {
        device: "host".to_owned(),
        holders: Vec::new(),
        stats: usage.clone(),
        longest_free_bytes: 0,
        host: None,
        request: Some(FailedRequest {
            requested_bytes: 4 * MIB,
            tag: Some("labels".to_owned()),
            is_reserve: false,
            refused: ExplainedRefusal {
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
    let unknown = Error::from(ErrorKind::DeviceFailed {
        why: "cuEventQuery failed: unspecified launch failure (code 719)".to_owned(),
        code: Some(719),
    });
    let not_pinned = Finding::warning("pinning", "memory is not pinned: mlock is limited").remedy("raise `ulimit -l`");
    let not_used = Finding::error("gpu", "the GPU is not used: the driver does not start (code 999)");
    let why_full =
        "the pool limit of 24.0MiB is reached (PINPOOL_MAX_BYTES): return buffers sooner or raise PINPOOL_MAX_BYTES";
    let mut ended = Stats::default();
    (ended.requests.served, ended.requests.misses, ended.memory.peak_held_bytes) = (2, 2, 24 * MIB);
    let mut still_out = Stats::default();
    (still_out.memory.in_use, still_out.memory.in_use_bytes) = (1, MIB);
    let mut lines = Vec::new();
    let mut add = |call: &dyn Fn()| {
        let found = captured::lines_of(call);
        let [captured::Line { level, target, text }] = found.as_slice() else { panic!("one line: {found:?}") };
        let text = text.lines().next().expect("a line").to_owned();
        lines.push(captured::Line { level: *level, target, text });
    };
    add(&|| log.created(facts));
    add(&|| log.lock_limit(8 * MIB));
    add(&|| log.machine(log::Level::Warn, &not_pinned));
    add(&|| log.machine(log::Level::Error, &not_used));
    add(&|| log.setting("PINPOOL_MAX_BYTE=8GiB: unknown and ignored; did you mean PINPOOL_MAX_BYTES?"));
    add(&|| log.no_maintenance_thread(&io::ErrorKind::WouldBlock.into()));
    add(&|| log.grew(0, 16 * MIB, Some(24 * MIB), 1, Duration::from_micros(36_100)));
    add(&|| log.acquired(15_728_640, 0, 16 * MIB, 1, Duration::from_micros(36_100)));
    add(&|| log.carved(4096));
    add(&|| log.sizes_vary());
    add(&|| log.sizes_recur());
    add(&|| log.memory_pressure());
    add(&|| log.pressure_ended());
    add(&|| log.pool_size_limit_lowered(110, 100));
    add(&|| log.limit_changed(Some(24 * MIB), Some(64 * MIB), "set_max_bytes"));
    add(&|| log.partition("eval", Some(16 * MIB), Some(8 * MIB)));
    add(&|| log.waiting(500_000, 524_288));
    add(&|| log.waited(500_000, Duration::from_micros(5_130), true));
    add(&|| log.full(500_000, why_full, &usage));
    add(&|| log.refused(500_000, why_full, &usage));
    add(&|| log.shortage_ended(Duration::from_secs(3), 2, Duration::from_millis(1_500), 0));
    add(&|| log.pageable(500_000, 10, 2 * MIB, Some(24 * MIB)));
    add(&|| log.out_of_memory(&dump));
    add(&|| log.diagnosis(log::Level::Info, &healthy));
    add(&|| log.diagnosis(log::Level::Warn, &too_small));
    add(&|| log.reserve_started(8 * MIB, 24 * MIB));
    add(&|| log.reserve_progress(16 * MIB, 24 * MIB, Some(Duration::from_secs(2))));
    add(&|| log.reserve_complete(24 * MIB, Duration::from_millis(12), Some(1)));
    add(&|| log.reserve_call(24 * MIB, || 16 * MIB, Some(1)));
    add(&|| log.reserve_paused(8 * MIB, 64 * MIB, Some(24 * MIB)));
    add(&|| log.reserve_stopped(8 * MIB, 64 * MIB, &mlock));
    add(&|| {
        log.huge_pages("16.0MiB of 24.0MiB are in huge pages (PINPOOL_HUGETLB=2MiB); set pages aside with `sysctl vm.nr_hugepages=N`, N times 2 MiB; or PINPOOL_HUGETLB=auto")
    });
    add(&|| log.shared_limit_joined("job", Some(64 * MIB), 0, 0));
    add(&|| log.shared_limit_differs("job", Some(64 * MIB), 24 * MIB));
    add(&|| log.shared_limit_unused("/dev/shm is full"));
    add(&|| log.shared_limit_released("job", 524_288));
    add(&|| log.shared_limit_lost("job", Loss::Removed));
    add(&|| log.stuck(1, 4096, Duration::from_secs(40), Some(16)));
    add(&|| log.quarantined(4096, 1, true, &unknown));
    add(&|| log.leaked(4096, 1, false, &unknown));
    add(&|| log.quarantine_ended(1, 4096));
    add(&|| log.idle_kept(8 * MIB, "cuda"));
    add(&|| log.release_delayed(&refused));
    add(&|| log.release_failed(8 * MIB, &refused));
    add(&|| log.device_lost(&refused));
    add(&|| log.socket_opened(socket));
    add(&|| log.socket_failed(socket, "permission denied"));
    add(&|| log.trace_started(path));
    add(&|| log.trace_taken(path));
    add(&|| log.trace_complete(path, 120));
    add(&|| log.trace_records_lost(path, 120, 3));
    add(&|| log.trace_incomplete(path, 120, 3, "no space left on device"));
    add(&|| log.pool_ended(&ended));
    add(&|| log.buffers_still_out((&still_out, &[])));
    add(&|| log.end_in_flight(1, 4096, Duration::from_secs(30)));
    add(&|| log.end_left_pinned(24 * MIB));
    add(&|| log.end_unreleased(24 * MIB, &refused));
    lines
}

#[test]
fn the_page_lists_each_log_line_with_an_example() {
    let (mut rows, mut lines) = (String::new(), String::new());
    let examples = examples();
    for (event, comment) in COMMENTS {
        let begin = format!("pool[loader] {event}: ");
        let of: Vec<_> = examples.iter().filter(|line| line.text.starts_with(&begin)).collect();
        let target =
            of.first().unwrap_or_else(|| panic!("{event} has no example")).target.trim_start_matches("pinpool::");
        let levels = of.iter().map(|line| line.level.as_str().to_lowercase()).collect::<Vec<_>>().join(", ");
        let (meaning, to_do) = comment.split_once(" To do: ").unwrap_or_else(|| panic!("{event}: {comment}"));
        let (meaning, to_do) = (meaning.trim(), if to_do == "nothing." { "-" } else { to_do });
        let _ = writeln!(rows, "| `{event}` | {target} | {levels} | {meaning} | {to_do} |");
        of.iter().for_each(|line| _ = writeln!(lines, "{}", line.text));
        let alike = COMMENTS.iter().filter(|(other, _)| other.contains(event)).count();
        assert_eq!(alike, 1, "a search for {event} finds several events");
    }
    let made = format!("| event | target | level | meaning | what to do |\n| --- | --- | --- | --- | --- |\n{rows}");
    let docs = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("docs");
    let (path, examples) = (docs.join("log-lines.md"), docs.join("data/log-lines.txt"));
    let page = fs::read_to_string(&path).expect("the page can be read");
    let (begin, end) = ("<!-- made from the code: UPDATE_DOCS=1 cargo test --lib report::log -->\n", "<!-- end -->");
    let (before, rest) = page.split_once(begin).expect("the page has its marks");
    let (found, behind) = rest.split_once(end).expect("the page has its marks");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, format!("{before}{begin}{made}{end}{behind}")).expect("the page can be written");
        fs::write(&examples, lines).expect("the examples can be written");
    } else {
        let is_current = found == made && fs::read_to_string(&examples).is_ok_and(|found| found == lines);
        assert!(is_current, "docs/log-lines.md or its examples are stale: UPDATE_DOCS=1 cargo test --lib report::log");
    }
}
