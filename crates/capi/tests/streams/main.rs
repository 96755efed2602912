//! Buffers that are returned after the work of CUDA streams and events, over the mock driver.
#![allow(unsafe_code)] // Calls C functions.

#[allow(dead_code)] // The other tests need all of it.
#[path = "../fixture/mod.rs"]
mod fixture;

use std::path::Path;
use std::process::Command;
use std::ptr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use mock_driver::{Code, MockDriver};
use pinpool::cudarc::driver::sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL as CAPTURE_MODE;
use pinpool::cudarc::driver::{CudaContext, CudaStream, result};
use pinpool_c::*;

use fixture::{
    Address, Handle, SANITIZERS, bytes, compiler, crate_folder, destroy, get, has_sanitizers, is_installed, is_pinned,
    language, last_error, open, outcome, put, run_to_success, stats, try_get,
};

const LEN: usize = 64 << 10;

fn start() -> (MockDriver, Arc<CudaContext>, Arc<CudaStream>, Handle) {
    let driver = MockDriver::load();
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    stream.synchronize().unwrap();
    (driver, context, stream, open("backend=cuda; preset=tensorflow; maintenance_thread=0"))
}

fn put_after_stream(pool: Handle, held: Address, stream: &CudaStream) -> Result<(), (pp_status, String)> {
    // SAFETY: the stream is alive.
    outcome(unsafe { pp_put_after_stream(pool.0, held.0, stream.cu_stream().cast()) }, ())
}

fn record_stream(pool: Handle, held: Address, stream: &CudaStream) -> Result<(), (pp_status, String)> {
    // SAFETY: the stream is alive.
    outcome(unsafe { pp_record_stream(pool.0, held.0, stream.cu_stream().cast()) }, ())
}

fn in_flight(pool: Handle) -> u64 {
    assert_eq!(pp_maintain(pool.0), pp_status::PP_OK);
    stats(pool)["copies"]["in_flight"].as_u64().unwrap()
}

#[test]
fn a_buffer_is_reused_after_the_work_of_its_stream_or_event() {
    let (driver, context, stream, pool) = start();
    let mut memory = stream.alloc_zeros::<u8>(LEN).unwrap();
    for (stream, is_event, mark) in [(&stream, false, 6), (&stream, true, 7), (&context.default_stream(), false, 8)] {
        stream.synchronize().unwrap();
        let held = get(pool, LEN).unwrap();
        bytes(held, LEN).fill(mark);
        let gate = driver.hold(stream.cu_stream());
        stream.memcpy_htod(bytes(held, LEN), &mut memory).unwrap();
        if is_event {
            let event = context.new_event(None).unwrap();
            event.record(stream).unwrap();
            // SAFETY: the event is alive.
            outcome(unsafe { pp_put_after_event(pool.0, held.0, event.cu_event().cast()) }, ()).unwrap();
        } else {
            let put = || [record_stream(pool, held, stream), put_after_stream(pool, held, stream)];
            let on_other_thread = || {
                if mark == 8 {
                    // Without a current context, it is unknown which default stream is meant.
                    assert_eq!(put().map(|put| put.unwrap_err().0), [pp_status::PP_INVALID_HANDLE; 2]);
                    context.bind_to_thread().unwrap();
                }
                put()
            };
            assert_eq!(thread::scope(|scope| scope.spawn(on_other_thread).join().unwrap()), [Ok(()), Ok(())]);
        }
        assert_eq!(in_flight(pool), 1);
        assert_eq!(put(pool, held).unwrap_err().0, pp_status::PP_UNKNOWN_POINTER, "put already");
        let next = get(pool, LEN).unwrap();
        assert_ne!(next, held, "the device reads it");
        bytes(next, LEN).fill(9);
        assert_eq!(try_get(pool, LEN).0, pp_status::PP_NONE_IDLE);
        drop(gate);
        stream.synchronize().unwrap();
        result::ctx::synchronize().unwrap();
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![mark; LEN]);
        assert_eq!((in_flight(pool), try_get(pool, LEN)), (0, (pp_status::PP_OK, held)));
        [held, next].into_iter().for_each(|held| put(pool, held).unwrap());
    }
    destroy(pool);
}

