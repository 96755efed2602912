//! Requests that wait: for a limit, a consumer, a source or other processes.

use super::*;

#[test]
fn a_limit_too_small_names_the_need_rounded_up() {
    let mut run = Run::new();
    let short = |of: &mut Snapshot| {
        (of.delayed_requests, of.own_waits) = (of.delayed_requests + 300, of.own_waits + 300);
        (of.used_bytes, of.used) = (4 * GIB, 8);
        of.needed_bytes = 6 * GIB + 200 * MIB;
    };
    let expected = "limit_too_small: 300 of 1000 requests waited; raise PINPOOL_MAX_BYTES to 6.2GiB";
    assert_eq!(run.logged(short).unwrap(), expected);
    let diagnosis = run.window(short);
    assert_eq!(diagnosis.setting, Some((LIMIT, 6 * GIB + 200 * MIB)));
    assert_eq!(diagnosis.lines().last().unwrap(), "  export PINPOOL_MAX_BYTES=6652166144");
    run.now.set_in_code = "PINPOOL_NAME PINPOOL_MAX_BYTES".to_owned();
    assert_eq!(run.window(short).lines()[5], "  in the program, set PINPOOL_MAX_BYTES=6652166144");
    assert_eq!(run.logged(short), None);
    let more = |of: &mut Snapshot| {
        short(of);
        of.needed_bytes = 7 * GIB;
    };
    assert!(run.logged(more).unwrap().contains("to 7.0GiB"));
    assert_eq!(run.logged(|of| of.delayed_requests += 2), None, "tolerable, and not yet calm");
}

#[test]
fn a_slow_consumer_is_not_advised_to_use_more_memory() {
    let mut run = Run::new();
    let queued = |of: &mut Snapshot| {
        // 32 buffers fill the limit, and 20 buffers are returned per second; one request waits for the next buffer.
        (of.requests, of.returns) = (of.requests - 800, of.returns - 800);
        of.delayed_requests += 190;
        held(of, "queue", 32, 2);
        (of.used_bytes, of.max_bytes, of.needed_bytes) = (256 * MIB, Some(256 * MIB), 264 * MIB);
    };
    let diagnosis = run.window(queued);
    assert_eq!((diagnosis.cause, diagnosis.is_alarm, diagnosis.setting), (Cause::SlowConsumer, true, None));
    let found =
        "190 of 200 requests waited, and 20.0 buffers are returned per second, each after 1.6s (mostly tag queue)";
    assert_eq!(diagnosis.found, found);
    assert!(diagnosis.remedy.as_ref().unwrap().contains("more memory lengthens the queue"));
    assert_eq!(diagnosis.evidence[0], "serving all waiting requests would use 3.1 % more memory");
    let other = |change: fn(&mut Snapshot)| {
        Run::new().cause(|of| {
            queued(of);
            change(of);
        })
    };
    // Six threads need 96 MiB, and the limit is 64 MiB: serving all of them would use half as much memory again.
    let threads = |of: &mut Snapshot| {
        (of.used, of.used_bytes, of.max_bytes, of.needed_bytes) = (4, 64 * MIB, Some(64 * MIB), 96 * MIB);
    };
    assert_eq!(other(threads), Cause::PoolFull);
    // Requests are refused: the program continues, and no queue delays it.
    assert_eq!(other(|of| (of.requests, of.failed_requests) = (of.requests + 150, 150)), Cause::LimitTooSmall);
    // Threads that return the buffers that they requested wait for memory, however little memory is missing.
    assert_eq!(other(|of| of.own_waits = of.delayed_requests), Cause::LimitTooSmall);
    // The requests wait for a device that reads the buffers.
    assert_eq!(other(|of| of.in_flight_bytes = 200 * MIB), Cause::PoolFull);
}

#[test]
fn a_loader_before_a_busy_device_loses_no_time() {
    let mut run = Run::new();
    let diagnosis = run.window(|of| {
        (of.delayed_requests, of.waiting_ns) = (1000, 9_900_000_000);
        held(of, "batches", 4, 0);
        (of.held_bytes, of.max_bytes, of.needed_bytes) = (4 * MIB, Some(4 * MIB), 5 * MIB);
    });
    assert!(!diagnosis.is_alarm && diagnosis.setting.is_none() && diagnosis.lost.total_ns() == 0, "{diagnosis}");
    let text = diagnosis.lines().join(" ");
    for both in ["always busy, do nothing", "raise PINPOOL_MAX_BYTES", "buffers are returned per second"] {
        assert!(text.contains(both), "{both} is missing in: {text}");
    }
}

