//! Workloads through the public pool in virtual time: exact statistics, the targets of the policy, and the semantics of a
//! replay.

use std::collections::HashMap;
use std::fs;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use pinpool::{Pool, Preset};
use pinpool_replay::{Replay, ReplayReport, SourceKind, Trace, Workload};
use serde_json::Value;

const MIB: u64 = 1 << 20;

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data")
}

fn read(file: &str) -> Workload {
    Workload::of_trace(Trace::open(&data().join(file)).unwrap()).unwrap()
}

fn named(name: &str) -> Workload {
    read(&format!("workloads/{name}.trace.gz"))
}

fn play(text: &str, replay: &Replay) -> ReplayReport {
    replay.play(&Workload::of_trace(Trace::read(text.as_bytes()).unwrap()).unwrap()).unwrap()
}

fn ratio(report: &ReplayReport) -> f64 {
    report.peak_pinned_bytes as f64 / report.peak_requested_bytes.max(1) as f64
}

/// Returns a replay under comma-separated settings.
fn with(settings: &str) -> Replay {
    let pair = |setting: &str| {
        let (name, value) = setting.split_once('=').unwrap();
        (format!("PINPOOL_{name}"), value.to_owned())
    };
    Replay::under(&settings.split(',').map(pair).collect::<Vec<_>>()).unwrap()
}

fn under(max_bytes: u64) -> Replay {
    Replay { max_bytes: Some(max_bytes), ..Replay::default() }
}

/// Returns the name and the numbers of each target.
fn targets() -> Vec<(String, Vec<f64>)> {
    let text = fs::read_to_string(data().join("workloads/targets.csv")).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, numbers) = line.split_once(',').unwrap();
            (name.to_owned(), numbers.split(',').map(|number| number.parse().unwrap()).collect())
        })
        .collect()
}

/// Returns the expected statistics of each workload, under each set of settings and on each source.
fn expected() -> HashMap<String, Vec<Value>> {
    let text = fs::read_to_string(data().join("workloads/expected.jsonl")).unwrap();
    let mut rows = HashMap::<_, Vec<Value>>::new();
    for row in text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        rows.entry(row["workload"].as_str().unwrap().to_owned()).or_default().push(row);
    }
    rows
}

#[test]
fn every_workload_meets_its_targets_without_an_alarm() {
    let (targets, expected) = (targets(), expected());
    let files = fs::read_dir(data().join("workloads")).unwrap().map(|entry| entry.unwrap().path());
    let traces = files.filter(|path| path.extension().is_some_and(|extension| extension == "gz")).count();
    assert_eq!((traces, targets.len(), expected.len()), (25, 25, 25));
    let next = AtomicUsize::new(0);
    let replay_rest = || {
        while let Some((name, target)) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
            check_workload(name, target, &expected[name]);
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(replay_rest);
        }
    });
    let workload = named("bucket_switch");
    let (_, found) = alarms(&workload, &under(workload.peak_requested_bytes() / 2));
    assert!(found.iter().all(|why| why.starts_with("limit_too_small: ")) && !found.is_empty(), "{found:#?}");
}

fn check_workload(name: &str, target: &[f64], expected: &[Value]) {
    let workload = named(name);
    assert_eq!(expected.len(), 6, "{name}");
    for row in expected {
        let (set, source) = (row["set"].as_str().unwrap(), row["source"].as_str().unwrap());
        let is_given = set == "as given";
        let replay = if is_given { Replay::default() } else { with(set) };
        let source = if source == "separate" { SourceKind::Separate } else { SourceKind::Virtual };
        let replay = Replay { source, max_bytes: row["max_bytes"].as_u64(), ..replay };
        let is_free = is_given && replay.max_bytes.is_none();
        let report = if is_free && replay.source == SourceKind::Virtual {
            let (report, found) = alarms(&workload, &replay);
            assert_eq!(found, [""; 0], "{name} without a limit");
            let (_, found) = alarms(&workload, &under(report.peak_pinned_bytes / 4 * 5));
            assert_eq!(found, [""; 0], "{name} with a quarter more than it needs");
            report
        } else {
            replay.play(&workload).unwrap()
        };
        let figures = serde_json::to_value(&report).unwrap();
        for (key, value) in row.as_object().unwrap().iter().filter(|(key, _)| !["workload", "set"].contains(&&***key)) {
            assert_eq!(&figures[key], value, "{name} {set}: {key}");
        }
        assert_eq!(report.gets, workload.requests, "{name} {set}");
        if is_free {
            check_targets(name, target, &report);
        }
    }
}

