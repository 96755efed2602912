//! A forked child gets a clear error from its parent's pool and changes nothing in the parent.
#![allow(unsafe_code)] // Attaches a worker to shared buffers.

#[cfg(all(feature = "observe", target_os = "linux"))]
use std::path::Path;
#[cfg(all(feature = "observe", target_os = "linux"))]
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pinpool::{Backend, Pool, Preset};
#[cfg(all(feature = "observe", target_os = "linux"))]
use pinpool_shared_buffers::{SharedPool, SharedWorker};
use pinpool_testing::{SinkMemory, SinkStream, SourceCall};

use crate::child::{Child, alone, in_a_child};
use crate::fixture::{faulty_heap, heap, held_sink};
use crate::until::until;
use crate::valid_stats::valid_stats;

#[test]
fn a_child_of_fork_gets_an_error_and_leaves_the_parents_memory_alone() {
    // A fork while other tests run would copy locks that their threads hold.
    alone(|| {
        for preset in [Preset::TensorFlow, Preset::Adaptive] {
            let source = faulty_heap();
            let builder = Pool::builder().without_env().preset(preset);
            let pool = builder.backend(Backend::Source(source.clone())).build().unwrap();
            let mut held = pool.get(10_000).unwrap();
            held.wait_slice_mut().unwrap().fill(7);
            drop(pool.get(100_000).unwrap());
            let (stream, mut device, gate) = held_sink(10_000);
            let mut copied = pool.get(10_000).unwrap();
            let copy = copied.copy_range_to(0..10_000, &stream, &mut device).unwrap();

            // The child drops its copies of the parent's buffers and handles.
            let (childs_pool, calls) =
                (pool.clone(), source.calls(SourceCall::Acquire) + source.calls(SourceCall::Release));
            let mut childs_buffers = Some((held, copied));
            in_a_child(|| {
                let (mut held, mut copied) = childs_buffers.take().unwrap();
                let refused = childs_pool.get(10_000).unwrap_err();
                let mut checks = vec![
                    ("get", refused.is_forked() && refused.to_string().contains(&std::process::id().to_string())),
                    ("hit", childs_pool.get(100_000).is_err_and(|error| error.is_forked())),
                    ("try_get", childs_pool.try_get(100_000).is_err_and(|error| error.is_forked())),
                    ("reserve", childs_pool.reserve(1 << 20).is_err_and(|error| error.is_forked())),
                    ("partition", childs_pool.open_partition("p", 1 << 20).is_err_and(|error| error.is_forked())),
                    ("copy", held.copy_range_to(0..10, &stream, &mut device).is_err_and(|error| error.is_forked())),
                    ("wait", copy.wait().is_err_and(|error| error.is_device_failed())),
                ];
                checks.push(("bytes", held.wait_slice_mut().unwrap().iter().all(|&byte| byte == 7)));
                copied.try_slice_mut().unwrap().unwrap()[0] = 1;
                drop((held, copied));
                childs_pool.clear();
                childs_pool.trim(0);
                childs_pool.maintain();
                checks.push(("stats", childs_pool.stats().requests.served == 0));
                let tagged = childs_pool.tagged("t");
                checks.push(("tagged", tagged.get(10).is_err_and(|error| error.is_forked()) && tagged.tag().is_none()));
                let dump = childs_pool.dump();
                checks.push(("dump", dump.holders().is_empty() && dump.to_string().contains("held 0B, in use 0B")));
                drop(childs_pool);
                checks.push(("calls", source.calls(SourceCall::Acquire) + source.calls(SourceCall::Release) == calls));
                let fresh = heap().build().unwrap();
                drop(fresh.get(10_000).unwrap());
                checks.push(("fresh", fresh.get(10_000).is_ok() && fresh.stats().requests.hits == 1));
                checks
            });

            // The parent's pool is unchanged.
            drop((gate, childs_buffers));
            copy.wait().unwrap();
            pool.maintain();
            let stats = valid_stats(&pool);
            assert_eq!((stats.requests.served, stats.requests.returned, stats.memory.in_use), (3, 3, 0), "{preset:?}");
            assert!(pool.get(100_000).is_ok());
        }
    });
}

