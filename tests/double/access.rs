//! Which devices may reach a pool's memory, which processes, and how the CPU writes to it.
#![allow(unsafe_code)] // Asks the driver for the flags of memory.

use cudarc::driver::{CudaContext, sys};
use mock_driver::Double;
use pinpool::{Backend, HandleTypes, PinnedBuf, Preset};

use crate::fixture::{MIB, builder, filled, held, start, stream_and_memory};

/// Copies a filled buffer to this device and compares what arrived.
fn copy_arrives(buf: PinnedBuf, context: &std::sync::Arc<CudaContext>, byte: u8) -> pinpool::Result<()> {
    let (stream, mut memory) = stream_and_memory(context, buf.len());
    buf.copy_to(&stream, &mut memory)?.wait()?;
    assert!(stream.clone_dtoh(&memory).unwrap().iter().all(|&arrived| arrived == byte));
    Ok(())
}

#[test]
fn one_sick_device_fails_its_own_copies_and_no_growth() {
    let double = Double::load();
    double.set_device_count(2);
    double.refuse_access(1 << 1);
    let contexts = [0, 1].map(|ordinal| CudaContext::new(ordinal).unwrap());
    let pool = builder(Backend::Vmm).device(0).build().unwrap();
    copy_arrives(filled(&pool, 3 * MIB, 1), &contexts[0], 1).unwrap();
    let error = copy_arrives(filled(&pool, 3 * MIB, 2), &contexts[1], 2).unwrap_err();
    let text = error.to_string();
    assert!(error.is_copy() && text.contains("device 1 cannot reach") && text.contains("PINPOOL_DEVICE"), "{text}");
    assert_eq!((pool.stats().lost, pool.stats().in_flight), (0, 0));
    // The pool grows and serves its own device, and the other one once it is well.
    let large = filled(&pool, 20 * MIB, 3);
    copy_arrives(large, &contexts[0], 3).unwrap();
    double.refuse_access(0);
    copy_arrives(filled(&pool, 3 * MIB, 4), &contexts[1], 4).unwrap();
    pool.stats().validate().unwrap();
    drop(pool);
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}

#[test]
fn a_device_that_was_refused_gets_access_once_to_what_it_copies_through_the_pool() {
    let double = Double::load();
    double.set_device_count(2);
    let contexts = [0, 1].map(|ordinal| CudaContext::new(ordinal).unwrap());
    contexts[0].bind_to_thread().unwrap();
    double.refuse_access(1 << 1);
    let pool = builder(Backend::Vmm).build().unwrap();
    let calls = || double.calls("cuMemSetAccess");
    let first = filled(&pool, 4 * MIB, 1);
    let grown = calls();
    copy_arrives(first, &contexts[0], 1).unwrap();
    assert_eq!(calls(), grown, "the pool's own device has access");
    double.refuse_access(0);
    for round in 0..3 {
        copy_arrives(filled(&pool, 4 * MIB, 2), &contexts[1], 2).unwrap();
        assert_eq!(calls(), grown + 2, "two granules, once; round {round}");
    }
    // It answers again, so that new granules have access from the start: for the other direction, a copy of cudarc, and a
    // pointer for kernels.
    let (stream, memory) = stream_and_memory(&contexts[1], 8 * MIB);
    let buf = pool.get(8 * MIB).unwrap();
    let grown = calls();
    drop(buf.copy_from(&stream, &memory).unwrap().wait().unwrap());
    let mut memory = memory;
    let buf = filled(&pool, 8 * MIB, 5);
    assert!(buf.device_ptr(&contexts[1]).is_ok());
    drop(buf);
    let small = filled(&pool, 8 * MIB, 6);
    stream.memcpy_htod(&small, &mut memory).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(calls(), grown);
    assert!(stream.clone_dtoh(&memory).unwrap().iter().all(|&byte| byte == 6));
    drop((small, pool));
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}

#[test]
fn granules_have_handles_where_asked_and_only_there() {
    let double = Double::load();
    let before = held(&double);
    for (types, exportable) in [(HandleTypes::None, 0), (HandleTypes::PosixFd, 2)] {
        for backend in [Backend::Vmm, Backend::Auto] {
            let pool = builder(backend).handle_types(types).build().unwrap();
            let buf = pool.get(4 * MIB).unwrap();
            assert_eq!((pool.stats().backend, double.exportable_granules()), ("vmm", exportable));
            assert_eq!(pool.stats().descriptors, exportable, "each may take one");
            drop(buf);
        }
    }
    for backend in [Backend::Register, Backend::Cuda, Backend::Mlock, Backend::Heap, Backend::Sim { total_bytes: 1 }] {
        let error = builder(backend.clone()).handle_types(HandleTypes::PosixFd).build().unwrap_err();
        let text = error.to_string();
        assert!(error.is_setting() && text.contains("PINPOOL_HANDLE_TYPES=posix_fd"), "{text}");
        assert!(text.contains(&format!("PINPOOL_BACKEND={}", backend.name())), "{text}");
    }
    let error = builder(Backend::Auto).handle_types(HandleTypes::PosixFd).preset(Preset::TensorFlow).build();
    assert!(error.unwrap_err().to_string().contains("adaptive"));
    assert_eq!(held(&double), before);
}

#[test]
fn write_combined_memory_is_that_of_cuda_and_refused_elsewhere() {
    let (_double, context, _pool) = start();
    context.bind_to_thread().unwrap();
    for (backend, asked) in [(Backend::Cuda, false), (Backend::Cuda, true), (Backend::Auto, true)] {
        let pool = builder(backend).write_combined(asked).build().unwrap();
        let mut buf = pool.get(4 * MIB).unwrap();
        let mut flags = 0;
        let start = buf.as_mut_slice().unwrap().as_mut_ptr();
        // SAFETY: the driver looks the address up; `flags` lives as long as the call.
        unsafe { sys::cuMemHostGetFlags(&raw mut flags, start.cast()) }.result().unwrap();
        let is_combined = flags & sys::CU_MEMHOSTALLOC_WRITECOMBINED != 0;
        assert_eq!((pool.stats().backend, is_combined), ("cuda", asked));
        assert_ne!(flags & sys::CU_MEMHOSTALLOC_PORTABLE, 0);
    }
    for backend in [Backend::Vmm, Backend::Register, Backend::Mlock, Backend::Heap, Backend::Sim { total_bytes: 1 }] {
        let error = builder(backend.clone()).write_combined(true).build().unwrap_err();
        let text = error.to_string();
        assert!(error.is_setting() && text.contains("PINPOOL_WRITE_COMBINED=1"), "{text}");
        assert!(text.contains("cuda") && text.contains(backend.name()), "{text}");
    }
    let error = builder(Backend::Auto).write_combined(true).handle_types(HandleTypes::PosixFd).build().unwrap_err();
    assert!(error.is_setting() && error.to_string().contains("only cuda can"), "{error}");
}
