//! Deterministic simulation: a pool with its partitions, loaders, a device, an operator, a clock and faults, all on one
//! seeded scheduler, in the time that it sets.
//!
//! ```text
//!   actors ──steps──▶ world ──calls──▶ pool ──▶ memory (a source that checks each call, and fails on request)
//!                       │                └────▶ device (streams with copies that end on command)
//!                       ├── inside a call of the source: a step of another actor
//!                       └── after each step: checks
//! ```
//!
//! One thread makes all calls, so a seed has one trace, which a test checks by comparing two runs. Calls by other threads are
//! simulated at the points where the pool must expect them: during source calls.
//!
//! | command | runs |
//! | --- | --- |
//! | `cargo test --test sim` | 4,000 seeds |
//! | `SIM_SEEDS=1000000 cargo test --release --test sim seeds` | a million; `SIM_FIRST` is the first one |
//! | `SIM_FIRST=7 SIM_SEEDS=1 cargo test --test sim seeds` | seed 7 alone |
//! | `SIM_REPLAY=FILE cargo test --test sim replay` | the steps in a file |
//!
//! A failing seed is shrunk, and its steps are written to a file under `target/tmp`.
#![cfg(not(miri))]

mod actors;
mod chain;
mod checks;
mod device;
mod memory;
mod run;
mod scenario;
mod shrink;
mod site;
mod world;

use test_common::{child, draw};

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use draw::number_from;
use memory::Slab;
use run::{Broken, run_alone};
use scenario::{Op, Scenario, Step};

/// Seeds of one test run.
const SEEDS: u64 = 4_000;

#[test]
#[allow(clippy::print_stdout)] // What was run, for `--nocapture`.
fn all_seeds_keep_every_promise() {
    let (first, count) = (number_from("SIM_FIRST", 0), number_from("SIM_SEEDS", SEEDS));
    let (next, steps) = (AtomicU64::new(first), AtomicU64::new(0));
    let run_seeds = || {
        let slab = Slab::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed - first >= count {
                return None;
            }
            let scenario = actors::scenario(seed);
            steps.fetch_add(scenario.steps.len() as u64, Ordering::Relaxed);
            if let Err(broken) = run_alone(&scenario, slab) {
                next.store(first + count, Ordering::Relaxed);
                return Some((seed, scenario, broken));
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let broken = thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(run_seeds)).collect();
        running.into_iter().filter_map(|thread| thread.join().unwrap()).min_by_key(|(seed, ..)| *seed)
    });
    let total = steps.load(Ordering::Relaxed);
    let Some((seed, scenario, broken)) = broken else { return println!("{count} seeds, {total} steps") };
    panic!("{}", run::report(seed, &scenario, &broken));
}

#[test]
fn a_seed_has_one_trace() {
    let slab = Slab::new();
    let traces: Vec<_> = (0..200).map(|seed| run_alone(&actors::scenario(seed), slab).unwrap()).collect();
    let other_place = Slab::new();
    for (seed, trace) in traces.iter().enumerate() {
        assert_eq!(run_alone(&actors::scenario(seed as u64), other_place).as_ref(), Ok(trace), "seed {seed}");
    }
    let mut distinct = traces.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), traces.len());
}

#[test]
fn a_scenario_is_read_as_it_was_written() {
    for seed in 0..50 {
        let scenario = actors::scenario(seed);
        assert_eq!(scenario.to_string().parse(), Ok(scenario));
    }
}

/// The device reports copies as complete too early, so the pool hands out memory that is being copied, which the checks detect.
#[test]
fn a_wrong_device_is_found_and_shrunk_to_four_steps() {
    let slab = Slab::new();
    let fails = |scenario: &Scenario| run_alone(scenario, slab).is_err();
    let lying = (0..).map(actors::scenario).find_map(|mut scenario| {
        scenario.setup.lying_device = 1;
        fails(&scenario).then_some(scenario)
    });
    let smallest = shrink::shrink(&lying.unwrap(), fails);
    assert!(smallest.steps.len() <= 4, "{smallest}");
    let is_copy = |step: &Step| matches!(step.op, Op::CopyTo | Op::CopyRange | Op::CopyFrom | Op::ReleaseAfter);
    assert!(smallest.steps.iter().any(is_copy), "{smallest}");
    assert!(matches!(run_alone(&smallest, slab), Err(Broken { .. })));
}

/// `SIM_REPLAY=FILE`.
#[test]
fn replay() {
    let Ok(path) = std::env::var("SIM_REPLAY") else { return };
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let scenario: Scenario = text.parse().unwrap_or_else(|error| panic!("{path}: {error}"));
    if let Err(broken) = run_alone(&scenario, Slab::new()) {
        panic!("{broken}");
    }
}

/// Runs that once failed.
#[test]
fn faults_of_earlier_random_cases_stay_repaired() {
    let slab = Slab::new();
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sim/found");
    for file in std::fs::read_dir(found).unwrap() {
        let path = file.unwrap().path();
        let scenario: Scenario = std::fs::read_to_string(&path).unwrap().parse().unwrap();
        assert_eq!(run_alone(&scenario, slab).err(), None, "{}", path.display());
    }
}
