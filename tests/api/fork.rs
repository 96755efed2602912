//! A child of `fork` gets a clear error from its parent's pool and changes nothing of the parent's.

#![allow(unsafe_code)] // Forks.

use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::testing::SourceCall;
use pinpool::{Backend, Pool, Preset};

use crate::child::{alone, in_a_child};
use crate::fixture::faulty_heap;

#[test]
fn a_child_of_fork_gets_an_error_and_leaves_the_parents_memory_alone() {
    // A fork beside other tests would copy locks that their threads hold.
    alone(|| {
        for preset in [Preset::Tensorflow, Preset::Adaptive] {
            let source = faulty_heap();
            let builder = Pool::builder().without_env().preset(preset);
            let pool = builder.backend(Backend::Source(source.clone())).build().unwrap();
            let mut held = pool.get(10_000).unwrap();
            held.as_mut_slice().unwrap().fill(7);
            drop(pool.get(100_000).unwrap());
            let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(10_000));
            let gate = stream.hold();
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
                    ("prewarm", childs_pool.prewarm(1 << 20).is_err_and(|error| error.is_forked())),
                    ("partition", childs_pool.partition("p", 1 << 20).is_err_and(|error| error.is_forked())),
                    ("copy", held.copy_range_to(0..10, &stream, &mut device).is_err_and(|error| error.is_forked())),
                    ("wait", copy.wait().is_err_and(|error| error.is_device())),
                ];
                checks.push(("bytes", held.as_mut_slice().unwrap().iter().all(|&byte| byte == 7)));
                copied.as_mut_slice().unwrap()[0] = 1;
                drop((held, copied));
                childs_pool.clear();
                childs_pool.trim(0);
                childs_pool.poll();
                checks.push(("stats", childs_pool.stats().gets == 0));
                let tagged = childs_pool.tagged("t");
                checks.push(("tagged", tagged.get(10).is_err_and(|error| error.is_forked()) && tagged.tag().is_none()));
                let dump = childs_pool.dump();
                checks.push(("dump", dump.owners().is_empty() && dump.to_string().contains("held 0.00 MiB")));
                drop(childs_pool);
                checks.push(("calls", source.calls(SourceCall::Acquire) + source.calls(SourceCall::Release) == calls));
                let fresh = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
                drop(fresh.get(10_000).unwrap());
                checks.push(("fresh", fresh.get(10_000).is_ok() && fresh.stats().hits == 1));
                checks
            });

            // The parent is unchanged.
            drop((gate, childs_buffers));
            copy.wait().unwrap();
            pool.poll();
            let stats = pool.stats();
            stats.validate().unwrap();
            assert_eq!((stats.gets, stats.puts, stats.in_use), (3, 3, 0), "{preset:?}");
            assert!(pool.get(100_000).is_ok());
        }
    });
}

/// Waits for `child`; whether it ended by itself with status 0.
fn ended_well(child: libc::pid_t) -> bool {
    let mut status = 0;
    // SAFETY: `status` is a place for a number, and the child is this process's own.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    waited == child && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

/// Forks; runs `act` in the child, which is killed after ten seconds.
fn forked(act: impl FnOnce() -> bool) -> libc::pid_t {
    // SAFETY: the child runs `act` and ends without unwinding into what belongs to the parent.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: changes only when this process ends.
        unsafe { libc::alarm(10) };
        let held = std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).unwrap_or(false);
        // SAFETY: ends the child alone.
        unsafe { libc::_exit(i32::from(!held)) };
    }
    child
}

#[test]
fn a_child_forked_while_the_first_pool_of_its_parent_is_built_builds_its_own() {
    // No pool has been built in this process, so each child below builds its first.
    alone(|| {
        let build_and_use = || {
            let pool = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
            drop(pool.get(10_000).unwrap());
            pool.get(10_000).is_ok() && pool.stats().hits == 1
        };
        for round in 0..60 {
            let child = forked(|| {
                let building = std::thread::spawn(build_and_use);
                std::thread::sleep(std::time::Duration::from_micros(round * 7));
                let grandchild = forked(build_and_use);
                building.join().unwrap() && ended_well(grandchild)
            });
            assert!(ended_well(child), "round {round}");
        }
    });
}

#[test]
fn a_child_of_fork_has_a_maintenance_thread_for_its_own_pools_alone() {
    alone(|| {
        let source = faulty_heap();
        let hasty = || {
            let builder = Pool::builder().without_env().backend(Backend::Source(source.clone()));
            builder.pool_size_limit(0).idle_timeout(std::time::Duration::ZERO).build().unwrap()
        };
        let released = || source.calls(SourceCall::Release);
        let parents = hasty();
        drop(parents.get(10_000).unwrap());
        while released() == 0 {
            std::thread::yield_now();
        }
        let _held = parents.get(10_000).unwrap();
        let child = forked(|| {
            let before = released();
            let own = hasty();
            drop(own.get(10_000).unwrap());
            // The pool counts a release when the call has returned.
            while released() == before || own.stats().pinned_bytes > 0 {
                std::thread::yield_now();
            }
            true
        });
        assert!(ended_well(child));
    });
}
