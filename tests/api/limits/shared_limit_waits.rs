//! Requests that wait for memory of other processes, which constantly use all of the shared limit.

use std::time::Duration;

use pinpool::{Preset, Request};

use super::shared_limit::{LONG, MIB, Named, Worker};
use crate::draw::Draw;
use crate::until::until;

/// Another busy process, with threads that request and return buffers.
fn cycling(named: &Named, pool: &str, threads: usize, mib: usize, hold_us: u64) -> Worker {
    let vars = [("LEDGER_LEN", (mib * MIB).to_string()), ("LEDGER_HOLD_US", hold_us.to_string())];
    let vars = vars.each_ref().map(|(name, value)| (*name, value.as_str()));
    let mut worker = Worker::start_with(named, pool, &vars);
    assert_eq!(worker.ask(&format!("cycle {threads}")), "cycling");
    wait_for_each_thread(&mut worker);
    worker
}

fn counts(worker: &mut Worker) -> Vec<u64> {
    worker.ask("cycles").split(' ').map(|count| count.parse().unwrap()).collect()
}

/// Waits until each thread has made progress.
fn wait_for_each_thread(worker: &mut Worker) {
    let before = counts(worker);
    until("all threads continue", || before.iter().zip(counts(worker)).all(|(&before, now)| before < now));
}

/// Requests are served while a process with N threads runs, and all of these threads make progress.
fn are_served_next_to(preset: Preset, gets: usize, (threads, mib, hold_us): (usize, usize, u64)) {
    let named = Named::new(&format!("cycled-{preset:?}"));
    let mut other = cycling(&named, "other", threads, mib, hold_us);
    let pool = named.builder(64).preset(preset).name("own").build().unwrap();
    for _ in 0..gets {
        drop(pool.get_with(Request::new(mib * MIB).timeout(LONG)).unwrap());
        // The next request finds the shared limit fully used again.
        pool.trim(0);
        named.wait_until(|report| report.held_bytes + (mib * MIB) as u64 > 64 << 20);
    }
    wait_for_each_thread(&mut other);
}

#[test]
fn a_busy_process_does_not_starve_a_waiting_one() {
    for shape in [(4, 14, 0), (4, 14, 1_000), (4, 14, 5_000), (6, 14, 5_000), (1, 50, 0), (1, 50, 5_000)] {
        are_served_next_to(Preset::Adaptive, 20, shape);
    }
}

#[test]
fn a_request_of_the_preset_tensorflow_is_served_as_well() {
    for shape in [(4, 14, 0), (6, 14, 1_000), (1, 50, 0)] {
        are_served_next_to(Preset::TensorFlow, 20, shape);
    }
}

#[test]
fn all_processes_continue_if_all_want_more_than_the_limit() {
    let named = Named::new("fair");
    let mut others = ["one", "two", "three"].map(|pool| cycling(&named, pool, 4, 7, 100));
    for _ in 0..3 {
        others.iter_mut().for_each(wait_for_each_thread);
    }
    let report = named.report();
    assert!(report.held_bytes <= 64 << 20, "{report:?}");
}

#[test]
fn requests_that_end_in_any_order_leave_no_want() {
    let named = Named::new("drift");
    let (full, pool) = (named.builder(64).build().unwrap(), named.builder(64).build().unwrap());
    let held = full.get(60 * MIB).unwrap();
    std::thread::scope(|scope| {
        for thread in 1..13 {
            let pool = &pool;
            scope.spawn(move || {
                let mut draw = Draw::of(thread);
                for _ in 0..1_000 {
                    let len = MIB << draw.below(4);
                    let _ = pool.get_with(Request::new(len).timeout(Duration::from_micros(draw.below(3_000))));
                }
            });
        }
    });
    let report = named.report();
    assert!(report.members.iter().all(|member| member.wanted_bytes == 0), "{report:?}");
    drop(held);
}

#[test]
fn a_reserve_that_can_never_fit_takes_nothing_from_others() {
    let named = Named::new("never");
    let first = named.builder(64).build().unwrap();
    drop(first.get(40 * MIB).unwrap());
    let kept = first.stats().memory.held_bytes;
    let large = named.builder(256).build().unwrap();
    let error = large.reserve((100 * MIB) as u64).unwrap_err().to_string();
    assert!(error.contains("Request a smaller buffer, or restart all its processes"), "{error}");
    let wanted_bytes: u64 = named.report().members.iter().map(|member| member.wanted_bytes).sum();
    assert_eq!((first.stats().memory.held_bytes, wanted_bytes), (kept, 0));
}