#[test]
fn a_child_forked_while_the_first_pool_of_its_parent_is_built_builds_its_own() {
    // No pool has been built in this process, so each child below builds its first.
    alone(|| {
        let build_and_use = || {
            let pool = heap().build().unwrap();
            drop(pool.get(10_000).unwrap());
            drop(pool.get(10_000).unwrap());
            assert_eq!(pool.stats().requests.hits, 1);
        };
        for round in 0..60 {
            let mut child = Child::new(|| {
                let building = std::thread::spawn(build_and_use);
                std::thread::sleep(Duration::from_micros(round * 7));
                let mut grandchild = Child::new(build_and_use);
                building.join().unwrap();
                assert_eq!(grandchild.wait(), 0);
            });
            assert_eq!(child.wait(), 0, "round {round}");
        }
    });
}

#[test]
fn a_child_of_fork_has_a_maintenance_thread_for_its_own_pools_alone() {
    alone(|| {
        let source = faulty_heap();
        let hasty = || {
            let builder = Pool::builder().without_env().backend(Backend::Source(source.clone()));
            builder.pool_size_limit(0).idle_timeout(Duration::ZERO).build().unwrap()
        };
        let released = || source.calls(SourceCall::Release);
        let parents = hasty();
        drop(parents.get(10_000).unwrap());
        until("the buffer is released", || released() > 0);
        let _held = parents.get(10_000).unwrap();
        let mut child = Child::new(|| {
            let before = released();
            let own = hasty();
            drop(own.get(10_000).unwrap());
            // The pool counts a release once the call has returned.
            until("its own is released", || released() > before && own.stats().memory.held_bytes == 0);
        });
        assert_eq!(child.wait(), 0);
    });
}

/// A pool in which requests often wait for each other.
fn narrow_pool() -> Pool {
    heap().max_bytes(8_u64 << 20).wait(Duration::from_millis(200)).build().unwrap()
}

/// Uses three pools, one after the other, each with four threads that wait for each other.
fn use_own_pools() {
    for _ in 0..3 {
        let own = narrow_pool();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..50).for_each(|_| drop(own.get(3 << 20))));
            }
        });
        valid_stats(&own);
    }
}

/// Ends the threads of a test, also if a check fails.
struct EndFlag<'test>(&'test AtomicBool);

impl Drop for EndFlag<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// `FORKS`, or 90.
fn forks() -> u32 {
    std::env::var("FORKS").map_or(90, |forks| forks.parse().unwrap())
}

#[test]
fn children_use_their_own_pools_while_parent_threads_wait() {
    alone(|| {
        let parents = narrow_pool();
        drop(parents.get(4096).unwrap());
        let (is_over, busy) = (AtomicBool::new(false), 6);
        std::thread::scope(|scope| {
            let _over = EndFlag(&is_over);
            for threads in [0, busy] {
                for _ in 0..threads {
                    scope.spawn(|| {
                        while !is_over.load(Ordering::Relaxed) {
                            let held = parents.get(3 << 20);
                            std::thread::sleep(Duration::from_micros(300));
                            drop(held);
                        }
                    });
                }
                for number in 0..forks() {
                    // So that the threads of the parent are asleep at some forks and awake at others.
                    std::thread::sleep(Duration::from_micros(u64::from(number % 20) * 100));
                    assert_eq!(Child::new(use_own_pools).wait(), 0, "fork {number} with {threads} threads");
                }
            }
        });
    });
}

