//! The report of a request that finds no memory: in the error, and once in the log.

use std::fs;
use std::task::Poll;
use std::time::Duration;

use log::Level;
use pinpool::unstable::ManualClock;
use pinpool::{Backend, Limit, Pool, PoolBuilder, Preset, Request, Rounding};
use pinpool_testing::SourceCall;

use crate::captured_log::{lines_with_levels, listen};
use crate::fixture::{LONG, MIB, faulty_sim, over, poll, with_manual_clock};
use crate::until::until;

/// A machine of 1,000 MiB, 800 of them free.
fn machine() -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir(root.path().join("proc")).unwrap();
    let meminfo = "MemTotal:  1024000 kB\nMemFree: 102400 kB\nMemAvailable: 819200 kB\n";
    fs::write(root.path().join("proc/meminfo"), meminfo).unwrap();
    root
}

fn pool_of(backend: Backend) -> PoolBuilder {
    Pool::builder().without_env().backend(backend).wait(Duration::ZERO)
}

#[test]
fn a_request_over_the_limit_reports_the_holders() {
    let (root, clock) = (machine(), ManualClock::default());
    let builder =
        pool_of(Backend::Heap).max_bytes(8 << 20).unstable_host_root(root.path()).unstable_clock(clock.clone());
    let pool = builder.name("loader").build().unwrap();
    let (images, labels) = (pool.tagged("loader/images"), pool.tagged("loader/labels"));
    let _images: Vec<_> = (0..6).map(|_| images.get(MIB).unwrap()).collect();
    clock.advance_us(90_000_000);
    pool.maintain();
    let (_labels, _untagged) = (labels.get(512 << 10).unwrap(), pool.get(MIB).unwrap());
    listen();
    let error = labels.get(MIB).unwrap_err();
    assert!(error.is_limit());
    let body = "\
usage on host, backend heap (adaptive):
  6.0MiB loader/images (6 buffers, the oldest 90.0s)
  1.0MiB (untagged) (1 buffer)
  512.0KiB loader/labels (1 buffer, the oldest 0s)
held 8.0MiB, in use 7.5MiB, idle 0B, in flight 0B, free 512.0KiB; limit 8.0MiB, peak 8.0MiB
system: 800.0MiB free of 1000.0MiB (machine)
likely cause: too much memory is in use: buffers are returned late or never; the oldest is 90.0s old (tag loader/images)
to do: return buffers sooner, lower the prefetch, or raise PINPOOL_MAX_BYTES to 8.5MiB";
    let text = error.report();
    let (first, rest) = text.split_once('\n').unwrap();
    let start = "cannot allocate 1.0MiB: the pool limit of 8.0MiB is reached (PINPOOL_MAX_BYTES); held";
    assert!(first.starts_with(start), "{first}");
    assert_eq!(rest, body);
    assert_eq!(error.to_string(), first, "one line");
    let kept = lines_with_levels();
    let reports: Vec<_> = kept.iter().filter(|(_, line)| line.contains("out_of_memory")).collect();
    let [(Level::Warn, line)] = reports[..] else { panic!("one block: {kept:?}") };
    let headline = "pool[loader] out_of_memory: cannot allocate 1.0MiB for loader/labels: the pool \
                    limit of 8.0MiB is reached (PINPOOL_MAX_BYTES)";
    assert_eq!(*line, format!("{headline}\n{body}"));
}

#[test]
fn the_block_is_logged_at_the_first_failure_and_at_each_power_of_ten() {
    let source = faulty_sim();
    let pool = over(source.clone(), 1 << 20).build().unwrap();
    listen();
    // A slow driver call does not cause a block.
    let gate = source.hold(SourceCall::Acquire);
    let mut late = pool.get_async(Request::new(MIB).timeout(Duration::from_millis(1)));
    until("it is late", || matches!(poll(&mut late), Poll::Ready(Err(_))));
    drop((gate, late));
    let _all = pool.get_with(Request::new(MIB).timeout(LONG)).unwrap();
    let errors: Vec<_> = (0..120).map(|_| pool.get(4096).unwrap_err().report()).collect();
    assert!(errors.iter().all(|text| text.contains("usage on host")), "each error has it");
    let kept = lines_with_levels();
    assert_eq!(kept.iter().filter(|(_, line)| line.contains(" out_of_memory: ")).count(), 3, "1, 10 and 100");
}

