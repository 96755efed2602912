//! Which devices may reach a pool's memory.

use std::sync::Arc;

use cudarc::driver::CudaContext;
use mock_driver::MockDriver;
use pinpool::{Backend, PinnedBuf};

use crate::fixture::{MIB, builder, filled, stream_and_memory};
use crate::valid_stats::valid_stats;

/// Copies a filled buffer to this device and compares what arrived.
fn copy_arrives(buf: PinnedBuf, context: &Arc<CudaContext>, byte: u8) -> pinpool::Result<()> {
    let (stream, mut memory) = stream_and_memory(context, buf.len());
    buf.copy_to(&stream, &mut memory)?.wait()?;
    assert!(stream.clone_dtoh(&memory).unwrap().iter().all(|&arrived| arrived == byte));
    Ok(())
}

/// Two devices. The driver refuses the second access to a pool's memory.
fn start() -> (MockDriver, [Arc<CudaContext>; 2]) {
    let driver = MockDriver::load();
    driver.set_device_count(2);
    driver.refuse_access(1 << 1);
    let contexts = [0, 1].map(|ordinal| CudaContext::new(ordinal).unwrap());
    (driver, contexts)
}

#[test]
fn a_device_without_access_fails_only_its_own_copies() {
    let (driver, contexts) = start();
    let pool = builder(Backend::Vmm).device(0).build().unwrap();
    copy_arrives(filled(&pool, 3 * MIB, 1), &contexts[0], 1).unwrap();
    let error = copy_arrives(filled(&pool, 3 * MIB, 2), &contexts[1], 2).unwrap_err();
    let text = error.to_string();
    assert!(error.is_copy_refused(), "{text}");
    assert!(text.contains("device 1 cannot reach") && text.contains("PINPOOL_DEVICE"), "{text}");
    assert_eq!((pool.stats().memory.quarantined, pool.stats().copies.in_flight), (0, 0));
    // The pool grows and serves its own device, and the other device once that recovers.
    copy_arrives(filled(&pool, 20 * MIB, 3), &contexts[0], 3).unwrap();
    driver.refuse_access(0);
    copy_arrives(filled(&pool, 3 * MIB, 4), &contexts[1], 4).unwrap();
    valid_stats(&pool);
    drop(pool);
}

#[test]
fn a_device_address_error_does_not_mention_copies() {
    let (_driver, contexts) = start();
    for (backend, context) in [(Backend::Vmm, &contexts[1]), (Backend::Heap, &contexts[0])] {
        let pool = builder(backend).device(0).build().unwrap();
        let error = pool.get(3 * MIB).unwrap().device_ptr(context).unwrap_err();
        let text = error.to_string();
        assert!(error.is_unmapped() && text.starts_with("no device address for 3.0MiB of memory: "), "{text}");
    }
}

#[test]
fn a_refused_device_gets_access_with_a_copy_through_the_pool() {
    let (driver, contexts) = start();
    contexts[0].bind_to_thread().unwrap();
    let pool = builder(Backend::Vmm).build().unwrap();
    let calls = || driver.calls("cuMemSetAccess");
    let first = filled(&pool, 4 * MIB, 1);
    let grown = calls();
    copy_arrives(first, &contexts[0], 1).unwrap();
    assert_eq!(calls(), grown, "the pool's own device has access");
    driver.refuse_access(0);
    for round in 1..4 {
        copy_arrives(filled(&pool, 4 * MIB, 2), &contexts[1], 2).unwrap();
        assert_eq!(calls(), grown + round, "one call for both granules of each copy");
    }
    // The same for the other direction, a copy by cudarc, and a pointer for kernels.
    let (stream, mut memory) = stream_and_memory(&contexts[1], 8 * MIB);
    drop(pool.get(8 * MIB).unwrap().copy_from(&stream, &memory).unwrap().wait().unwrap());
    let buf = filled(&pool, 8 * MIB, 6);
    let before = calls();
    assert!(buf.device_ptr(&contexts[1]).is_ok());
    stream.memcpy_htod(&buf, &mut memory).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(calls(), before + 2);
    assert!(stream.clone_dtoh(&memory).unwrap().iter().all(|&byte| byte == 6));
    drop((buf, pool));
}
