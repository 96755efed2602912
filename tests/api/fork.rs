//! A child of `fork` gets a clear error from its parent's pool, and breaks nothing of the parent's.

use std::sync::Arc;

use pinpool::backend::HeapSource;
use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::testing::FaultSource;
use pinpool::{Backend, Pool, Preset};

use crate::child::{alone, in_a_child};

fn pool(preset: Preset, source: &Arc<FaultSource>) -> Pool {
    Pool::builder().without_env().preset(preset).backend(Backend::Source(source.clone())).build().unwrap()
}

#[test]
fn a_child_is_told_so_and_leaves_everything_alone() {
    // A fork among other tests' threads would copy their locks.
    alone(|| {
        for preset in [Preset::Tensorflow, Preset::Adaptive] {
            let source = Arc::new(FaultSource::around(Arc::new(HeapSource::new())));
            let pool = pool(preset, &source);
            let mut held = pool.get(10_000).unwrap();
            held.as_mut_slice().unwrap().fill(7);
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
                checks.push(("bytes", held.as_mut_slice().unwrap().iter().all(|&byte| byte == 7)));
                copied.as_mut_slice().unwrap()[0] = 1;
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
    });
}
