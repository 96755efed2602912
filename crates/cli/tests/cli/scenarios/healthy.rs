//! Programs that resemble a cause and are healthy.

use std::collections::VecDeque;

use pinpool::Rounding;
use pinpool::{PoolBuilder, Preset};

use super::{MIB, Program, STEPS_IN_A_SECOND};

/// A program that holds a few buffers at a time: what it resembles, its seconds, buffers held, settings and lengths.
type Load = (&'static str, u64, usize, fn(PoolBuilder) -> PoolBuilder, fn(u64) -> usize);

#[test]
fn steady_loads_are_healthy() {
    const SIXTEEN: fn(u64) -> usize = |step| MIB + usize::try_from(step % 16).unwrap() * 2 * MIB;
    const DRIFTING: fn(u64) -> usize = |step| 8 * MIB + usize::try_from(step / STEPS_IN_A_SECOND).unwrap() * 65_536;
    let exact = |pool: PoolBuilder| pool.preset(Preset::TensorFlow).rounding(Rounding::Exact);
    let loads: [Load; 4] = [
        ("warming up, but all is taken at once", 11, 3, |pool| pool, |_| 4 * MIB),
        ("sizes that never recur, but sixteen recur", 80, 3, |pool| pool, SIXTEEN),
        ("thrashing, but sixteen sizes are within the limit", 80, 3, exact, SIXTEEN),
        ("sizes that drift, but what is there serves them", 120, 3, |pool| pool, DRIFTING),
    ];
    for (name, seconds, held, set, len) in loads {
        let mut program = Program::new(&[name], set);
        program.load(seconds, held, |_, step| len(step));
        let said = program.diagnosed(());
        said.check("healthy", false);
        said.check_calm(&["healthy"]);
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
fn a_working_set_that_is_taken_at_the_start_and_kept_is_no_leak() {
    let mut program = Program::one(|pool| pool);
    let weights: Vec<_> = (0..200).map(|_| program.must_get("weights", 2 * MIB)).collect();
    program.load(80, 4, |_, _| 4 * MIB);
    program.diagnosed(weights).check_calm(&["healthy"]);
}

#[test]
fn a_full_queue_without_a_waiting_producer_is_no_slow_consumer() {
    let mut program = Program::one(|pool| pool.max_bytes(256 << 20));
    let mut queue = VecDeque::new();
    program.run(60, |program, step| {
        // 32 buffers fill the limit, and no more are requested.
        while queue.len() < 32 {
            queue.push_back(program.must_get("queue", 8 * MIB));
        }
        if step % 2 == 0 {
            Program::put_elsewhere(queue.pop_front().unwrap());
        }
    });
    program.diagnosed(queue).check_calm(&["healthy"]);
}

#[test]
fn a_loader_before_a_busy_device_is_no_alarm_and_loses_nothing() {
    // The number of prefetched batches, and the number of batches that the device takes in each step.
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
