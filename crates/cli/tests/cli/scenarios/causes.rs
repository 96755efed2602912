//! A program for each cause.

use std::collections::VecDeque;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use pinpool::Rounding;
use pinpool::{Backend, PinnedBuf, Preset};
use pinpool_replay::SimSource;
use pinpool_testing::{SinkMemory, SinkStream};

use super::{MIB, Program, STEPS_IN_A_SECOND};
use crate::tool::{finish, pinpool, until};

#[test]
fn a_program_that_begins_ever_more_workers_warms_up() {
    let mut program = Program::one(|pool| pool);
    let mut held = VecDeque::new();
    program.run(60, |program, step| {
        held.push_back(program.must_get("images", 4 * MIB));
        while held.len() as u64 > 4 + 8 * (step / (10 * STEPS_IN_A_SECOND)) {
            drop(held.pop_front());
        }
    });
    program.diagnosed(held).check("warming_up", false);
}

/// Six threads that each hold a buffer for half of the time, under a limit of four buffers.
fn throttled(program: &mut Program) -> Vec<(u32, PinnedBuf, u64)> {
    let mut held: Vec<(u32, PinnedBuf, u64)> = Vec::new();
    (0..6).for_each(|thread| held.extend(program.get(thread, "images", 16 * MIB).map(|buffer| (thread, buffer, 0))));
    program.run(60, |program, step| {
        let over: Vec<_> = held.extract_if(.., |(.., since)| *since + 2 <= step).collect();
        for (thread, buffer, _) in over {
            drop(buffer);
            held.extend(program.get(thread, "images", 16 * MIB).map(|buffer| (thread, buffer, step)));
        }
        held.extend(program.served().into_iter().map(|(thread, buffer)| (thread, buffer, step)));
    });
    held
}

#[test]
fn threads_that_wait_for_each_other_need_a_higher_limit() {
    let mut program = Program::one(|pool| pool.max_bytes(64 << 20));
    let held = throttled(&mut program);
    // A variable would have no effect, because the program sets the limit in its code.
    let (said, dump) = (program.pools[0].diagnose().to_string(), program.pools[0].dump().to_string());
    assert!(said.ends_with("in the program, set PINPOOL_MAX_BYTES=100663296"), "{said}");
    assert!(dump.ends_with("to do: raise PINPOOL_MAX_BYTES to 96.0MiB"), "{dump}");
    program.diagnosed(held).check("limit_too_small", true);
}

#[test]
fn a_queue_before_a_slow_consumer_is_told_from_it() {
    let mut program = Program::one(|pool| pool.max_bytes(256 << 20));
    let mut queue = VecDeque::new();
    program.run(60, |program, step| {
        // The producer runs as fast as it gets memory, up to 64 batches ahead.
        queue.extend(program.served().into_iter().map(|(_, buffer)| buffer));
        while program.asked.is_empty() && queue.len() < 64 {
            queue.extend(program.get(0, "queue", 8 * MIB));
        }
        if step % 2 == 0
            && let Some(buffer) = queue.pop_front()
        {
            Program::put_elsewhere(buffer);
        }
    });
    program.diagnosed(queue).check("slow_consumer", true);
}

/// Keeps one in twenty label buffers, or, with several pools, all label buffers of the pool `leaking`.
fn leak(program: &mut Program, seconds: u64, pools: usize, leaking: usize) -> Vec<PinnedBuf> {
    let mut kept = Vec::new();
    program.run(seconds, |program, step| {
        let pool = usize::try_from(step).unwrap() % pools;
        let labels = program.get_of(pool, 0, "loader/labels", MIB).unwrap();
        drop(program.get_of(pool, 0, "loader/images", 4 * MIB).unwrap());
        if pool == leaking && (pools > 1 || step % 20 == 0) { kept.push(labels) } else { drop(labels) }
    });
    kept
}

#[test]
fn a_leak_that_began_with_the_program_is_one_after_half_a_minute() {
    let mut program = Program::one(|pool| pool);
    let kept = leak(&mut program, 36, 1, 0);
    program.diagnosed(kept).check("leak", true);
}

#[test]
fn of_twelve_pools_the_one_that_leaks_is_named() {
    let names = ["s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8", "s9", "s10", "s11"];
    let mut program = Program::new(&names, |pool| pool);
    let kept = leak(&mut program, 60, 12, 7);
    let said = program.diagnosed(kept);
    assert_eq!(said.pool, "s7");
    said.check("leak", true);
    let alarms = said.log.iter().filter(|line| line.contains("leak: "));
    assert!(alarms.clone().count() > 0 && alarms.clone().all(|line| line.starts_with("pool[s7] ")), "{said:?}");
}