#[allow(clippy::cast_precision_loss)] // Counts of pin calls.
fn check_targets(name: &str, target: &[f64], report: &ReplayReport) {
    let [locks, late, peak, slow_gets, separate_locks, separate_peak] = *target else { panic!("{target:?}") };
    // Late pin calls in separate regions have no target; the exact statistics cover them.
    let (locks, late, peak) = match report.source {
        SourceKind::Virtual => (locks, Some(late), peak),
        SourceKind::Separate => (separate_locks, None, separate_peak),
    };
    let most = |target: f64| (target * 1.1).max(target + 3.0);
    assert!(report.pin_calls as f64 <= most(locks), "{name}: {report:?}");
    assert!(late.is_none_or(|late| report.late_pin_calls as f64 <= most(late)), "{name}: {report:?}");
    assert!(ratio(report) <= peak * 1.03, "{name}: {} {report:?}", ratio(report));
    assert!(report.slow_requests as f64 <= slow_gets, "{name}: {report:?}");
    assert_eq!(report.timeouts, 0, "{name}");
}

/// Plays `workload`, and also returns the alarms of the pool. Diagnoses the pool after about 250 steps, since alarms persist.
fn alarms(workload: &Workload, replay: &Replay) -> (ReplayReport, Vec<String>) {
    let (mut alarms, mut step, every) = (Vec::new(), 0, (workload.requests / 250).max(1));
    let mut observe = |pool: &Pool| {
        step += 1;
        if step % every == 0 {
            alarms.extend(Some(pool.diagnose()).filter(|found| found.is_alarm).map(|why| why.to_string()));
        }
    };
    let report = replay.play_observed(workload, &mut observe).unwrap();
    alarms.dedup();
    (report, alarms)
}

#[test]
fn a_file_gives_the_same_numbers_on_every_thread() {
    let workload = named("bucket_switch");
    let limit = workload.peak_requested_bytes() * 6 / 5;
    for replay in [SourceKind::Virtual, SourceKind::Separate].map(|source| Replay {
        source,
        max_bytes: Some(limit),
        ..Replay::default()
    }) {
        let here = replay.play(&workload).unwrap();
        thread::scope(|scope| {
            // Each thread has its own slot of the thread cache.
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| replay.play(&workload).unwrap())).collect();
            for thread in threads {
                assert_eq!(thread.join().unwrap(), here);
            }
        });
        assert!(here.peak_pinned_bytes <= limit, "{here:?}");
    }
}

#[test]
fn a_replay_under_tensorflows_policy_costs_as_much_as_tensorflows_pool() {
    let seed = read("conformance/seed.trace");
    let report = with("PRESET=tensorflow,ROUNDING=exact").play(&seed).unwrap();
    // The statistics match seed.expected, recorded from TensorFlow's pool.
    assert_eq!((report.preset, report.pin_calls, report.pinned_bytes_total), (Preset::TensorFlow, 11_256, 507_645_600));
    assert_eq!((report.evicted, report.pool_size_limit, report.raises), (11_000, 281, 11));
    let adaptive = Replay::default().play(&seed).unwrap();
    assert_eq!((adaptive.gets, adaptive.preset), (report.gets, Preset::Adaptive));
    assert!(adaptive.pin_calls < 100, "{adaptive:?}");
}

#[test]
fn a_request_at_the_limit_is_served_by_the_next_return() {
    let report = play("a 1 3145728\na 2 3145728\nt 99950\nf 1\nt 50\nf 2\n", &under(4 * MIB));
    assert_eq!((report.gets, report.waits, report.timeouts), (2, 1, 0));
    assert_eq!(report.hits, 1, "served by the returned buffer");
}