#[test]
fn a_source_refusal_is_not_blamed_on_the_limit() {
    let mut run = Run::new();
    let refused = |of: &mut Snapshot| {
        (of.delayed_requests, of.failed_requests, of.is_by_source) = (of.delayed_requests + 300, 300, true);
        (of.held_bytes, of.used_bytes, of.needed_bytes) = (GIB, GIB, 2 * GIB);
    };
    let diagnosis = run.window(refused);
    assert_eq!((diagnosis.cause, diagnosis.is_alarm, diagnosis.setting), (Cause::MemoryRefused, true, None));
    // Requests wait for the source during a whole window.
    let waiting =
        |of: &mut Snapshot| (of.requests, of.returns, of.waiting) = (of.requests - 1000, of.returns - 1000, 1);
    assert_eq!(run.cause(waiting), Cause::MemoryRefused);
}

#[test]
fn memory_held_by_other_processes_is_blamed_on_them() {
    let mut run = Run::new();
    let short = |of: &mut Snapshot| {
        of.delayed_requests += 100;
        (of.limit, of.others_bytes) = (Some("PINPOOL_LEDGER_MAX_BYTES".into()), Some(3 * GIB));
        of.needed_bytes = GIB;
    };
    let diagnosis = run.window(short);
    assert_eq!(diagnosis.cause, Cause::OtherProcess);
    assert!(diagnosis.found.ends_with("other processes 3.0GiB"), "{diagnosis}");
    // The needed bytes exceed the pool's own limit.
    let own = |of: &mut Snapshot| {
        short(of);
        (of.needed_bytes, of.failed_requests) = (5 * GIB, of.failed_requests + 1);
    };
    assert_eq!(run.cause(own), Cause::LimitTooSmall);
}

#[test]
fn a_pool_that_keeps_most_of_a_shared_limit_names_itself() {
    let short = |of: &mut Snapshot, others_bytes: u64, oldest_s: u64| {
        held(of, "cache", 3072, oldest_s);
        (of.delayed_requests, of.held_bytes) = (of.delayed_requests + 100, 3 * GIB);
        (of.limit, of.others_bytes, of.needed_bytes) = (Some(LIMIT.into()), Some(others_bytes), 3 * GIB);
    };
    let mut run = Run::new();
    let diagnosis = run.window(|of| short(of, GIB, 30));
    assert_eq!((diagnosis.cause, diagnosis.is_alarm), (Cause::LimitTooSmall, true), "{diagnosis}");
    assert!(diagnosis.remedy.unwrap().starts_with("return the buffers of tag cache (3.0GiB) sooner"));
    assert_eq!(run.cause(|of| short(of, GIB, 1)), Cause::OtherProcess, "its buffers return");
    assert_eq!(run.cause(|of| short(of, 4 * GIB, 30)), Cause::OtherProcess, "others hold more");
}

#[test]
fn few_waiting_requests_matter_only_for_their_time() {
    let mut run = Run::new();
    run.window(|of| of.held_bytes = GIB);
    let short = |requests: u64, waiting_ns: u64| {
        move |of: &mut Snapshot| {
            (of.requests, of.returns) = (of.requests - 900, of.returns - 900);
            (of.delayed_requests, of.waiting_ns) = (of.delayed_requests + requests, of.waiting_ns + waiting_ns);
            of.needed_bytes = 5 * GIB;
        }
    };
    let causes = [(2, 99_000_000), (2, 100_000_000), (3, 0)]
        .map(|(requests, waiting_ns)| run.cause(short(requests, waiting_ns)));
    assert_eq!(causes, [Cause::Healthy, Cause::PoolFull, Cause::PoolFull]);
}

#[test]
fn a_pausing_consumer_needs_the_buffers_filled_during_a_pause() {
    let mut run = Run::new();
    // 40 buffers of 1 MiB per second; during a pause of 5 s, four threads wait for 3.4 s each.
    let paused = |of: &mut Snapshot| {
        (of.requests, of.returns) = (of.requests - 736, of.returns - 736);
        (of.delayed_requests, of.waiting_ns) = (of.delayed_requests + 4, of.waiting_ns + 13_600_000_000);
        (of.used, of.used_bytes) = (4, 4 * MIB);
        (of.max_bytes, of.needed_bytes) = (Some(64 * MIB), 68 * MIB);
    };
    let diagnosis = run.window(paused);
    assert_eq!((diagnosis.cause, diagnosis.is_alarm), (Cause::LimitTooSmall, true), "{diagnosis}");
    let needed = diagnosis.setting.map(|(name, bytes)| (name, bytes / MIB));
    assert_eq!(needed, Some((LIMIT, 64 + 264 * 34 / 66)), "{diagnosis}");
    assert!(diagnosis.to_string().contains("3.4s each, because the consumer pauses"), "{diagnosis}");
    // If most requests wait, the consumer is slow.
    let busy = |of: &mut Snapshot| {
        paused(of);
        of.delayed_requests += 200;
    };
    assert_ne!(run.cause(busy), Cause::LimitTooSmall);
}
