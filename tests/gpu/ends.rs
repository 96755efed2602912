//! How processes end, and children of them: exit with copies in flight and threads alive, fork after growth; and two pools on
//! one device. Tests that end the process run in a separate process.

use std::env;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use pinpool::{Backend, Pool};

use crate::MIB;
use crate::batch::Batch;
use crate::device::{self, HeldStream, Lane, filled, wait_until};

/// Names the backend that a process is for.
pub(crate) const BACKEND: &str = "PINPOOL_GPU_TEST_BACKEND";
/// A process that takes longer is killed, and its test fails.
const LONGEST: Duration = Duration::from_secs(40);
/// Bytes of a buffer, over several granules.
const LEN: usize = 7 * MIB;

/// Runs an ignored test in a separate process, for one backend.
pub(crate) fn in_a_process(test: &str, backend: &str) {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]).env(BACKEND, backend).stdin(Stdio::null());
    let (mut child, begun) = (command.spawn().unwrap(), Instant::now());
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if begun.elapsed() > LONGEST => {
                child.kill().unwrap();
                child.wait().unwrap();
                panic!("{backend}: {test} hangs");
            }
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    assert!(status.success(), "{backend}: {test}: {status}");
}

fn backend() -> Backend {
    env::var(BACKEND).unwrap().parse().unwrap()
}

#[test]
fn a_process_exits_with_copies_in_flight_and_threads_that_use_the_pool() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| in_a_process("ends::exits_with_copies_in_flight", rig.name()));
}

#[test]
#[ignore = "a process for the test above"]
fn exits_with_copies_in_flight() {
    let context = CudaContext::new(0).unwrap();
    let pool = Pool::builder()
        .without_env()
        .backend(backend())
        .unstable_close_wait(Duration::from_millis(50))
        .build()
        .unwrap();
    let mut lanes: Vec<Lane> =
        (0..4).map(|number| Lane::on(&context.new_stream().unwrap(), format!("stream {number}"), LEN)).collect();
    let busy = pool.clone();
    thread::spawn(move || {
        for round in 0_usize.. {
            drop(busy.get(4096 * (1 + round % 400)));
        }
    });
    for round in 0..2 {
        for lane in &mut lanes {
            drop(filled(&pool, Batch::new(round, LEN)).copy_to(&lane.stream, &mut lane.memory).unwrap());
        }
    }
    // Nothing is waited for: exit handlers run alongside the copies and the thread.
    std::process::exit(0);
}

#[test]
fn a_child_forked_after_growth_leaves_the_parents_memory_alone() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| in_a_process("ends::forks_after_growth", rig.name()));
}

#[test]
#[ignore = "a process for the test above"]
fn forks_after_growth() {
    let context = CudaContext::new(0).unwrap();
    let pool = Pool::builder().without_env().backend(backend()).build().unwrap();
    let mut lane = Lane::on(&context.new_stream().unwrap(), "a stream".to_owned(), LEN);
    let batches: Vec<_> = (0..4).map(|number| Batch::new(number, LEN - 5)).collect();
    let mut bufs: Vec<_> = batches.iter().map(|&batch| filled(&pool, batch)).collect();
    // SAFETY: the child calls only what is safe behind a fork of a process with threads, and ends without unwinding.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // Requests are refused, and what it drops releases nothing.
        let refused = pool.get(MIB).is_err_and(|error| error.is_forked());
        pool.trim(0);
        drop(bufs);
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: a place for a number, and a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child: {status}");
    // Pages that a fork made copy-on-write would be written elsewhere than where the device reads.
    for (buf, batch) in bufs.iter_mut().zip(&batches) {
        let again = Batch::new(batch.number + 100, batch.len);
        again.write(buf.wait_slice_mut().unwrap());
        drop(buf.copy_range_to(0..again.len, &lane.stream, &mut lane.memory).unwrap());
        lane.check(again);
    }
    drop(bufs);
    wait_until("every buffer is put", || {
        pool.maintain();
        pool.stats().copies.in_flight == 0
    });
}

#[test]
fn two_pools_on_one_device_grow_copy_and_end_by_themselves() {
    let Some(device) = device::take() else { return };
    device.on_each(|rig| {
        let mut pools: Vec<_> = (0..2).map(|_| rig.builder().max_bytes(64 << 20).build().unwrap()).collect();
        let mut lanes: Vec<Lane> = (0..2).map(|number| rig.lane(number, LEN)).collect();
        thread::scope(|scope| {
            for (first, (pool, lane)) in [0, 100].into_iter().zip(pools.iter().zip(&mut lanes)) {
                scope.spawn(move || {
                    rig.context.bind_to_thread().unwrap();
                    for number in first..first + 8 {
                        let batch = Batch::new(number, LEN - 4096 * usize::try_from(number % 7).unwrap());
                        drop(filled(pool, batch).copy_to(&lane.stream, &mut lane.memory).unwrap());
                        lane.check(batch);
                        if number % 5 == 0 {
                            pool.trim(0);
                        }
                    }
                });
            }
        });
        // The end of one, with a copy of the other in flight.
        let hold = HeldStream::on(&lanes[1].stream);
        let batch = Batch::new(7, MIB);
        let last = &mut lanes[1];
        drop(filled(&pools[1], batch).copy_to(&last.stream, &mut last.memory).unwrap());
        let first = pools.remove(0);
        thread::scope(|scope| {
            let ending = scope.spawn(|| drop(first));
            if rig.virtual_memory() {
                ending.join().unwrap();
                hold.open();
            } else {
                // Its releases wait for all work of the device.
                thread::sleep(Duration::from_millis(20));
                hold.open();
                ending.join().unwrap();
            }
        });
        lanes[1].check(batch);
        assert_eq!(pools[0].stats().memory.quarantined, 0, "{}", rig.name());
    });
}
