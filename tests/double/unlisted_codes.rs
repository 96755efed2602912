//! A driver that is newer than the bindings answers codes that they do not list: each is an error with its number, and nothing else
//! is different.
#![allow(unsafe_code)] // Names device memory by its address.

use std::time::Duration;

use cudarc::driver::DevicePtr;
use mock_driver::{Code, Double};
use pinpool::copy::cuda::RawMem;
use pinpool::{Backend, FenceKind};

use crate::fixture::{MIB, builder, filled, held, start, stream_and_memory, tensorflow};

const UNLISTED: Code = Code(9999);
const TEXT: &str = "CUDA error 9999";

#[test]
fn an_unlisted_code_of_a_call_that_pins_is_an_error_with_its_number() {
    for (backend, call) in
        [(Backend::Register, "cuMemHostRegister_v2"), (Backend::Cuda, "cuMemHostAlloc"), (Backend::Vmm, "cuMemCreate")]
    {
        let double = Double::load();
        let before = held(&double);
        let pool = builder(backend).wait(Duration::ZERO).build().unwrap();
        double.fail_from(call, 1, UNLISTED);
        let error = pool.get(4 * MIB).unwrap_err().to_string();
        assert!(error.contains(TEXT), "{call}: {error}");
        double.reset_scripts();
        drop(pool.get(4 * MIB).unwrap());
        drop(pool);
        assert_eq!(held(&double), before, "{call}");
    }
}

/// A copy from `byte`s and what is asked of its fence, while `call` answers the code, and again when it does not.
fn copy_while(call: &str, is_before_the_copy: bool) {
    let (double, context, _) = start();
    let pool = tensorflow().unstable_fence(FenceKind::Event).build().unwrap();
    let (stream, memory) = stream_and_memory(&context, 4096);
    let address = memory.device_ptr(&stream).0;
    // cudarc records no event behind this memory: it would keep the code as an enumeration.
    // SAFETY: the memory lives until the end of the test, and nothing else uses it.
    let mut target = unsafe { RawMem::from_raw(address, 4096, stream.clone()) };
    let buf = filled(&pool, 4096, 7);
    if is_before_the_copy {
        double.fail_from(call, 1, UNLISTED);
    }
    let gate = double.hold(stream.cu_stream());
    let copy = buf.copy_to(&stream, &mut target).unwrap();
    double.fail_from(call, 1, UNLISTED);
    let error = copy.is_done().unwrap_err().to_string();
    assert!(error.contains(&format!("{call} failed: {TEXT} (code 9999)")), "{error}");
    assert_eq!(pool.stats().copies.in_flight + pool.stats().memory.lost, 1, "the memory is not used again");
    double.reset_scripts();
    drop(gate);
    copy.wait().unwrap();
    pool.maintain();
    assert_eq!((pool.stats().copies.in_flight, pool.stats().memory.lost), (0, 0));
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [7; 4096]);
}

#[test]
fn an_unlisted_code_of_a_query_is_an_error_and_the_next_query_counts() {
    copy_while("cuEventQuery", false);
}

#[test]
fn an_unlisted_code_of_a_record_leaves_the_copy_without_a_fence_until_it_is_waited_for() {
    copy_while("cuEventRecord", true);
}

#[test]
fn an_unlisted_code_of_a_timelines_write_leaves_the_copy_to_an_event() {
    let (double, context, _) = start();
    let pool = tensorflow().build().unwrap();
    let (stream, mut memory) = stream_and_memory(&context, 4096);
    double.fail_from("cuStreamWriteValue32_v2", 1, UNLISTED);
    let writes = double.calls("cuStreamWriteValue32_v2");
    filled(&pool, 4096, 9).copy_to(&stream, &mut memory).unwrap().wait().unwrap();
    assert!(double.calls("cuStreamWriteValue32_v2") > writes);
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), [9; 4096]);
}
