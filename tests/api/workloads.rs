//! Workloads through the public pool in virtual time: the targets that the rules were tuned to, and what a replay means.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pinpool::trace::{Replay, ReplayReport, SourceKind, TraceReader, Workload};
use pinpool::{Preset, Rounding};

const MIB: u64 = 1 << 20;

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn named(name: &str) -> Workload {
    Workload::open(&data().join(format!("workloads/{name}.trace.gz"))).unwrap()
}

fn written(text: &str) -> Workload {
    Workload::read(&mut TraceReader::new(std::io::Cursor::new(text.to_owned())).unwrap()).unwrap()
}

fn play(text: &str, replay: &Replay) -> ReplayReport {
    replay.play(&written(text)).unwrap()
}

fn under(max_bytes: u64) -> Replay {
    Replay { max_bytes: Some(max_bytes), ..Replay::default() }
}

/// Name and numbers of each line of the targets.
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

#[allow(clippy::cast_precision_loss)] // Counts of page-locks.
#[test]
fn the_default_preset_keeps_its_targets() {
    let targets = targets();
    assert_eq!(targets.len(), 25);
    let mut kept = 0;
    for (name, target) in targets.iter().filter(|(name, _)| data().join(format!("workloads/{name}.trace.gz")).exists())
    {
        let [locks, late, peak, walls_locks, walls_peak] = target.as_slice() else { panic!("{target:?}") };
        let workload = named(name);
        // Late page-locks have a target on spanning memory alone.
        for (source, locks, late, peak) in
            [(SourceKind::Virtual, locks, late, peak), (SourceKind::Discrete, walls_locks, walls_locks, walls_peak)]
        {
            let replayed = Replay { source, ..Replay::default() }.play(&workload).unwrap();
            let most = |target: f64| (target * 1.1).max(target + 3.0);
            assert!(replayed.page_locks as f64 <= most(*locks), "{name}: {replayed:?}");
            assert!(replayed.late_page_locks as f64 <= most(*late), "{name}: {replayed:?}");
            assert!(replayed.peak_ratio() <= peak * 1.03, "{name}: {} {replayed:?}", replayed.peak_ratio());
            assert_eq!((replayed.gets, replayed.fallbacks), (workload.gets(), 0));
            kept += 1;
        }
    }
    assert_eq!(kept, 12, "workloads are missing from tests/data/workloads");
}

#[test]
fn the_same_file_gives_the_same_figures_on_any_thread() {
    let workload = named("bucket_switch");
    let ceiling = workload.peak_requested_bytes() * 6 / 5;
    for replay in [SourceKind::Virtual, SourceKind::Discrete].map(|source| Replay {
        source,
        max_bytes: Some(ceiling),
        ..Replay::default()
    }) {
        let here = replay.play(&workload).unwrap();
        std::thread::scope(|scope| {
            // Each thread has a seat of its own in front of the pool.
            let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| replay.play(&workload).unwrap())).collect();
            for thread in threads {
                assert_eq!(thread.join().unwrap(), here);
            }
        });
        assert!(here.peak_pinned_bytes <= ceiling, "{here:?}");
    }
}

#[test]
fn under_tensorflows_rules_a_replay_is_what_its_own_pool_does() {
    let seed = Workload::open(&data().join("seed.trace")).unwrap();
    let replay = Replay { rounding: Some(Rounding::Exact), ..Replay::default() };
    let replayed = replay.play(&seed).unwrap();
    // As in seed.expected, which is what TensorFlow's pool did.
    assert_eq!((replayed.preset, replayed.page_locks, replayed.bytes_locked), ("tensorflow", 11_256, 507_645_600));
    assert_eq!((replayed.evicted, replayed.pool_size_limit, replayed.raises), (11_000, 281, 11));
    let adaptive = Replay::default().play(&seed).unwrap();
    assert_eq!((adaptive.gets, adaptive.preset), (replayed.gets, "adaptive"));
    assert!(adaptive.page_locks < 100, "{adaptive:?}");
}

