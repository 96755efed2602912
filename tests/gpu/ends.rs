//! How processes and their forked children end: exit with copies in flight and live threads, fork after growth. Each
//! case runs in a separate process.

use std::env;
use std::thread;
use std::time::Duration;

use cudarc::driver::CudaContext;
use pinpool::{Backend, Pool};

use crate::MIB;
use crate::batch::Batch;
use crate::device::{self, Lane, filled, wait_until_put};

/// Names the backend that a process is for.
pub(crate) const BACKEND: &str = "PINPOOL_GPU_TEST_BACKEND";
/// Bytes of a buffer, over several granules.
const LEN: usize = 7 * MIB;

/// Runs an ignored test in a separate process, for one backend.
pub(crate) fn in_a_process(test: &str, backend: &str) {
    assert_eq!(device::in_a_process(test, (BACKEND, backend)), "holds", "{backend}: {test}");
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
#[ignore = "a process that exits with copies in flight"]
fn exits_with_copies_in_flight() {
    let context = CudaContext::new(0).unwrap();
    let builder = Pool::builder().without_env().backend(backend());
    let pool = builder.unstable_settings(|only| only.copies_wait = Some(Duration::from_millis(50))).build().unwrap();
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
#[ignore = "a process that grows a pool and forks a child"]
fn forks_after_growth() {
    let context = CudaContext::new(0).unwrap();
    let pool = Pool::builder().without_env().backend(backend()).build().unwrap();
    let mut lane = Lane::on(&context.new_stream().unwrap(), "a stream".to_owned(), LEN);
    let batches: Vec<_> = (0..4).map(|number| Batch::new(number, LEN - 5)).collect();
    let mut bufs: Vec<_> = batches.iter().map(|&batch| filled(&pool, batch)).collect();
    // SAFETY: the child calls only what is safe after forking a multi-threaded process, and ends without unwinding.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // The child's requests are refused, and its drops release nothing.
        let refused = pool.get(MIB).is_err_and(|error| error.is_forked());
        pool.trim(0);
        drop(bufs);
        // SAFETY: ends the child without running its parent's exit handlers.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: a place for a number, and a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "the child: {status}");
    // If the fork had made the pages copy-on-write, these writes would go to pages that the device does not read.
    for (buf, batch) in bufs.iter_mut().zip(&batches) {
        let again = Batch::new(batch.number + 100, batch.len);
        again.write(buf.wait_slice_mut().unwrap());
        drop(buf.copy_range_to(0..again.len, &lane.stream, &mut lane.memory).unwrap());
        lane.check(again);
    }
    drop(bufs);
    wait_until_put(&pool);
}