/// A pool that uses everything that a process's pools share: a shared limit, a recording, a socket, kept statistics.
#[cfg(all(feature = "observe", target_os = "linux"))]
fn pool_with_everything(dir: &Path, ledger: &str) -> Pool {
    let own = |kind: &str| dir.join(format!("{}.{kind}", std::process::id()));
    let builder = heap().wait(Duration::from_secs(60));
    let builder = builder.max_bytes(64_u64 << 20).setting("PINPOOL_LEDGER", ledger);
    let builder = builder.trace(own("trace")).setting("socket", own("sock").display());
    builder.build().unwrap()
}

#[cfg(all(feature = "observe", target_os = "linux"))]
fn use_everything(pool: &Pool) {
    let mut held = pool.tagged("fork").get(3 << 20).unwrap();
    held.wait_slice_mut().unwrap()[0] = 1;
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(3 << 20));
    held.copy_to(&stream, &mut device).unwrap().wait().unwrap();
    drop(pool.open_partition("part", 8 << 20).unwrap().get(100_000).unwrap());
    assert!(pool.stats().requests.served > 0 && !pool.dump().to_string().is_empty());
    let shared = SharedPool::new(pool, 10_000, 2).unwrap();
    // SAFETY: both sides are this test, which changes the memory only through the crate.
    let descriptor = unsafe { shared.descriptor() }.try_clone_to_owned().unwrap();
    // SAFETY: as above.
    let worker = unsafe { SharedWorker::attach(descriptor) }.unwrap();
    drop(shared.receive(&worker.get(100, Duration::from_secs(60)).unwrap().send(1).unwrap()).unwrap());
    pool.trim(0);
}

#[test]
fn a_child_inherits_no_waiting_requests_of_a_partition() {
    alone(|| {
        let pool = heap().max_bytes(8_u64 << 20).build().unwrap();
        let part = pool.open_partition("part", 1 << 20).unwrap();
        let held = part.get(1 << 20).unwrap();
        let waiting = std::thread::spawn({
            let part = part.clone();
            move || part.get(1 << 20).map(drop)
        });
        crate::fixture::until_waits(&part, 1);
        let mut task = Box::pin(part.get_async(1 << 20));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(std::future::Future::poll(task.as_mut(), &mut context).is_pending());
        let childs = part.clone();
        in_a_child(|| {
            let checks = vec![
                ("get", childs.get(1).is_err_and(|error| error.is_forked())),
                ("stats", childs.stats().memory.in_use_bytes == 0),
                ("task", std::future::Future::poll(task.as_mut(), &mut context).is_ready()),
                ("limit", childs.set_max_bytes(2 << 20).is_err_and(|error| error.is_forked())),
            ];
            childs.close();
            drop((childs, task));
            checks
        });
        drop(held);
        waiting.join().unwrap().unwrap();
        assert_eq!((part.stats().memory.in_use_bytes, part.stats().requests.waiting), (0, 0));
    });
}

#[test]
#[cfg(all(feature = "observe", target_os = "linux"))]
fn children_forked_amid_everything_that_pools_share_use_it_themselves() {
    alone(|| {
        let dir = tempfile::tempdir().unwrap();
        let ledger = format!("fork-{}", std::process::id());
        let parents = pool_with_everything(dir.path(), &ledger);
        let (is_over, begun) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let _over = EndFlag(&is_over);
            for _ in 0..3 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        use_everything(&parents);
                        begun.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            until("all have begun", || begun.load(Ordering::Relaxed) >= 3);
            for number in 0..forks() / 6 {
                let mut child = Child::new(|| {
                    assert!(parents.stats().limits.shared.is_none(), "the child owns nothing of its parent's limit");
                    assert!(parents.dump().holders().is_empty() && !parents.diagnose().is_alarm);
                    let own = pool_with_everything(dir.path(), &ledger);
                    use_everything(&own);
                    valid_stats(&own);
                });
                assert_eq!(child.wait(), 0, "fork {number}");
            }
        });
        drop(parents);
    });
}