#[test]
fn every_conformance_trace_replays_under_every_setting() {
    for entry in fs::read_dir(data()).unwrap() {
        let path = entry.unwrap().path();
        if !path.to_string_lossy().trim_end_matches(".gz").ends_with(".trace") {
            continue;
        }
        let workload = Workload::open(&path).unwrap();
        // The longest are for release builds.
        if cfg!(debug_assertions) && workload.gets() > 100_000 {
            continue;
        }
        for rounding in [Rounding::Eighths, Rounding::Exact] {
            let replayed = Replay { rounding: Some(rounding), ..Replay::default() }.play(&workload).unwrap();
            assert_eq!(replayed.gets, workload.gets(), "{}", path.display());
            assert!(
                replayed.front_hits + replayed.page_locks > 0 && replayed.peak_ratio() >= 1.0,
                "{}",
                path.display()
            );
        }
    }
}

#[test]
fn a_get_without_room_is_served_by_the_next_put() {
    let replayed = play("a 1 3145728\na 2 3145728\nt 99950\nf 1\nt 50\nf 2\n", &under(4 * MIB));
    assert_eq!((replayed.gets, replayed.waits, replayed.fallbacks), (2, 1, 0));
    assert_eq!(replayed.front_hits, 1, "by the very buffer that came back");
}

#[test]
fn a_ticket_that_expires_is_a_fallback_and_lets_the_next_one_ask() {
    // The third would have room at once, but came second in line: it is asked when the one before it gives up.
    let text = "a 1 3145728\na 2 3145728\na 3 1048576\nt 100000\nf 1\nf 2\nf 3\n";
    let replayed = play(text, &under(4 * MIB));
    assert_eq!((replayed.waits, replayed.fallbacks), (2, 1));
    assert_eq!(replayed.gets, 3);
    // One that expires in the middle of a long `t` does so on time.
    let text = "a 1 3145728\na 2 3145728\nt 600000\na 3 1048576\nf 1\nf 2\nf 3\n";
    let replayed = play(text, &under(4 * MIB));
    assert_eq!((replayed.waits, replayed.fallbacks), (1, 1), "the third finds no line before it");
}

#[test]
fn a_buffer_put_while_its_ticket_waits_takes_it_out_of_the_line() {
    let text = "a 1 3145728\na 2 3145728\na 3 1048576\nf 2\nt 50\nf 1\nf 3\nt 200000\n";
    let replayed = play(text, &under(4 * MIB));
    assert_eq!((replayed.waits, replayed.fallbacks), (2, 0));
}

#[test]
fn no_wait_is_a_fallback_at_once() {
    let text = "a 1 3145728\na 2 3145728\nf 2\nf 1\n";
    let replayed = play(text, &Replay { wait: Duration::ZERO, ..under(4 * MIB) });
    assert_eq!((replayed.waits, replayed.fallbacks), (0, 1));
}

#[test]
fn what_could_never_fit_holds_nobody_up() {
    let replayed = play("a 1 5242880\na 2 1048576\nt 50\nf 1\nf 2\n", &under(4 * MIB));
    assert_eq!((replayed.waits, replayed.fallbacks, replayed.gets), (0, 1, 2));
    assert!(replayed.peak_pinned_bytes >= MIB && replayed.peak_pinned_bytes <= 4 * MIB, "{replayed:?}");
}

#[test]
fn tensorflows_rules_wait_under_a_ceiling_too() {
    let replay = Replay { preset: Some(Preset::Tensorflow), ..under(4 * MIB) };
    let replayed = play("a 1 2000000\na 2 2000000\na 3 1000\nt 50\nf 1\nf 2\nf 3\n", &replay);
    assert_eq!((replayed.waits, replayed.fallbacks), (1, 0));
    assert_eq!(replayed.peak_pinned_bytes, 4 * MIB);
}

