//! Every usual way to start a copy is tracked: a buffer dropped under any of them is not reused before the copy completes.
#![allow(unsafe_code)] // Copies from a slice that the pool does not track.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream};
use mock_driver::MockDriver;
use pinpool::{PinnedBuf, Pool};

use crate::fixture::{ends_only_after, filled, panic_of, tensorflow, usual_streams};

const LEN: usize = 64 << 10;
const ELEMENTS: usize = LEN / 4;

/// One way to start a copy. The buffer is dropped when it returns.
type Line<M> = (&'static str, fn(&Arc<CudaStream>, PinnedBuf, &mut M));

struct DeviceMem {
    bytes: CudaSlice<u8>,
    floats: CudaSlice<f32>,
}

impl DeviceMem {
    fn on(stream: &Arc<CudaStream>) -> Self {
        let memory = Self { bytes: stream.alloc_zeros(LEN).unwrap(), floats: stream.alloc_zeros(ELEMENTS).unwrap() };
        stream.synchronize().unwrap();
        memory
    }
}

fn start() -> (MockDriver, Pool, Arc<CudaStream>, DeviceMem) {
    let driver = MockDriver::load();
    let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
    let memory = DeviceMem::on(&stream);
    (driver, tensorflow().build().unwrap(), stream, memory)
}

fn pattern(seed: usize) -> Vec<u8> {
    // Avoids NaN patterns, because floats are compared below.
    (0..LEN).map(|index| u8::try_from((index * 7 + seed) % 64).unwrap()).collect()
}

/// Drops a buffer during the copy of `line`, requests and fills the next buffer, and only then lets the copy run.
fn under_a_held_copy<M>(
    driver: &MockDriver,
    (pool, stream, memory): (&Pool, &Arc<CudaStream>, &mut M),
    (name, line): Line<M>,
    seed: usize,
) {
    let mut buf = pool.get(LEN).unwrap();
    buf.wait_slice_mut().unwrap().copy_from_slice(&pattern(seed));
    let id = buf.unstable_id();
    let gate = driver.hold_all();
    line(stream, buf, memory);
    pool.maintain();
    assert_eq!(pool.stats().copies.in_flight, 1, "{name}");
    let mut next = pool.get(LEN).unwrap();
    assert_ne!(next.unstable_id(), id, "{name}: reused under the copy");
    next.wait_slice_mut().unwrap().copy_from_slice(&pattern(seed + 1));
    drop(gate);
    stream.synchronize().unwrap();
    assert_eq!(*next.wait_slice().unwrap(), pattern(seed + 1), "{name}: overwritten by the copy");
    pool.maintain();
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.quarantined), (0, 0), "{name}");
    assert_eq!(pool.try_get(LEN).unwrap().and_then(|back| back.unstable_id()), id, "{name}: back in the pool");
}

#[test]
fn a_buffer_dropped_during_a_copy_to_the_device_is_reused_after_it() {
    let (driver, pool, stream, mut memory) = start();
    let to_bytes: [Line<DeviceMem>; 5] = [
        ("memcpy_htod(&buf)", |stream, buf, memory| stream.memcpy_htod(&buf, &mut memory.bytes).unwrap()),
        ("memcpy_htod(&buf.view(..))", |stream, buf, memory| {
            stream.memcpy_htod(&buf.view(..).unwrap(), &mut memory.bytes).unwrap();
        }),
        ("memcpy_htod of a slice that was taken for writing", |stream, mut buf, memory| {
            stream.memcpy_htod(&buf.view_mut(..LEN).unwrap(), &mut memory.bytes).unwrap();
        }),
        ("copy_range_to", |stream, mut buf, memory| {
            buf.copy_range_to(0..LEN, stream, &mut memory.bytes).unwrap();
        }),
        ("copy_to", |stream, buf, memory| {
            buf.copy_to(stream, &mut memory.bytes).unwrap();
        }),
    ];
    for stream in usual_streams(stream.context()) {
        let mut memory = DeviceMem::on(&stream);
        for (seed, line) in (0..).zip(to_bytes) {
            under_a_held_copy(&driver, (&pool, &stream, &mut memory), line, seed);
            assert_eq!(stream.clone_dtoh(&memory.bytes).unwrap(), pattern(seed), "{}", line.0);
        }
    }
    let to_floats: [Line<DeviceMem>; 3] = [
        ("memcpy_htod(&buf.view_as::<f32>())", |stream, buf, memory| {
            stream.memcpy_htod(&buf.view_as::<f32>().unwrap(), &mut memory.floats).unwrap();
        }),
        ("memcpy_htod of some elements", |stream, buf, memory| {
            let elements = buf.view_as::<f32>().unwrap().slice(..ELEMENTS).unwrap();
            stream.memcpy_htod(&elements, &mut memory.floats.slice_mut(..)).unwrap();
        }),
        ("copy_to a slice of f32", |stream, buf, memory| {
            buf.copy_to(stream, &mut memory.floats).unwrap();
        }),
    ];
    for (seed, line) in (20..).zip(to_floats) {
        under_a_held_copy(&driver, (&pool, &stream, &mut memory), line, seed);
        let found = stream.clone_dtoh(&memory.floats).unwrap();
        assert_eq!(bytemuck::cast_slice::<f32, u8>(&found), pattern(seed), "{}", line.0);
    }
}