#[test]
fn a_buffer_used_by_two_streams_is_returned_once_after_both() {
    let (driver, context, first, pool) = start();
    let second = context.new_stream().unwrap();
    let held = get(pool, LEN).unwrap();
    let gates = [&first, &second].map(|stream| driver.hold(stream.cu_stream()));
    thread::scope(|scope| {
        for stream in [&first, &second] {
            scope.spawn(move || (0..50).for_each(|_| record_stream(pool, held, stream).unwrap()));
        }
    });
    bytes(held, LEN).fill(7); // The caller still has the buffer.
    let call = driver.hold_call("cuStreamIsCapturing");
    thread::scope(|scope| {
        let recording = scope.spawn(|| record_stream(pool, held, &second));
        call.wait_for(1);
        let returning = scope.spawn(|| put_after_stream(pool, held, &first));
        thread::sleep(Duration::from_millis(20));
        assert!(!returning.is_finished(), "or its stream is lost");
        drop(call);
        assert_eq!((recording.join().unwrap(), returning.join().unwrap()), (Ok(()), Ok(())));
    });
    for (gate, stream) in gates.into_iter().zip([&first, &second]) {
        assert_eq!(in_flight(pool), 1);
        drop(gate);
        stream.synchronize().unwrap();
    }
    assert_eq!((in_flight(pool), get(pool, LEN).unwrap()), (0, held));
    let call = driver.hold_call("cuStreamIsCapturing");
    thread::scope(|scope| {
        let returning = scope.spawn(|| put_after_stream(pool, held, &first));
        call.wait_for(1);
        for refused in [put(pool, held), put_after_stream(pool, held, &first), record_stream(pool, held, &first)] {
            let (status, text) = refused.unwrap_err();
            assert!(status == pp_status::PP_UNKNOWN_POINTER && text.contains("another call is returning"), "{text}");
        }
        assert_eq!(is_pinned(pool, held), Ok(1));
        drop(call);
        assert_eq!(returning.join().unwrap(), Ok(()));
    });
    destroy(pool);
}

#[test]
fn a_failed_return_leaves_the_buffer_in_use() {
    let (driver, context, stream, pool) = start();
    // SAFETY: NULL is refused.
    let after_event = |held: Address| unsafe { pp_put_after_event(pool.0, held.0, ptr::null_mut()) };
    let no_stream = ptr::without_provenance_mut(0x1234_5670);
    // SAFETY: the mock driver checks handles before it uses them.
    let after_stream = |held: Address| unsafe { pp_put_after_stream(pool.0, held.0, no_stream) };
    for (number, put_after) in [(1, &after_event as &dyn Fn(_) -> _), (2, &after_stream)] {
        let held = get(pool, LEN).unwrap();
        assert_eq!(put_after(held), pp_status::PP_INVALID_HANDLE, "{:?}", last_error());
        // The driver counts this as a misuse.
        driver.reset();
        assert_eq!(context.check_err(), Ok(()));
        stream.synchronize().unwrap();
        bytes(held, LEN).fill(1);
        put(pool, held).unwrap();
        assert_ne!(get(pool, LEN).unwrap(), held, "work of that stream may still use the memory");
        assert_eq!((in_flight(pool), &stats(pool)["memory"]["quarantined"]), (0, &number.into()));
    }
    destroy(pool);
}

#[test]
fn a_failed_return_can_be_repeated_unless_the_stream_captures() {
    let (driver, context, stream, pool) = start();
    let held = get(pool, LEN).unwrap();
    driver.fail_from("cuStreamIsCapturing", 1, Code::UNKNOWN);
    assert_eq!(put_after_stream(pool, held, &stream).unwrap_err().0, pp_status::PP_DEVICE_FAILED);
    driver.reset_scripts();
    let gate = driver.hold(stream.cu_stream());
    let _work = stream.clone_htod(bytes(held, LEN)).unwrap();
    put_after_stream(pool, held, &stream).unwrap();
    assert_eq!((in_flight(pool), try_get(pool, LEN).0), (1, pp_status::PP_NONE_IDLE));
    drop(gate);
    stream.synchronize().unwrap();
    assert_eq!((in_flight(pool), &stats(pool)["memory"]["quarantined"]), (0, &0.into()));
    assert_eq!(try_get(pool, LEN), (pp_status::PP_OK, held), "the second put replaces the first");

    // SAFETY: no other call uses the stream.
    unsafe { result::stream::begin_capture(stream.cu_stream(), CAPTURE_MODE) }.unwrap();
    assert_eq!(put_after_stream(pool, held, &stream).unwrap_err().0, pp_status::PP_STREAM_CAPTURING);
    // SAFETY: as above.
    unsafe { result::stream::end_capture(stream.cu_stream()) }.unwrap();
    put_after_stream(pool, held, &stream).unwrap();
    assert_eq!((in_flight(pool), &stats(pool)["memory"]["quarantined"]), (0, &1.into()), "launched again");
    assert_eq!(context.check_err(), Ok(()));
    destroy(pool);
}

