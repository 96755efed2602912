//! Compares the bytes that the mock driver counts as pinned with the limit of the pool.

use std::collections::VecDeque;
use std::time::Duration;

use mock_driver::MockDriver;
use pinpool::{Backend, PinnedBuf, Pool, PoolBuilder, Preset};

use crate::fixture::{self, MIB, builder, held};
use crate::valid_stats::valid_stats;

/// 64 KiB, and limits below, at and next to 1, 2, 3, 5 and 12 MiB, where the backends change their granularity.
const LIMITS: [u64; 9] = [0x10000, 0xff000, 0x100000, 0x101000, 0x1fffff, 0x200000, 0x300000, 0x503039, 0xc00000];

/// Builds a pool and resets the counts, so that the memory of its backend trial is not counted.
fn built(driver: &MockDriver, builder: PoolBuilder) -> Pool {
    let pool = builder.build().unwrap();
    driver.reset();
    pool
}

/// Requests buffers of every size that fits, keeps some of them, returns memory, and begins again.
fn churn(pool: &Pool, max_bytes: u64, mut check: impl FnMut()) {
    let mut held: VecDeque<PinnedBuf> = VecDeque::new();
    for step in 0..120_usize {
        let most = usize::try_from(max_bytes).unwrap();
        let len = match step % 7 {
            0 => 4096,
            1 => most / 3 + 1,
            2 => most,
            3 => 100_001,
            4 => most / 2,
            5 => MIB - 1,
            _ => 2 * MIB,
        };
        held.extend(pool.get(len).ok());
        check();
        while held.len() > step % 5 {
            held.pop_front();
        }
        match step % 11 {
            3 => pool.trim(0),
            7 => pool.clear(),
            9 => pool.trim(max_bytes / 2),
            _ => {}
        }
        check();
    }
}

/// Returns a check that the driver's peak since `before` is within the limit and matches the pool's statistics.
fn within(driver: &MockDriver, pool: &Pool, before: u64, max_bytes: u64, what: &str) -> impl FnMut() {
    move || {
        let counts = driver.counts();
        let most_bytes = counts.peak_pinned_bytes - before;
        assert!(most_bytes <= max_bytes, "{what}: {most_bytes} B pinned under a limit of {max_bytes}");
        let stats = valid_stats(pool);
        assert_eq!(stats.memory.held_bytes, counts.pinned_bytes - before, "{what} under {max_bytes}");
        assert_eq!(stats.memory.peak_held_bytes, most_bytes, "{what} under {max_bytes}");
    }
}

#[test]
fn the_driver_never_pins_more_than_the_limit() {
    let adaptive = [Backend::Vmm, Backend::Register, Backend::Cuda].map(|backend| (Preset::Adaptive, backend));
    for (preset, backend) in adaptive.into_iter().chain([(Preset::TensorFlow, Backend::Cuda)]) {
        for max_bytes in LIMITS {
            let driver = MockDriver::load();
            let (before, counted) = (held(&driver), driver.counts().pinned_bytes);
            let builder = builder(backend.clone()).preset(preset).max_bytes(max_bytes).wait(Duration::ZERO);
            let pool = built(&driver, builder);
            churn(&pool, max_bytes, within(&driver, &pool, counted, max_bytes, backend.name()));
            let len = usize::try_from(max_bytes).unwrap();
            if let Err(error) = pool.get(len) {
                let text = error.report();
                let (_, advised) = text.split_once("raise PINPOOL_MAX_BYTES to ").unwrap_or_else(|| panic!("{text}"));
                let raised = fixture::builder(backend.clone()).preset(preset);
                let raised = raised.setting("PINPOOL_MAX_BYTES", advised.lines().next().unwrap()).build().unwrap();
                assert!(raised.get(len).is_ok(), "{preset} {backend:?} {max_bytes}: {text}");
            }
            drop(pool);
            assert_eq!(held(&driver), before, "{preset} {} left memory behind", backend.name());
        }
    }
}

#[test]
fn a_reserve_counts_everything_that_the_driver_pins_for_it() {
    for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
        for (reserve, max_bytes) in [
            (3 << 20, 3_u64 << 20),
            (2 << 20, 2 << 20),
            (5000, 3 << 20),
            (1 << 20, (1 << 20) + 4096),
            (1 << 20, 1 << 20),
            ((3 << 20) + 1, (3 << 20) + 4096),
        ] {
            let driver = MockDriver::load();
            let counted = driver.counts().pinned_bytes;
            let pool = built(&driver, builder(backend.clone()).max_bytes(max_bytes).wait(Duration::ZERO));
            let mut check = within(&driver, &pool, counted, max_bytes, backend.name());
            match pool.reserve(reserve) {
                Ok(()) => assert!(pool.stats().memory.reserve_bytes >= reserve),
                // `cuda` holds a page more for a small region.
                Err(error) => assert!(error.is_limit() && matches!(backend, Backend::Cuda), "{backend:?}: {error}"),
            }
            check();
            churn(&pool, max_bytes, check);
        }
    }
}

#[test]
fn a_smaller_region_serves_the_request_if_a_larger_one_is_refused() {
    for backend in [Backend::Register, Backend::Cuda] {
        let driver = MockDriver::load();
        // Includes timeline pages that earlier tests have left.
        let before = driver.counts().pinned_bytes;
        let pool = builder(backend.clone()).max_bytes(64 << 20).wait(Duration::ZERO).build().unwrap();
        // A region for buffers of 1 MiB has 8 MiB; the driver has 3 MiB left.
        driver.limit_pinned(before + (3 << 20));
        let held: Vec<_> = std::iter::from_fn(|| pool.get(MIB).ok()).collect();
        assert!(held.len() >= 2, "{backend:?}: {} buffers", held.len());
        let stats = valid_stats(&pool);
        assert_eq!(stats.memory.smaller_regions, held.len() as u64, "{backend:?}");
        assert_eq!(stats.requests.failed, 1);
        driver.limit_pinned(u64::MAX);
        assert_eq!(pool.get(MIB).unwrap().len(), MIB);
        assert_eq!(pool.stats().memory.smaller_regions, stats.memory.smaller_regions);
    }
}
