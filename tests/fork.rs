//! A child of `fork` gets a clear error from its parent's pool, and breaks nothing of the parent's.
#![cfg(not(miri))]
#![allow(unsafe_code)] // Forks.

use std::sync::Arc;

use pinpool::backend::HeapSource;
use pinpool::backend::fault::FaultSource;
use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::{Backend, Pool, Preset};

/// A child that hangs is killed after this.
const CHILD_SECONDS: u32 = 30;

fn pool(preset: Preset, source: &Arc<FaultSource>) -> Pool {
    Pool::builder().without_env().preset(preset).backend(Backend::Source(source.clone())).build().unwrap()
}

/// Runs `checks` in a child; each says whether it held.
fn in_a_child(checks: impl FnOnce() -> Vec<(&'static str, bool)>) {
    // SAFETY: the child runs `checks` on its one thread and leaves without unwinding; what it allocates comes from an
    // allocator that survives a fork.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: changes only when this process ends.
        unsafe { libc::alarm(CHILD_SECONDS) };
        let checks = std::panic::catch_unwind(std::panic::AssertUnwindSafe(checks));
        let broken = checks.map_or(100, |checks| checks.iter().position(|(_, held)| !held).map_or(0, |at| at + 1));
        // SAFETY: ends the child without running what belongs to the parent.
        unsafe { libc::_exit(i32::try_from(broken).unwrap_or(101)) };
    }
    let mut status = 0;
    // SAFETY: `status` is a place for a number, and the child is this test's own.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(waited, child);
    assert!(libc::WIFEXITED(status), "the child was killed: status {status}");
    assert_eq!(libc::WEXITSTATUS(status), 0, "number of the check that did not hold, or 100 for a panic");
}

#[test]
fn a_child_is_told_so_and_leaves_everything_alone() {
    for preset in [Preset::Tensorflow, Preset::Adaptive] {
        let source = Arc::new(FaultSource::around(Arc::new(HeapSource::new())));
        let pool = pool(preset, &source);
        let mut held = pool.get(10_000).unwrap();
        held.as_mut_slice().fill(7);
        drop(pool.get(100_000).unwrap());
        let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(10_000));
        let gate = stream.hold();
        let mut copied = pool.get(10_000).unwrap();
        let copy = copied.copy_range_to(0..10_000, &stream, &mut device).unwrap();

        // The child has buffers and handles of its own to drop: the parent's, as the fork copied them.
        let (pool_there, calls) = (pool.clone(), source.acquires() + source.releases());
        let mut there = Some((held, copied));
        in_a_child(|| {
            let (mut held, mut copied) = there.take().unwrap();
            let refused = pool_there.get(10_000).unwrap_err();
            let mut checks = vec![
                ("get", refused.is_forked() && refused.to_string().contains(&std::process::id().to_string())),
                ("hit", pool_there.get(100_000).is_err_and(|error| error.is_forked())),
                ("try_get", pool_there.try_get(100_000).is_err_and(|error| error.is_forked())),
                ("prewarm", pool_there.prewarm(1 << 20).is_err_and(|error| error.is_forked())),
                ("partition", pool_there.partition("p", 1 << 20).is_err_and(|error| error.is_forked())),
                ("copy", held.copy_range_to(0..10, &stream, &mut device).is_err_and(|error| error.is_forked())),
                ("wait", copy.wait().is_err_and(|error| error.is_device())),
            ];
            checks.push(("bytes", held.as_mut_slice().iter().all(|&byte| byte == 7)));
            copied.as_mut_slice()[0] = 1;
            drop((held, copied));
            pool_there.clear();
            pool_there.trim(0);
            pool_there.poll();
            checks.push(("stats", pool_there.stats().gets == 0));
            drop(pool_there);
            checks.push(("calls", source.acquires() + source.releases() == calls));
            let fresh = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
            drop(fresh.get(10_000).unwrap());
            checks.push(("fresh", fresh.get(10_000).is_ok() && fresh.stats().hits == 1));
            checks
        });

        // Nothing of this has reached the parent.
        drop((gate, there));
        copy.wait().unwrap();
        pool.poll();
        let stats = pool.stats();
        stats.validate().unwrap();
        assert_eq!((stats.gets, stats.puts, stats.in_use), (3, 3, 0), "{preset:?}");
        assert!(pool.get(100_000).is_ok());
    }
}

/// What a device has pinned is not copied for a child, and a buffer of it has no bytes there.
#[cfg(feature = "cuda")]
#[test]
fn a_child_gets_no_memory_of_a_driver_and_no_fault_for_it() {
    let _double = driver_double::Double::load();
    for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
        let pool = Pool::builder().without_env().backend(backend).build().unwrap();
        let mut there = pool.get(1 << 20).unwrap();
        there.as_mut_slice().fill(7);
        let is_registered = pool.stats().backend == "register";
        let start = there.as_ptr().cast_mut().cast();
        in_a_child(|| {
            let mut resident = 0;
            // SAFETY: room for one page's answer; an address that is not mapped is refused.
            let is_mapped = unsafe { libc::mincore(start, 4096, &raw mut resident) } == 0;
            vec![
                ("mapped", !(is_registered && is_mapped)),
                ("slice", there.as_slice().is_empty()),
                ("mut slice", there.as_mut_slice().is_empty()),
                ("try", there.try_as_mut_slice().is_none_or(|bytes| bytes.is_empty())),
            ]
        });
        assert!(there.as_slice().iter().all(|&byte| byte == 7));
    }
}