#[test]
fn a_buffer_dropped_during_a_copy_from_the_device_is_reused_after_it() {
    let (driver, pool, stream, mut memory) = start();
    let lines: [Line<DeviceMem>; 5] = [
        ("memcpy_dtoh(&mut buf)", |stream, mut buf, memory| stream.memcpy_dtoh(&memory.bytes, &mut buf).unwrap()),
        ("memcpy_dtoh(&mut buf.view_mut(..))", |stream, mut buf, memory| {
            stream.memcpy_dtoh(&memory.bytes, &mut buf.view_mut(..).unwrap()).unwrap();
        }),
        ("memcpy_dtoh of a part", |stream, mut buf, memory| {
            stream.memcpy_dtoh(&memory.bytes.slice(4..12), &mut buf.view_mut(LEN - 8..).unwrap()).unwrap();
        }),
        ("memcpy_dtoh(&mut buf.view_as_mut::<f32>())", |stream, mut buf, memory| {
            stream.memcpy_dtoh(&memory.floats, &mut buf.view_as_mut::<f32>().unwrap()).unwrap();
        }),
        ("copy_from", |stream, buf, memory| drop(buf.copy_from(stream, &memory.floats).unwrap())),
    ];
    for (seed, line) in (0..).zip(lines) {
        under_a_held_copy(&driver, (&pool, &stream, &mut memory), line, seed);
    }
}

#[test]
fn an_untracked_copy_does_not_keep_its_buffer() {
    let (driver, pool, stream, mut memory) = start();
    let buf = pool.get(LEN).unwrap();
    let id = buf.unstable_id();
    let gate = driver.hold_all();
    // SAFETY: violated on purpose: the memory is reused before the copy completes.
    stream.memcpy_htod(unsafe { buf.wait_slice_untracked() }.unwrap(), &mut memory.bytes).unwrap();
    drop(buf);
    assert_eq!(pool.try_get(LEN).unwrap().and_then(|next| next.unstable_id()), id, "which is why the call is unsafe");
    drop(gate);
    stream.synchronize().unwrap();
}

#[test]
fn typed_views_carry_their_elements_at_their_offset() {
    let (_driver, pool, stream, mut memory) = start();
    let mut buf = pool.get(LEN).unwrap();
    let values: Vec<f32> = (0..ELEMENTS).map(|index| index as f32).collect();
    buf.wait_slice_as_mut::<f32>().unwrap().copy_from_slice(&values);
    stream.memcpy_htod(&buf.view_as::<f32>().unwrap().slice(8..24).unwrap(), &mut memory.floats).unwrap();
    let mut back = pool.get(64).unwrap();
    stream.memcpy_dtoh(&memory.floats.slice(..16), &mut back.view_as_mut::<f32>().unwrap()).unwrap();
    assert_eq!(back.wait_slice_as::<f32>().unwrap(), &values[8..24]);
    let error = buf.view_as::<f32>().unwrap().slice(1..=ELEMENTS).unwrap_err();
    assert!(error.is_invalid_request() && error.to_string().contains("16384 elements"), "{error}");
    buf.truncate(LEN - 1);
    assert!(buf.view_as::<f32>().unwrap_err().is_invalid_request());
    assert!(buf.view(..LEN).unwrap_err().is_invalid_request());
}

#[test]
fn a_copy_into_a_read_only_view_panics() {
    let (_driver, pool, stream, memory) = start();
    let buf = pool.get(LEN).unwrap();
    let panic = panic_of(|| stream.memcpy_dtoh(&memory.bytes, &mut buf.view(..).unwrap()).unwrap());
    assert_eq!(panic, "a `BufView` is only a source of copies; copy into a `BufViewMut`");
    stream.synchronize().unwrap();
}

#[test]
fn a_copy_to_another_stream_waits_for_the_copy_into_the_buffer() {
    let (driver, pool, down, mut memory) = start();
    down.memcpy_htod(&vec![7_u8; LEN], &mut memory.bytes).unwrap();
    down.synchronize().unwrap();
    let up = down.context().new_stream().unwrap();
    let mut target: CudaSlice<u8> = up.alloc_zeros(LEN).unwrap();
    up.synchronize().unwrap();
    let mut buf = pool.get(LEN).unwrap();
    buf.wait_slice_mut().unwrap().fill(0);
    let gate = driver.hold(down.cu_stream());
    down.memcpy_dtoh(&memory.bytes, &mut buf).unwrap();
    ends_only_after(&driver, gate, || buf.copy_to(&up, &mut target).unwrap());
    assert_eq!(up.clone_dtoh(&target).unwrap(), vec![7; LEN]);
}

#[test]
fn an_emptied_buffer_is_still_released_after_other_work() {
    let (driver, pool, stream, mut memory) = start();
    let mut buf = pool.get(LEN).unwrap();
    let gate = driver.hold(stream.cu_stream());
    stream.memset_zeros(&mut memory.bytes).unwrap();
    buf.truncate(0);
    buf.release_after(&stream).unwrap();
    assert_eq!(pool.stats().copies.in_flight, 1);
    drop(gate);
    stream.synchronize().unwrap();
    pool.maintain();
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.idle), (0, 1));
}

#[test]
fn a_copy_into_the_buffer_waits_for_cudarcs_copy_from_it() {
    let (driver, pool, up, mut memory) = start();
    let down = up.context().new_stream().unwrap();
    let source = down.clone_htod(&vec![9_u8; LEN]).unwrap();
    down.synchronize().unwrap();
    let buf = filled(&pool, LEN, 1);
    let gate = driver.hold(up.cu_stream());
    up.memcpy_htod(&buf, &mut memory.bytes).unwrap();
    let back = ends_only_after(&driver, gate, || buf.copy_from(&down, &source).unwrap());
    assert_eq!(up.clone_dtoh(&memory.bytes).unwrap(), vec![1; LEN]);
    assert_eq!(*back.wait().unwrap().wait_slice().unwrap(), vec![9; LEN]);
}