#[test]
fn lengths_of_chance_never_recur_and_cost_nothing_under_adaptive() {
    let mut program = Program::one(|pool| pool);
    program.load(60, 3, |program, _| MIB + program.below(31 * MIB));
    program.diagnosed(()).check("sizes_never_recur", false);
}

#[test]
fn lengths_of_chance_pin_each_time_under_tensorflow() {
    let exact = |pool: pinpool::PoolBuilder| {
        pool.preset(Preset::TensorFlow).rounding(Rounding::Exact).max_bytes(pinpool::Limit::Unlimited)
    };
    let mut program = Program::one(|pool| exact(pool).pool_size_limit(20));
    program.load(60, 3, |program, _| MIB + program.below(31 * MIB));
    let said = program.diagnosed(());
    said.check("sizes_never_recur", true);
    // The recommended preset refuses `exact`, so the recommendation removes the rounding.
    assert!(said.log.iter().all(|line| line.contains("adaptive without PINPOOL_ROUNDING")), "{said:?}");
}

#[test]
fn sizes_that_recur_and_are_evicted_before_are_thrashing() {
    let mut program = Program::one(|pool| pool.preset(Preset::TensorFlow).pool_size_limit(4).auto_resize(false));
    program.load(60, 1, |_, step| MIB << (step % 8));
    let said = program.diagnosed(());
    said.check("thrashing", true);
    // The recommended limit keeps one buffer of each size.
    let remedy = "raise PINPOOL_POOL_SIZE_LIMIT to 8";
    assert!(said.log.last().is_some_and(|line| line.split("; ").any(|part| part == remedy)), "{said:?}");
}

#[test]
fn memory_that_is_pinned_for_each_burst_and_released_after_it_is_thrashing() {
    let mut program = Program::one(|pool| pool.idle_timeout(Duration::from_millis(100)));
    let mut held = Vec::new();
    program.run(60, |program, step| match step % 40 {
        0..10 => held.push(program.must_get("images", 8 * MIB)),
        10 => std::mem::take(&mut held).into_iter().for_each(drop),
        _ => {}
    });
    let said = program.diagnosed(held);
    said.check("thrashing", true);
    assert!(said.log.last().is_some_and(|line| line.contains("raise PINPOOL_IDLE_TIMEOUT")), "{said:?}");
}

#[test]
fn unlimited_idle_memory_of_other_sizes_is_a_hoard() {
    let small = Arc::new(SimSource::new(512 << 20));
    let mut program = Program::one(|pool| {
        let pool = pool.preset(Preset::TensorFlow).rounding(Rounding::Exact).pool_size_limit(1 << 20);
        pool.backend(Backend::Source(small.clone())).max_bytes(pinpool::Limit::Unlimited)
    });
    program.load(60, 2, |program, _| MIB + program.below(MIB));
    program.diagnosed(()).check("idle_hoard", true);
}

#[test]
fn a_backend_that_refuses_is_no_matter_of_a_limit() {
    let small = Arc::new(SimSource::new(64 << 20));
    let mut program =
        Program::one(|pool| pool.backend(Backend::Source(small.clone())).max_bytes(pinpool::Limit::Unlimited));
    let held = throttled(&mut program);
    program.diagnosed(held).check("memory_refused", true);
}

#[test]
fn copies_from_memory_that_is_not_pinned_are_named() {
    let mut program = Program::one(|pool| pool.backend(Backend::Heap));
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(MIB));
    program.run(60, |program, step| {
        let buffer = program.must_get("images", MIB);
        if step % 4 == 0 {
            drop(Program::copy(buffer, &stream, &mut device));
            stream.synchronize().unwrap();
        } else {
            drop(buffer);
        }
    });
    program.diagnosed(()).check("not_pinned", false);
}

#[test]
fn memory_that_another_process_holds_is_waited_for() {
    let limit = format!("scenario-{}", std::process::id());
    let mut other = pinpool(&["load", "--synthetic", "64", "--batch-bytes", "48MiB", "--idle", "600", "--quiet"]);
    other.env("PINPOOL_LEDGER", &limit).env("PINPOOL_MAX_BYTES", "128MiB").env("PINPOOL_RESERVE", "48MiB");
    let mut other = other.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until("the other process holds memory", || {
        finish(&mut pinpool(&["top", "--all"]))
            .stdout
            .contains(&format!("shared limit {limit}: 128.0MiB, held 48.0MiB"))
    });
    let mut program = Program::one(|pool| pool.setting("PINPOOL_LEDGER", &limit).max_bytes(128 << 20));
    let held = throttled(&mut program);
    program.diagnosed(held).check("other_process", true);
    other.kill().unwrap();
    other.wait().unwrap();
}
