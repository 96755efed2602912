//! Pools over `vmm`, `register` and `cuda` alongside copies: data is checked on the device, and no release waits for a copy.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaSlice, CudaStream};
use mock_driver::MockDriver;
use pinpool::{Backend, Pool};

use crate::captured_log::{count, lines, listen};
use crate::fixture::{MIB, builder, filled, held, maintain_until, on_a_stream, tensorflow, with_manual_clock};
use crate::pressure_file::PressureFile;
use crate::valid_stats::valid_stats;

/// Copies 4096 B from the pool.
fn start_copy(pool: &Pool, stream: &Arc<CudaStream>, memory: &mut CudaSlice<u8>) {
    drop(filled(pool, 4096, 7).copy_to(stream, memory).unwrap());
}

#[test]
fn a_release_due_under_pressure_runs_on_its_own_thread() {
    let driver = MockDriver::load();
    let pressure = PressureFile::new();
    pressure.write(20.0, 0.0);
    for backend in [Backend::Register, Backend::Cuda] {
        let under_pressure = builder(backend).unstable_settings(|only| only.pressure = Some(pressure.path()));
        let (pool, clock) = with_manual_clock(under_pressure);
        let at_start = driver.counts();
        drop(pool.get(3 * MIB).unwrap());
        let call = if pool.stats().backend == "cuda" { "cuMemFreeHost" } else { "cuMemHostUnregister" };
        let held_call = driver.hold_call(call);
        // Buffers expire from the thread cache; then their regions are due.
        for _ in 0..8 {
            clock.advance_us(60_000_000);
            pool.maintain();
        }
        // `maintain` has returned while the release hangs in the driver.
        held_call.wait_for(1);
        valid_stats(&pool);
        drop(held_call);
        maintain_until(&pool, |_| {
            clock.advance_us(60_000_000);
            driver.counts().pinned_bytes <= at_start.pinned_bytes
        });
        drop(pool);
        driver.reset();
    }
}

#[test]
fn a_pool_grows_in_small_steps_during_copies() {
    let (driver, stream, mut memory) = on_a_stream(4096);
    let pool = builder(Backend::Register).build().unwrap();
    let step = |len: usize| {
        let before = driver.counts().pinned_bytes;
        let mut bufs = Vec::new();
        while driver.counts().pinned_bytes == before {
            bufs.push(pool.get(len).unwrap());
        }
        (driver.counts().pinned_bytes - before, bufs)
    };
    let (at_rest, _kept) = step(2 * MIB);
    assert_eq!(at_rest, 16 << 20);
    let gate = driver.hold(stream.cu_stream());
    start_copy(&pool, &stream, &mut memory);
    let (during_a_copy, _kept) = step(2 * MIB);
    assert_eq!(during_a_copy, 8 << 20);
    let (four_buffers, _kept) = step(10 * MIB);
    assert_eq!(four_buffers, 40 << 20);
    drop(gate);
}

#[test]
fn dropping_a_pool_with_a_stuck_copy_releases_nothing() {
    let (driver, stream, mut memory) = on_a_stream(4096);
    listen();
    for builder in [builder(Backend::Register), builder(Backend::Cuda), tensorflow()] {
        let builder = builder.name("stuck").unstable_settings(|only| only.copies_wait = Some(Duration::ZERO));
        let pool = builder.build().unwrap();
        drop(pool.get(3 * MIB).unwrap());
        let gate = driver.hold(stream.cu_stream());
        start_copy(&pool, &stream, &mut memory);
        let held_before = held(&driver);
        drop(pool);
        assert_eq!(held(&driver), held_before);
        drop(gate);
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![7; 4096]);
    }
    assert_eq!(count(&lines(), "pool[stuck] end_left_pinned: "), 2, "all memory of an arena stays pinned");
}