#[test]
fn a_destroyed_pool_is_released_with_its_last_buffer() {
    let (driver, _context, stream, pool) = start();
    // The first fence of a context pins a page for the life of the process.
    let first = open("backend=heap");
    put_after_stream(first, get(first, LEN).unwrap(), &stream).unwrap();
    destroy(first);
    let before = driver.counts().pinned_bytes;
    let held = get(pool, LEN).unwrap();
    assert!(driver.counts().pinned_bytes > before && is_pinned(pool, held) == Ok(1));
    destroy(pool);
    assert!(driver.counts().pinned_bytes > before, "the buffer is out");
    put_after_stream(pool, held, &stream).unwrap();
    assert_eq!(driver.counts().pinned_bytes, before);
    assert_eq!(put(pool, held).unwrap_err().0, pp_status::PP_UNKNOWN_POOL);
}

#[test]
fn no_request_succeeds_after_a_device_reset() {
    let (driver, _context, stream, pool) = start();
    let held = get(pool, LEN).unwrap();
    drop(stream);
    driver.renew_contexts();
    assert_eq!([LEN, 2 * LEN].map(|bytes| get(pool, bytes).unwrap_err().0), [pp_status::PP_DEVICE_RESET; 2]);
    put(pool, held).unwrap();
    destroy(pool);
}

#[test]
fn programs_in_c_and_cpp_copy_through_the_driver() {
    // The mock driver under the name of the real one, and the library under its own.
    let (folder, library) = (tempfile::tempdir().unwrap(), MockDriver::library());
    let link = |from: &Path, name: &str| std::os::unix::fs::symlink(from, folder.path().join(name)).unwrap();
    link(&library, "libcuda.so");
    let built = library.with_file_name("libpinpool_c.so");
    ["libpinpool.so", "libpinpool.so.0"].into_iter().for_each(|name| link(&built, name));
    let program = folder.path().join("program");
    let compile = |source: &str, options: Option<&str>| {
        let (name, standard) = language(source);
        let mut command = compiler(name);
        command.arg(standard).arg(crate_folder().join(source)).args(options).arg("-o").arg(&program);
        command.arg("-I").arg(crate_folder().join("include")).arg("-L").arg(folder.path());
        run_to_success(command.args(["-lpinpool", "-lcuda"]));
    };
    let run = |backend| {
        let mut command = Command::new(&program);
        command.env("LD_LIBRARY_PATH", folder.path()).env("PINPOOL_BACKEND", backend);
        // The mock driver copies returned buffers with a memmove in this process. A GPU's copies are not checked either.
        command.env("ASAN_OPTIONS", "replace_intrin=0");
        let output = command.env("MOCK_DRIVER_REPORT", "stderr").output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && out.contains("200 batches arrived whole"), "{backend}: {out}{err}");
        assert!(err.contains("0 frees with work in flight, 0 misuses"), "{backend}: {err}");
    };
    let sources = ["examples/copy_batches.c", "examples/copy_batches.cpp", "tests/programs/streams.cpp"];
    for source in sources.into_iter().filter(|source| is_installed(language(source).0)) {
        compile(source, None);
        ["vmm", "register", "cuda"].into_iter().for_each(run);
        if has_sanitizers(language(source).0) {
            compile(source, Some(SANITIZERS));
            run("register");
        }
    }
    if is_installed("c++") {
        compile(sources[2], Some("-DCUDA_API_PER_THREAD_DEFAULT_STREAM"));
        run("cuda");
    }
}
