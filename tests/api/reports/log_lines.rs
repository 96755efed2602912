//! Lines as `log` receives them: level, text and order. All pools of the process share the count of checks.

use std::time::Duration;

use log::{Level, LevelFilter};
use pinpool::Rounding;
use pinpool::{Limit, Pool, PoolBuilder, Preset};

use crate::captured_log::{last_place, lines, lines_with_levels, listen, listen_from};
use crate::child::alone;
use crate::fixture::{LONG, heap, held_sink, over_sim, poll, with_manual_clock};

fn evicting_pool() -> PoolBuilder {
    heap().preset(Preset::TensorFlow).rounding(Rounding::Exact)
}

/// Requests a new size each time, so that after `limit` returns each return evicts.
fn churn(pool: &Pool, sizes: std::ops::Range<usize>) {
    sizes.for_each(|len| drop(pool.get(len).unwrap()));
}

#[test]
fn a_record_names_the_file_and_line_of_the_call_that_logs_it() {
    listen();
    let pool = heap().build().unwrap();
    let (file, line) = last_place();
    let source = std::fs::read_to_string(format!("{}/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let call = source.lines().nth(line as usize - 1).unwrap();
    assert!(lines().last().unwrap().contains(" created: ") && call.contains("log.created("), "{file}:{line}: {call}");
    drop(pool);
}

#[test]
fn one_check_in_ten_of_the_process_is_logged_in_tensorflows_words() {
    // The process counts checks, and other tests make checks too.
    alone(|| {
        let (first, second) = (evicting_pool().build().unwrap(), evicting_pool().build().unwrap());
        listen();
        // 100 returns fill the pool, and the next 1000 evict: check 1 raises the limit to 110 and is printed.
        churn(&first, 1..1101);
        // Nine more checks, of either pool, print nothing.
        churn(&second, 1..1101);
        (0..8).for_each(|n| churn(&first, 10_000 * (n + 1)..10_000 * (n + 1) + 1021));
        let mut kept = lines_with_levels();
        let silent_so_far = kept.len();
        churn(&second, 100_000..101_021);
        kept.extend(lines_with_levels());
        assert_eq!(silent_so_far, 2, "{kept:?}");
        assert!(kept.iter().all(|(level, _)| *level == Level::Info));
        let first = "PoolAllocator: After 1100 get requests, put_count=1100 evicted_count=1000 eviction_rate=0.909091 \
                     and unsatisfied allocation rate=1";
        assert_eq!((&*kept[0].1, &*kept[1].1), (first, "Raising pool_size_limit_ from 100 to 110"));
        assert_eq!(kept.len(), 4, "the eleventh check of the process is printed: {kept:?}");
        assert_eq!(kept[3].1, "Raising pool_size_limit_ from 110 to 121");
    });
}

#[test]
fn a_stuck_copy_is_warned_of_once() {
    let (pool, clock) = with_manual_clock(heap().preset(Preset::TensorFlow));
    let (stream, mut device, _gate) = held_sink(4096);
    listen();
    for _ in 0..2 {
        pool.get(4096).unwrap().copy_to(&stream, &mut device).unwrap();
        clock.advance_us(20_000_000);
        pool.maintain();
    }
    for _ in 0..3 {
        pool.maintain();
        clock.advance_us(3_000_000);
    }
    let kept = lines_with_levels();
    let [(Level::Warn, line), (Level::Warn, verdict)] = kept.as_slice() else {
        panic!("one warning, of the first copy alone, and the verdict: {kept:?}")
    };
    assert!(line.contains(" stuck: ") && line.contains(" stream_id="), "{line}");
    assert!(line.contains(" in_flight_for=40.0s; find"), "{line}");
    assert!(verdict.contains(" diagnosis: stuck_copy: a copy on stream_id="), "{verdict}");
}

#[test]
fn the_start_says_where_each_limit_comes_from() {
    listen();
    let pool = heap().max_bytes(1 << 20).name("loader").build().unwrap();
    let kept = lines_with_levels();
    let [(Level::Info, started)] = kept.as_slice() else { panic!("one line: {kept:?}") };
    let start = "pool[loader] created: preset=adaptive backend=heap pinned=no max=1.0MiB granule=128.0KiB";
    assert!(started.starts_with(start), "{started}");
    assert!(started.ends_with("; PINPOOL_MAX_BYTES=1MiB (builder), PINPOOL_BACKEND=heap (builder)"), "{started}");
    let process = format!(" version={} pid={}", env!("CARGO_PKG_VERSION"), std::process::id());
    assert!(started.contains(&process), "{started}");
    drop(pool);
    let _tensorflow = heap().preset(Preset::TensorFlow).build().unwrap();
    let kept = lines_with_levels();
    let started = &kept.last().unwrap().1;
    assert!(started.contains("PINPOOL_MAX_BYTES=none (implied)"), "{started}");
}

#[test]
fn growth_is_logged_at_each_doubling_from_64_mib_on() {
    let (pool, clock) = with_manual_clock(over_sim(Limit::Unlimited).name("p"));
    listen();
    let mut held = Vec::new();
    for _ in 0..40 {
        held.push(pool.get(8 << 20).unwrap());
        clock.advance_us(20_000);
        pool.maintain();
    }
    let kept = lines_with_levels();
    let grown: Vec<_> = kept.iter().filter(|(_, line)| line.starts_with("pool[p] grew: ")).collect();
    assert_eq!(grown.len(), 3, "at 64, 128 and 256 MiB of 320: {kept:?}");
    let (level, line) = grown[1];
    assert_eq!(*level, Level::Info);
    assert!(line.contains(" held=64.0MiB->128.0MiB max=none pins="), "{line}");
}

#[test]
fn debug_and_trace_say_more_of_pin_calls_and_of_requests_that_wait() {
    let pool = heap().max_bytes(1 << 20).wait(Duration::from_millis(1)).maintenance_thread(false).build().unwrap();
    listen_from(LevelFilter::Trace);
    let held = pool.get(1 << 20).unwrap();
    assert!(pool.get(4096).is_err());
    let kept = lines_with_levels();
    let of =
        |level: Level| kept.iter().filter(|(of, _)| *of == level).map(|(_, line)| line.as_str()).collect::<Vec<_>>();
    let [pin_call, waited] = of(Level::Debug)[..] else { panic!("two lines: {kept:?}") };
    assert!(pin_call.contains(" acquired: request=1048576B held=0B->1048576B pins=1 time="), "{pin_call}");
    assert!(waited.contains(" waited: request=4096B time=") && waited.ends_with(" served=no"), "{waited}");
    let [waiting] = of(Level::Trace)[..] else { panic!("one line: {kept:?}") };
    assert!(waiting.ends_with(" waiting: request=4096B rounded=4096B"), "{waiting}");
    drop(held);
}

#[test]
fn memory_that_is_not_pinned_is_warned_of_at_each_power_of_ten() {
    let builder = heap().max_bytes(1 << 20).wait(Duration::ZERO).on_full(pinpool::OnFull::Pageable);
    let (pool, clock) = with_manual_clock(builder);
    listen();
    let _all = pool.get(1 << 20).unwrap();
    for _ in 0..110 {
        // Each request is a separate shortage.
        drop(pool.get(4096).unwrap());
        clock.advance_us(2_000_000);
        pool.maintain();
    }
    let kept = lines_with_levels();
    let begin_with = |part: &str| kept.iter().filter(|(_, line)| line.contains(part)).count();
    assert_eq!([" pageable: ", " refused: ", " shortage_ended: "].map(begin_with), [3; 3], "{kept:?}");
    assert!(kept.iter().any(|(_, line)| line.contains("request=4.0KiB count=10 pageable=4.0KiB")), "{kept:?}");
}

#[test]
fn a_full_pool_is_no_warning_and_a_shortage_lasts_while_requests_wait() {
    let (pool, clock) = with_manual_clock(heap().max_bytes(1 << 20).wait(LONG));
    listen();
    let held = pool.get(1 << 20).unwrap();
    let mut waiting = pool.get_async(1 << 20);
    assert!(poll(&mut waiting).is_pending());
    clock.advance_us(3_000_000);
    pool.maintain();
    let kept = lines_with_levels();
    let [(Level::Info, line)] = kept.as_slice() else { panic!("one line: {kept:?}") };
    assert!(line.contains(" full: request=1.0MiB held=1.0MiB "), "{line}");
    drop(held);
    assert!(poll(&mut waiting).is_ready());
    clock.advance_us(3_000_000);
    pool.maintain();
    let kept = lines_with_levels();
    let [(Level::Info, line)] = kept.as_slice() else { panic!("one line: {kept:?}") };
    // The shortage lasts until the wait ends, and its record says what it cost.
    assert!(line.contains(" shortage_ended: lasted=3.0s requests=1 waited="), "{line}");
}

#[test]
fn a_miss_that_is_served_from_held_memory_is_traced() {
    let pool = heap().maintenance_thread(false).build().unwrap();
    let _first = pool.get(4096).unwrap();
    listen_from(LevelFilter::Trace);
    let _second = pool.get(8192).unwrap();
    let kept = lines_with_levels();
    let [(Level::Trace, line)] = kept.as_slice() else { panic!("one line: {kept:?}") };
    assert!(line.ends_with(" carved: bytes=8192B"), "{line}");
}

#[test]
fn in_steady_state_nothing_repeats() {
    let (pool, clock) = with_manual_clock(heap().max_bytes(64 << 20).name("p"));
    listen();
    // Eight buffers of recurring sizes each second, for an hour.
    for second in 0..3600 {
        drop((0..8).map(|n| pool.get((n + 1) << 16).unwrap()).collect::<Vec<_>>());
        clock.advance_us(1_000_000);
        if second % 2 == 0 {
            pool.maintain();
        }
    }
    let kept: Vec<_> = lines_with_levels().into_iter().map(|(_, line)| line).collect();
    let [warming, healthy] = kept.as_slice() else { panic!("two lines: {kept:?}") };
    assert!(warming.starts_with("pool[p] diagnosis: warming_up: held 0B->"), "{warming}");
    let start = "pool[p] diagnosis: healthy: 80 of 80 requests were served immediately, ";
    assert!(healthy.starts_with(start), "{healthy}");
}

#[test]
fn a_pool_that_is_too_small_says_how_much_it_needs() {
    let (pool, clock) = with_manual_clock(heap().max_bytes(64 << 20).wait(Duration::ZERO));
    listen();
    for _ in 0..60 {
        let held: Vec<_> = (0..4).map(|_| pool.get(16 << 20).unwrap()).collect();
        assert!(pool.get(8 << 20).is_err(), "72 MiB are needed");
        drop(held);
        clock.advance_us(1_000_000);
        pool.maintain();
    }
    let kept = lines_with_levels();
    let verdicts: Vec<_> = kept.iter().filter(|(_, line)| line.contains(" diagnosis: ")).collect();
    let [(Level::Warn, line)] = verdicts[..] else { panic!("one verdict: {kept:?}") };
    assert!(line.contains(" limit_too_small: ") && line.contains("raise PINPOOL_MAX_BYTES to 72.0MiB"), "{line}");
}

#[test]
fn a_pool_without_a_window_says_why_of_the_time_so_far() {
    let why = heap().max_bytes(1 << 20).build().unwrap().diagnose();
    assert_eq!((why.cause.name(), why.is_alarm, why.remedy.as_deref()), ("healthy", false, None));
    assert!(why.to_string().starts_with("healthy: no requests, 0B held"), "{why}");
}