#[test]
fn a_timed_out_request_is_a_fallback_and_the_next_one_is_tried() {
    // The third request would fit, but waits behind the second until the second times out.
    let report = play("a 1 3145728\na 2 3145728\na 3 1048576\nt 100000\nf 1\nf 2\nf 3\n", &under(4 * MIB));
    assert_eq!((report.waits, report.timeouts), (2, 1));
    assert_eq!(report.gets, 3);
    // A wait ends on time within a long `t` too.
    let report = play("a 1 3145728\na 2 3145728\nt 600000\na 3 1048576\nf 1\nf 2\nf 3\n", &under(4 * MIB));
    assert_eq!((report.waits, report.timeouts), (1, 1), "nothing waits at the third request");
}

#[test]
fn the_return_of_a_buffer_ends_the_wait_for_it() {
    let report = play("a 1 3145728\na 2 3145728\na 3 1048576\nf 2\nt 50\nf 1\nf 3\nt 200000\n", &under(4 * MIB));
    assert_eq!((report.waits, report.timeouts), (2, 0));
}

#[test]
fn a_wait_of_zero_is_an_immediate_fallback() {
    let report = play("a 1 3145728\na 2 3145728\nf 2\nf 1\n", &Replay { wait: Some(Duration::ZERO), ..under(4 * MIB) });
    assert_eq!((report.waits, report.timeouts), (0, 1));
}

#[test]
fn a_request_above_the_limit_delays_no_other() {
    let report = play("a 1 5242880\na 2 1048576\nt 50\nf 1\nf 2\n", &under(4 * MIB));
    assert_eq!((report.waits, report.timeouts, report.gets), (0, 1, 2));
    assert!(report.peak_pinned_bytes >= MIB && report.peak_pinned_bytes <= 4 * MIB, "{report:?}");
}

#[test]
fn a_limit_below_a_granule_is_kept() {
    for source in [SourceKind::Virtual, SourceKind::Separate] {
        let replay = Replay { source, ..under(MIB) };
        let report = play("a 1 600000\na 2 100000\nf 1\na 3 700000\na 4 900000\nt 50\nf 2\nf 3\nt 50\nf 4\n", &replay);
        assert!(report.peak_pinned_bytes <= MIB, "{report:?}");
        assert_eq!((report.gets, report.timeouts, report.waits), (4, 0, 1), "{report:?}");
    }
}

#[test]
fn late_pin_calls_come_after_half_of_the_requests() {
    let replay = with("PRESET=tensorflow,ROUNDING=exact");
    let report = play("a 1 10\na 2 20\na 3 30\na 4 40\na 5 0\nf 1\na 1 10\nf 1\nf 2\nf 3\nf 4\nf 5\n", &replay);
    assert_eq!((report.gets, report.hits), (5, 1));
    assert_eq!((report.pin_calls, report.late_pin_calls), (4, 2));
}

#[test]
fn the_mean_is_over_the_time_of_the_trace() {
    let replay = with("PRESET=tensorflow,POOL_SIZE_LIMIT=0");
    let report = play("a 1 1000\nt 1000000\nf 1\nt 3000000\n", &replay);
    assert_eq!(report.mean_pinned_bytes * 4, report.peak_pinned_bytes);
    let timeless = play("a 1 1000\nf 1\n", &replay);
    assert_eq!(timeless.mean_pinned_bytes, 0, "nothing is pinned at the end of a trace without time");
}

#[test]
fn the_minute_after_the_last_return_counts_even_if_the_trace_continues() {
    let replay = with("IDLE_TIMEOUT=70s");
    for text in ["a 1 10\nf 1\n", "a 1 10\nf 1\nt 30000000\n", "a 1 10\nf 1\nt 500000000\n"] {
        assert_eq!(play(text, &replay).pinned_after_60s_bytes, 2 * MIB, "{text}");
        // Ten seconds in the thread cache and 45 in the arena have passed.
        assert_eq!(play(text, &with("IDLE_TIMEOUT=45s")).pinned_after_60s_bytes, 0, "{text}");
    }
}