#[test]
fn a_ceiling_below_a_granule_is_kept() {
    for source in [SourceKind::Virtual, SourceKind::Discrete] {
        let replay = Replay { source, ..under(MIB) };
        let replayed =
            play("a 1 600000\na 2 100000\nf 1\na 3 700000\na 4 900000\nt 50\nf 2\nf 3\nt 50\nf 4\n", &replay);
        assert!(replayed.peak_pinned_bytes <= MIB, "{replayed:?}");
        assert_eq!((replayed.gets, replayed.fallbacks, replayed.waits), (4, 0, 1), "{replayed:?}");
    }
}

#[test]
fn late_page_locks_are_those_after_half_of_the_gets() {
    let replay = Replay { rounding: Some(Rounding::Exact), ..Replay::default() };
    let replayed = play("a 1 10\na 2 20\na 3 30\na 4 40\na 5 0\nf 1\na 1 10\nf 1\nf 2\nf 3\nf 4\nf 5\n", &replay);
    assert_eq!((replayed.gets, replayed.front_hits), (5, 1));
    assert_eq!((replayed.page_locks, replayed.late_page_locks), (4, 2));
}

#[test]
fn the_mean_is_over_the_time_of_the_trace() {
    let replay = Replay { pool_size_limit: Some(0), preset: Some(Preset::Tensorflow), ..Replay::default() };
    let replayed = play("a 1 1000\nt 1000000\nf 1\nt 3000000\n", &replay);
    assert_eq!(replayed.mean_pinned_bytes * 4, replayed.peak_pinned_bytes);
    let timeless = play("a 1 1000\nf 1\n", &replay);
    assert_eq!(timeless.mean_pinned_bytes, 0, "nothing is pinned at the end of a trace without time");
}

#[test]
fn a_minute_after_the_last_put_counts_even_if_the_trace_goes_on() {
    let idle_timeout = Some(Some(Duration::from_secs(70)));
    let replay = Replay { idle_timeout, ..Replay::default() };
    for text in ["a 1 10\nf 1\n", "a 1 10\nf 1\nt 30000000\n", "a 1 10\nf 1\nt 500000000\n"] {
        assert_eq!(play(text, &replay).pinned_after_60s_bytes, 2 * MIB, "{text}");
        // Ten seconds in front and 45 in the arena are over by then.
        assert_eq!(play(text, &Replay::default()).pinned_after_60s_bytes, 0, "{text}");
    }
}

#[test]
fn the_idle_timeout_may_be_zero_or_none() {
    let workload = named("bucket_switch");
    let retained =
        |idle_timeout| Replay { idle_timeout: Some(idle_timeout), ..Replay::default() }.play(&workload).unwrap();
    let (nothing, for_ever) = (retained(Some(Duration::ZERO)), retained(None));
    assert_eq!(nothing.pinned_after_60s_bytes, 0);
    assert_eq!(for_ever.pinned_after_60s_bytes, for_ever.peak_pinned_bytes);
    assert!(nothing.mean_pinned_bytes < for_ever.mean_pinned_bytes, "{nothing:?} {for_ever:?}");
    assert!(nothing.page_locks > for_ever.page_locks, "{nothing:?} {for_ever:?}");
}

#[test]
fn the_front_may_keep_one_buffer_or_none() {
    let workload = named("recsys_a100");
    for source in [SourceKind::Virtual, SourceKind::Discrete] {
        let limited = |buffers| {
            let replay =
                Replay { source, pool_size_limit: Some(buffers), auto_resize: Some(false), ..Replay::default() };
            replay.play(&workload).unwrap()
        };
        let (none, one, many) = (limited(0), limited(1), limited(100));
        assert_eq!((none.front_hits, none.pool_size_limit), (0, 0));
        assert!(one.front_hits < many.front_hits && one.evicted > many.evicted, "{one:?}");
        // Behind the front stands the arena: fewer hits are not more page-locks.
        assert!(none.page_locks <= many.page_locks + 3, "{none:?} {many:?}");
    }
}
