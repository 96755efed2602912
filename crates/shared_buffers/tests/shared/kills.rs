//! Workers and trainers that are killed at any instruction. `PINPOOL_TEST_KILLS` sets the number of kills (default 100).
#![allow(unsafe_code)] // Forks and kills.

use std::ptr;
use std::time::{Duration, Instant};

use pinpool::{Backend, Pool};
use pinpool_os::unwind::catch_panic;
use pinpool_shared_buffers::{SharedPool, SharedWorker};

use super::child::{Child, alone};
use super::draw::Draw;
use super::{attach, attach_to, descriptor};

const LONG: Duration = Duration::from_secs(60);
const BUFFERS: usize = 6;
const BYTES: usize = 20_000;

fn kills() -> u64 {
    std::env::var("PINPOOL_TEST_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(100)
}

fn shared() -> SharedPool {
    let pool = Pool::builder().without_env().backend(Backend::Heap).max_bytes(64_u64 << 20).build().unwrap();
    SharedPool::new(&pool, BYTES, BUFFERS).unwrap()
}

/// Fills and sends buffers until it is killed or its trainer is gone. Drops every fifth buffer instead of sending it.
fn work(shared: &SharedPool, seed: u64) {
    let worker = attach(shared);
    for number in seed.. {
        let mut buf = match worker.get(BYTES, LONG) {
            Ok(buf) => buf,
            Err(error) if error.is_trainer_unavailable() => return,
            Err(error) => panic!("{error}"),
        };
        buf.as_mut_slice().fill(number.to_le_bytes()[0]);
        if number % 5 != 0 && buf.send(number).is_err_and(|error| !error.is_trainer_unavailable()) {
            panic!("a send failed");
        }
    }
}

#[test]
fn killed_workers_lose_only_the_batch_in_progress() {
    alone(|| {
        let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        drop(shared());
        let before = descriptors();
        let (shared, mut draw) = (shared(), Draw::of(7));
        let mut seeds = 0_u64;
        let mut begin = || {
            seeds += 1 << 32;
            Child::new(|| work(&shared, seeds))
        };
        let mut workers: Vec<_> = (0..3).map(|_| begin()).collect();
        let receive = |wait| {
            let Some((ticket, buf)) = shared.receive_next(wait).unwrap() else { return false };
            let bytes = buf.wait_slice().unwrap();
            assert_eq!(bytes.len(), BYTES, "{ticket:?}");
            assert!(bytes.iter().all(|&byte| byte == ticket.user_data().to_le_bytes()[0]), "{ticket:?}");
            assert!(shared.receive(&ticket).unwrap_err().is_invalid_ticket(), "received once");
            true
        };
        for kill in 0..kills() {
            let until = Instant::now() + Duration::from_micros(draw.below(1500));
            while Instant::now() < until {
                receive(Duration::ZERO);
            }
            drop(std::mem::replace(&mut workers[usize::try_from(draw.below(3)).unwrap()], begin()));
            shared.recover().unwrap();
            let counts = shared.counts();
            assert!(counts.filling <= 3 && counts.received == 0, "kill {kill}: {counts:?}");
            assert!(receive(LONG), "kill {kill}: the survivors continue");
        }
        drop(workers);
        while receive(Duration::ZERO) {}
        shared.recover().unwrap();
        let counts = shared.counts();
        let in_use = shared.pool().stats().memory.in_use;
        assert_eq!((counts.free, shared.worker_count(), in_use), (BUFFERS, 0, 0), "{counts:?}");
        assert!(shared.receive_from_dead_worker().unwrap().is_none());
        drop(shared);
        assert_eq!(descriptors(), before);
    });
}

#[test]
fn batches_of_a_killed_worker_arrive_exactly_once() {
    alone(|| {
        let shared = shared();
        let mut child = Child::new(|| {
            let worker = attach(&shared);
            let mut buf = worker.get(BYTES, LONG).unwrap();
            let filling = worker.get(BYTES, LONG).unwrap();
            buf.as_mut_slice().fill(9);
            // The ticket is lost with the worker.
            buf.send(42).unwrap();
            std::mem::forget(filling);
        });
        child.wait();
        assert_eq!(shared.recover().unwrap(), 1);
        // A new worker does not take the dead worker's slot while that slot identifies the sender of a buffer.
        let worker = attach(&shared);
        let living = worker.get(1, LONG).unwrap().send(1).unwrap();
        let (ticket, buf) = shared.receive_from_dead_worker().unwrap().unwrap();
        assert_eq!((ticket.user_data(), &**buf.wait_slice().unwrap()), (42, &[9; BYTES][..]));
        assert!(shared.receive_from_dead_worker().unwrap().is_none());
        assert!(shared.receive(&ticket).unwrap_err().is_invalid_ticket(), "a ticket that arrives late");
        drop(buf);
        drop(shared.receive(&living).unwrap());
        assert_eq!(shared.counts().free, BUFFERS);
    });
}

#[test]
fn a_worker_that_waits_takes_what_a_dead_one_was_filling() {
    alone(|| {
        let shared = shared();
        let mut dead = Child::new(|| {
            let worker = attach(&shared);
            std::mem::forget((0..BUFFERS).map(|_| worker.get(1, LONG).unwrap()).collect::<Vec<_>>());
        });
        dead.wait();
        assert_eq!(shared.counts().filling, BUFFERS);
        let worker = attach(&shared);
        // The new worker has the same slot, and has freed the dead worker's buffers.
        let all: Vec<_> = (0..BUFFERS).map(|_| worker.get(1, Duration::ZERO).unwrap()).collect();
        assert_eq!(all.len(), BUFFERS);
    });
}

#[test]
fn workers_of_a_trainer_that_is_killed_are_told() {
    alone(|| {
        // The trainer is a child of this process, and its workers are children of the trainer, which report through a pipe.
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut trainer = Child::new(|| {
            let shared = shared();
            for _ in 0..2 {
                let worker = Child::new(|| {
                    let mut filling = Vec::new();
                    let mut fill = |worker: SharedWorker| loop {
                        match worker.get(1, LONG) {
                            Ok(buf) => filling.push(buf),
                            Err(error) => return error,
                        }
                    };
                    // The other worker may have filled all buffers before this worker attaches.
                    let attached = attach_to(descriptor(&shared));
                    let told = attached.map_or_else(|error| error, &mut fill).is_trainer_unavailable();
                    std::io::Write::write_all(&mut &writer, if told { b"p" } else { b"?" }).unwrap();
                });
                std::mem::forget(worker);
            }
            let begun = Instant::now();
            while shared.counts().filling < BUFFERS && begun.elapsed() < LONG {
                std::thread::sleep(Duration::from_millis(1));
            }
            // SAFETY: the call takes a number. It kills this process as another process would.
            unsafe { libc::raise(libc::SIGKILL) };
        });
        assert!(libc::WIFSIGNALED(trainer.wait()));
        drop(writer);
        let mut ends = String::new();
        std::io::Read::read_to_string(&mut reader, &mut ends).unwrap();
        assert_eq!(ends, "pp");
    });
}

#[test]
fn a_child_of_fork_has_neither_its_parents_slot_nor_its_buffers() {
    alone(|| {
        let shared = shared();
        let worker = attach(&shared);
        let buf = worker.get(1, LONG).unwrap();
        let held = shared.receive(&worker.get(1, LONG).unwrap().send(0).unwrap()).unwrap();
        let mut child = Child::new(|| {
            assert!(worker.get(1, Duration::ZERO).is_err_and(|error| error.is_forked()));
            // SAFETY: this is the child's copy, and the child does not use the original again. The parent drops its own copy.
            let mut buf = unsafe { ptr::read(&raw const buf) };
            assert_eq!(catch_panic(|| buf.as_slice().len()).or(catch_panic(|| buf.as_mut_slice().len())), None);
            // SAFETY: as above.
            let held = unsafe { ptr::read(&raw const held) };
            // SAFETY: as above.
            let shared = unsafe { ptr::read(&raw const shared) };
            assert!(buf.send(0).is_err());
            drop((held, shared));
        });
        assert_eq!(child.wait(), 0);
        assert_eq!((shared.counts().filling, shared.counts().received, shared.worker_count()), (1, 1, 1));
        // The parent's death is detected although its child is still alive.
        let (mut reader, writer) = std::io::pipe().unwrap();
        let mut parent = Child::new(|| {
            let worker = attach(&shared);
            std::mem::forget(worker.get(1, LONG).unwrap());
            let child = Child::new(|| {
                std::io::Write::write_all(&mut &writer, &std::process::id().to_le_bytes()).unwrap();
                std::thread::sleep(Duration::from_secs(60));
            });
            std::mem::forget(child);
        });
        parent.wait();
        let mut grandchild = [0; 4];
        std::io::Read::read_exact(&mut reader, &mut grandchild).unwrap();
        let recovered = shared.recover().unwrap();
        // SAFETY: the call takes numbers. The process is the grandchild created above.
        unsafe { libc::kill(i32::from_le_bytes(grandchild), libc::SIGKILL) };
        assert_eq!(recovered, 1);
    });
}