#[test]
fn a_refusal_of_the_backend_says_its_words_and_its_cause() {
    for (preset, rounding) in [(Preset::Adaptive, Rounding::Eighths), (Preset::TensorFlow, Rounding::Exact)] {
        let root = machine();
        let pool = pool_of(Backend::Source(std::sync::Arc::new(pinpool_replay::SimSource::new(2 << 20))))
            .preset(preset)
            .setting("rounding", rounding)
            .max_bytes(Limit::Unlimited)
            .unstable_host_root(root.path());
        let tagged = pool.build().unwrap().tagged("t");
        let _held = tagged.get(MIB).unwrap();
        listen();
        let error = tagged.get(2 * MIB).unwrap_err();
        assert!(error.is_backend(), "{error}");
        let text = error.report();
        for part in [
            "\nusage on host, backend sim (",
            "\n  1.0MiB t (1 buffer, the oldest ",
            "\ndriver: ",
            "\nlikely cause: the backend refused although the machine has 800.0MiB free",
            "\nto do: request a smaller buffer; or free pinned memory",
        ] {
            assert!(text.contains(part), "{part:?} is missing in: {text}");
        }
        let kept = lines_with_levels();
        let is_report = |line: &str| {
            line.ends_with("for t: sim failed: 2097152 bytes refused, 2097152 of 2097152 bytes are held")
                || line.contains("out_of_memory: cannot allocate 2.0MiB for t: ")
        };
        assert_eq!(kept.iter().filter(|(_, line)| is_report(line)).count(), 1, "{kept:?}");
    }
}

#[test]
fn free_memory_in_pieces_is_called_that_by_error_dump_and_why() {
    let pool = pool_of(Backend::Heap).max_bytes(64 << 20).build().unwrap();
    let mut buffers: Vec<_> = (0..64).map(|_| pool.get(MIB).unwrap()).collect();
    let mut nth = 0;
    buffers.retain(|_| {
        nth += 1;
        nth % 2 == 0
    });
    let error = pool.get(2 * MIB).unwrap_err();
    let (text, report, why) = (error.to_string(), error.report(), pool.diagnose());
    assert!(text.contains("idle 0B, in flight 0B, free 32.0MiB"), "{text}");
    assert!(report.contains("idle 0B, in flight 0B, free 32.0MiB; limit 64.0MiB"), "{report}");
    let cause = "likely cause: 32.0MiB free, but the largest free piece is 1.0MiB\nto do: raise PINPOOL_MAX_BYTES to 66.0MiB, or use \
                 fewer sizes";
    assert!(report.ends_with(cause), "{report}");
    assert_eq!((why.cause.name(), why.is_alarm), ("limit_too_small", true));
    assert_eq!(why.found, "32.0MiB free, but the largest free piece is 1.0MiB");
    assert!(why.to_string().contains("0B idle, 32.0MiB free"), "{why}");
}

#[test]
fn after_a_request_that_failed_why_has_the_cause_of_the_failure() {
    let (pool, clock) = with_manual_clock(pool_of(Backend::Heap).max_bytes(8 << 20));
    let cache = pool.tagged("cache");
    let mut kept = Vec::new();
    let error = loop {
        match pool.tagged("batch").get(2 * MIB).and_then(|_batch| cache.get(MIB)) {
            Ok(buffer) => kept.push(buffer),
            Err(error) => break error,
        }
    };
    let why = pool.diagnose();
    assert_eq!((why.cause.name(), why.is_alarm), ("limit_too_small", true), "{why}");
    assert!(why.found.as_str().ends_with("old (tag cache)"), "{why}");
    let report = error.report();
    assert!(report.contains(why.found.as_str()) && report.ends_with(why.remedy.as_deref().unwrap()), "{why}");
    // A later diagnosis includes what came after the failure.
    drop(kept);
    (0..20).for_each(|_| drop(pool.get(MIB).unwrap()));
    clock.advance_us(11_000_000);
    pool.maintain();
    assert_ne!(pool.diagnose().cause.name(), "limit_too_small");
}
