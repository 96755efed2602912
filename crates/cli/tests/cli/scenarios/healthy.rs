//! Programs that resemble a cause and are healthy.

use std::collections::VecDeque;
use std::time::Duration;

use pinpool::unstable::Rounding;
use pinpool::{PoolBuilder, Preset};

use super::{MIB, Program, STEPS_IN_A_SECOND};

/// Programs that hold a few buffers at a time: what they resemble, their seconds, buffers held, settings and lengths.
type Load = (&'static str, u64, usize, fn(PoolBuilder) -> PoolBuilder, fn(u64) -> usize);

#[test]
fn steady_loads_are_healthy() {
    const SIXTEEN: fn(u64) -> usize = |step| MIB + usize::try_from(step % 16).unwrap() * 2 * MIB;
    let exact = |pool: PoolBuilder| pool.preset(Preset::TensorFlow).setting("rounding", Rounding::Exact);
    let loads: [Load; 4] = [
        ("warming up, but all is taken at once", 11, 3, |pool| pool, |_| 4 * MIB),
        ("sizes that never recur, but sixteen recur", 80, 3, |pool| pool, SIXTEEN),
        ("thrashing, but sixteen sizes are within the limit", 80, 3, exact, SIXTEEN),
        (
            "sizes that drift, but what is there serves them",
            120,
            3,
            |pool| pool,
            |step| 8 * MIB + usize::try_from(step / STEPS_IN_A_SECOND).unwrap() * 65_536,
        ),
    ];
    for (name, seconds, held, set, len) in loads {
        let mut program = Program::new(&[name], set);
        program.load(seconds, held, |_, step| len(step));
        let said = program.diagnosed(());
        said.check("healthy", false);
        said.check_healthy();
    }
}

#[test]
fn a_data_set_that_is_read_for_half_a_minute_and_kept_is_no_leak() {
    let mut program = Program::one(|pool| pool);
    let mut kept = Vec::new();
    program.run(36, |program, step| {
        kept.push(program.must_get("samples", MIB));
        if step % 4 == 0 {
            drop(program.must_get("scratch", MIB));
        }
    });
    program.diagnosed(kept).check_calm(&["healthy", "warming_up"]);
}

#[test]
fn a_cache_that_fills_is_no_leak() {
    let mut program = Program::one(|pool| pool);
    let mut cache = Vec::new();
    program.run(100, |program, step| {
        let seconds = step / STEPS_IN_A_SECOND;
        // Ever fewer entries are new.
        let every = 1 << (seconds / 10).min(20);
        let entry = program.must_get("cache", MIB);
        if step % every == 0 { cache.push(entry) } else { drop(entry) }
    });
    program.diagnosed(cache).check_healthy();
}

#[test]
fn a_working_set_that_is_taken_at_the_start_and_kept_is_no_leak() {
    let mut program = Program::one(|pool| pool);
    let weights: Vec<_> = (0..200).map(|_| program.must_get("weights", 2 * MIB)).collect();
    program.load(80, 4, |_, _| 4 * MIB);
    program.diagnosed(weights).check_healthy();
}

#[test]
fn more_requests_at_once_are_no_leak() {
    let mut program = Program::one(|pool| pool);
    let mut requests = VecDeque::new();
    program.run(80, |program, step| {
        let load = 1 + step / (10 * STEPS_IN_A_SECOND);
        for _ in 0..load {
            requests.push_back(program.must_get("requests", MIB));
        }
        while requests.len() as u64 > 10 * load {
            drop(requests.pop_front());
        }
    });
    program.diagnosed(requests).check_calm(&["healthy", "warming_up"]);
}

#[test]
fn a_burst_now_and_then_is_no_thrashing() {
    let mut program = Program::one(|pool| pool);
    let mut burst = Vec::new();
    program.run(120, |program, step| {
        drop(program.must_get("images", MIB));
        match step % (40 * STEPS_IN_A_SECOND) {
            20..40 => burst.push(program.must_get("burst", 16 * MIB)),
            60 => std::mem::take(&mut burst).into_iter().for_each(drop),
            _ => {}
        }
    });
    program.diagnosed(burst).check_healthy();
}

#[test]
fn one_epoch_and_silence_is_no_thrashing() {
    let mut program = Program::one(|pool| pool.idle_timeout(Duration::from_secs(5)));
    program.load(40, 4, |_, _| 4 * MIB);
    program.pause(60);
    program.diagnosed(()).check_healthy();
}

#[test]
fn epochs_with_a_short_last_batch_and_an_evaluation_of_another_size_are_healthy() {
    let mut program = Program::one(|pool| pool);
    for _ in 0..4 {
        program.load(20, 4, |_, step| if step % 100 == 99 { 3 * MIB / 2 } else { 8 * MIB });
        program.load(5, 2, |_, _| 20 * MIB);
    }
    program.diagnosed(()).check_healthy();
}

#[test]
fn a_checkpoint_now_and_then_is_no_hoard() {
    let mut program = Program::one(|pool| pool.max_bytes(1 << 30));
    for _ in 0..4 {
        let shards: Vec<_> = (0..12).map(|_| program.must_get("checkpoint", 64 * MIB)).collect();
        program.step();
        shards.into_iter().for_each(drop);
        program.load(25, 2, |_, _| 2 * MIB);
    }
    program.diagnosed(()).check_healthy();
}

#[test]
fn a_full_queue_whose_producer_does_not_wait_is_no_slow_consumer() {
    let mut program = Program::one(|pool| pool.max_bytes(256 << 20));
    let mut queue = VecDeque::new();
    program.run(60, |program, step| {
        // 32 buffers are the whole limit, and no more are requested.
        while queue.len() < 32 {
            queue.push_back(program.must_get("queue", 8 * MIB));
        }
        if step % 2 == 0 {
            Program::put_elsewhere(queue.pop_front().unwrap());
        }
    });
    program.diagnosed(queue).check_healthy();
}

#[test]
fn a_loader_before_a_busy_device_is_no_alarm_and_loses_nothing() {
    // Batches of prefetch, and batches that the device takes at each step of the program.
    for (prefetch, taken) in [(2, 10), (2, 2), (4, 5), (6, 4), (8, 2)] {
        let mut program = Program::one(|pool| pool.max_bytes(prefetch << 20));
        let mut queue = VecDeque::new();
        program.run(30, |program, _| {
            for _ in 0..taken {
                queue.extend(program.served().into_iter().map(|(_, buffer)| buffer));
                while program.asked.is_empty() {
                    queue.extend(program.get(0, "batches", MIB));
                }
                Program::put_elsewhere(queue.pop_front().unwrap());
            }
        });
        let said = program.diagnosed(queue);
        said.check("pool_full", false);
        assert!(said.causes_logged().iter().all(|cause| ["pool_full", "warming_up"].contains(cause)), "{said:?}");
    }
}

#[test]
fn a_request_that_waits_once_needs_no_higher_limit() {
    let mut program = Program::one(|pool| pool.max_bytes(64 << 20));
    let mut held: Vec<_> = (0..4).map(|_| program.must_get("images", 16 * MIB)).collect();
    assert!(program.get(1, "images", 16 * MIB).is_none());
    program.step();
    drop(held.pop());
    held.extend(program.served().into_iter().map(|(_, buffer)| buffer));
    held.into_iter().for_each(drop);
    program.load(60, 2, |_, _| 16 * MIB);
    program.diagnosed(()).check_healthy();
}
