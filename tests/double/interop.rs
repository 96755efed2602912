//! The pool among other users of CUDA, on the driver double: copies that cudarc makes by itself, copies back, work of
//! others, other frameworks' handles, and how the end of all of them is learnt.
#![allow(unsafe_code)] // Captures, raw handles and event tracking, which cudarc leaves to its users.

use std::io::Write;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cudarc::driver::sys::{CUresult, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError, result};
use driver_double::{Code, Double};
use pinpool::copy::cuda::RawMem;
use pinpool::testing::ManualClock;
use pinpool::{Backend, FenceKind, PinnedBuf, Pool, PoolBuilder, Preset};

const LEN: usize = 64 << 10;

fn builder() -> PoolBuilder {
    Pool::builder().without_env().preset(Preset::Tensorflow).backend(Backend::Cuda)
}

fn start() -> (Double, Arc<CudaContext>, Pool) {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let pool = builder().build().unwrap();
    (double, context, pool)
}

/// Device memory with nothing left to run on its stream.
fn memory(stream: &Arc<CudaStream>, byte: u8) -> CudaSlice<u8> {
    let memory = stream.clone_htod(&vec![byte; LEN]).unwrap();
    stream.synchronize().unwrap();
    memory
}

fn filled(pool: &Pool, byte: u8) -> PinnedBuf {
    let mut buf = pool.get(LEN).unwrap();
    buf.as_mut_slice().unwrap().fill(byte);
    buf
}

fn first_wrong(found: &[u8], expected: u8) -> Option<usize> {
    assert_eq!(found.len(), LEN);
    found.iter().position(|&byte| byte != expected)
}

/// Captures on `stream` while `run` runs; the graph is never launched.
fn captured(stream: &CudaStream, run: impl FnOnce()) {
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    // SAFETY: a live stream, which captures until the line after `run`.
    unsafe { result::stream::begin_capture(stream.cu_stream(), mode) }.unwrap();
    run();
    // SAFETY: as above.
    let graph = unsafe { result::stream::end_capture(stream.cu_stream()) }.unwrap();
    // SAFETY: just made.
    unsafe { result::graph::destroy(graph) }.unwrap();
}

/// A stream whose handle is that of `gone`, which has work to do yet.
fn stream_in_place_of(context: &Arc<CudaContext>, gone: Arc<CudaStream>) -> Arc<CudaStream> {
    let handle = gone.cu_stream();
    drop(gone);
    let stream = context.new_stream().unwrap();
    assert_eq!(stream.cu_stream(), handle, "handles recur");
    stream
}

/// The ways in which programs use cudarc: the last two make it record no events at all.
fn usual_streams(context: &Arc<CudaContext>) -> Vec<Arc<CudaStream>> {
    let untracked = CudaContext::new(0).unwrap();
    // SAFETY: each test uses one stream at a time for its device memory.
    unsafe { untracked.disable_event_tracking() };
    vec![
        context.new_stream().unwrap(),
        context.per_thread_stream(),
        untracked.new_stream().unwrap(),
        CudaContext::new(0).unwrap().default_stream(),
    ]
}

#[test]
fn a_copy_that_cudarc_makes_by_itself_keeps_the_buffer_until_it_is_over() {
    let (double, context, pool) = start();
    for (byte, stream) in (1..).zip(usual_streams(&context)) {
        let mut target = memory(&stream, 0);
        let gate = double.hold_all();
        let buf = filled(&pool, byte);
        let id = buf.id();
        stream.memcpy_htod(&buf, &mut target).unwrap();
        assert_eq!(buf.as_slice_untracked().unwrap().len(), LEN, "a copy that only reads holds up no reader");
        drop(buf);
        pool.poll();
        assert_eq!((pool.stats().in_flight, pool.stats().buffers_in_pool), (1, 0), "stream {byte}");
        assert!(pool.try_get(LEN).unwrap().is_none(), "handed out under a copy on stream {byte}");
        drop(gate);
        stream.synchronize().unwrap();
        assert_eq!(pool.try_get(LEN).unwrap().expect("back in the pool").id(), id);
        assert_eq!(first_wrong(&stream.clone_dtoh(&target).unwrap(), byte), None);
    }
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}

#[test]
fn writing_after_cudarcs_own_copy_waits_for_it() {
    let (double, context, pool) = start();
    for stream in usual_streams(&context) {
        let mut target = memory(&stream, 0);
        let gate = double.hold_all();
        let mut buf = filled(&pool, 1);
        stream.memcpy_htod(&buf, &mut target).unwrap();
        assert!(buf.try_as_mut_slice().unwrap().is_none());
        let waits = double.calls("cuEventSynchronize");
        thread::scope(|scope| {
            let writer = scope.spawn(|| buf.as_mut_slice().unwrap().fill(2));
            while double.calls("cuEventSynchronize") == waits {
                thread::yield_now();
            }
            assert!(!writer.is_finished());
            drop(gate);
            writer.join().unwrap();
        });
        assert_eq!(first_wrong(&stream.clone_dtoh(&target).unwrap(), 1), None);
    }
}

#[test]
fn bytes_that_cudarc_copies_back_are_there_when_they_are_read() {
    let (double, context, pool) = start();
    for (byte, stream) in (1..).zip(usual_streams(&context)) {
        let (source, mut buf) = (memory(&stream, byte), filled(&pool, 0));
        let gate = double.hold_all();
        stream.memcpy_dtoh(&source, &mut buf).unwrap();
        assert!(buf.try_as_mut_slice().unwrap().is_none());
        let waits = double.calls("cuEventSynchronize");
        thread::scope(|scope| {
            let reader = scope.spawn(|| first_wrong(buf.as_slice_untracked().unwrap(), byte));
            while double.calls("cuEventSynchronize") == waits {
                thread::yield_now();
            }
            drop(gate);
            assert_eq!(reader.join().unwrap(), None);
        });
    }
}

#[test]
fn a_buffer_filled_on_one_stream_is_sent_on_another_only_when_it_is_full() {
    let (_double, context, pool) = start();
    for byte in 1..40 {
        let (down, up) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let (source, mut target) = (memory(&down, byte), memory(&up, 0));
        let mut buf = filled(&pool, 0);
        down.memcpy_dtoh(&source, &mut buf).unwrap();
        up.memcpy_htod(&buf, &mut target).unwrap();
        // And back, over bytes that are still being sent.
        let other = memory(&down, 200);
        down.memcpy_dtoh(&other, &mut buf).unwrap();
        assert_eq!(first_wrong(&up.clone_dtoh(&target).unwrap(), byte), None);
        assert_eq!(first_wrong(buf.as_slice_untracked().unwrap(), 200), None);
    }
}

#[test]
fn errors_left_by_others_do_not_free_a_buffer_under_cudarcs_copy() {
    let (double, context, pool) = start();
    let (writer, stream) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let mut target = memory(&writer, 0);
    let gate = double.hold(stream.cu_stream());
    let buf = filled(&pool, 1);
    // The target's wait for its other stream fails: cudarc stores that, goes on, and then records nothing of its own.
    double.fail("cuStreamWaitEvent", 1, Code::UNKNOWN);
    stream.memcpy_htod(&buf, &mut target).unwrap();
    assert_eq!(context.check_err(), Err(DriverError(CUresult::CUDA_ERROR_UNKNOWN)));
    let left_behind = DriverError(CUresult::CUDA_ERROR_ILLEGAL_STATE);
    context.record_err::<()>(Err(left_behind));
    drop(buf);
    pool.poll();
    assert_eq!((pool.stats().in_flight, pool.stats().lost), (1, 0));
    drop(gate);
    stream.synchronize().unwrap_err();
    stream.synchronize().unwrap();
    pool.poll();
    assert_eq!((pool.stats().in_flight, pool.stats().buffers_in_pool), (0, 1));
}

#[test]
fn a_copy_of_cudarcs_whose_end_nobody_can_know_takes_the_buffer_out_of_use() {
    let (double, context, pool) = start();
    let stream = context.default_stream();
    let mut target = memory(&stream, 0);
    // The stream of our own that the first loan makes is there.
    stream.memcpy_htod(&filled(&pool, 1), &mut target).unwrap();
    stream.synchronize().unwrap();
    pool.poll();
    for (lost, call) in (1..).zip(["cuEventRecord", "cuEventCreate", "cuStreamIsCapturing"]) {
        let buf = filled(&pool, 2);
        double.fail(call, 1, Code::UNKNOWN);
        stream.memcpy_htod(&buf, &mut target).unwrap();
        drop(buf);
        stream.synchronize().unwrap();
        pool.poll();
        assert_eq!((pool.stats().lost, pool.stats().in_flight), (lost, 0), "{call}");
        context.check_err().unwrap();
    }
    // A slice that somebody took and whose guard he forgot.
    let buf = filled(&pool, 3);
    // SAFETY: the slice is not used at all.
    let (_, guard) = unsafe { cudarc::driver::HostSlice::stream_synced_slice(&buf, &stream) };
    std::mem::forget(guard);
    drop(buf);
    pool.poll();
    assert_eq!(pool.stats().lost, 4);
}

#[test]
fn a_copy_of_cudarcs_into_a_graph_takes_the_buffer_out_of_use_and_the_capture_lives() {
    let (double, context, pool) = start();
    let stream = context.new_stream().unwrap();
    // SAFETY: one stream.
    unsafe { context.disable_event_tracking() };
    let mut target = memory(&stream, 0);
    let buf = filled(&pool, 1);
    captured(&stream, || {
        stream.memcpy_htod(&buf, &mut target).unwrap();
        drop(buf);
        pool.poll();
        assert_eq!((pool.stats().lost, pool.stats().in_flight, pool.stats().buffers_in_pool), (1, 0, 0));
    });
    assert_eq!(double.counts().spoiled_captures, 0);
}

#[test]
fn cudarcs_copies_leave_the_threads_context_alone() {
    let (_double, context, pool) = start();
    let stream = context.new_stream().unwrap();
    let mut target = memory(&stream, 0);
    let buf = filled(&pool, 1);
    stream.memcpy_htod(&buf, &mut target).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            drop(buf);
            stream_is_idle(&pool);
            assert_eq!(result::ctx::get_current(), Ok(None));
        });
    });
}

/// Waits until nothing is in flight.
fn stream_is_idle(pool: &Pool) {
    while pool.stats().in_flight > 0 {
        pool.poll();
        thread::yield_now();
    }
}

#[test]
fn cudarcs_copies_carry_every_batch_whole_under_churn() {
    let (double, context, pool) = start();
    thread::scope(|scope| {
        for lane in 0..4_u8 {
            let (pool, context) = (&pool, &context);
            scope.spawn(move || {
                context.bind_to_thread().unwrap();
                let streams = usual_streams(context);
                let mut targets: Vec<_> = streams.iter().map(|stream| memory(stream, 0)).collect();
                for round in 0..40_u8 {
                    let byte = |index: u8| lane ^ round.wrapping_mul(5) ^ index.wrapping_mul(63);
                    for ((index, stream), target) in (0..).zip(&streams).zip(&mut targets) {
                        stream.memcpy_htod(&filled(pool, byte(index)), target).unwrap();
                    }
                    for ((index, stream), target) in (0..).zip(&streams).zip(&targets) {
                        let mut back = pool.get(LEN).unwrap();
                        stream.memcpy_dtoh(target, &mut back).unwrap();
                        let wrong = first_wrong(back.as_slice_untracked().unwrap(), byte(index));
                        assert_eq!(wrong, None, "first wrong byte, lane {lane}, round {round}, stream {index}");
                    }
                }
            });
        }
    });
    stream_is_idle(&pool);
    let stats = pool.stats();
    assert_eq!((stats.puts, stats.lost), (4 * 40 * 8, 0));
    assert!(stats.underlying.allocs <= 40, "{} buffers for 20 at a time", stats.underlying.allocs);
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}

#[test]
fn a_buffer_from_the_device_is_read_only_when_it_is_there() {
    let (double, context, pool) = start();
    let stream = context.new_stream().unwrap();
    let source = memory(&stream, 7);
    let gate = double.hold(stream.cu_stream());
    let arriving = filled(&pool, 0).copy_from(&stream, &source).unwrap();
    assert!(!arriving.is_done().unwrap());
    // One that nobody waits for stays away until its copy is over.
    drop(filled(&pool, 0).copy_from(&stream, &source).unwrap());
    pool.poll();
    assert_eq!((pool.stats().in_flight, pool.stats().in_use), (1, 1));
    drop(gate);
    assert_eq!(first_wrong(arriving.wait().unwrap().as_slice_untracked().unwrap(), 7), None);
    stream_is_idle(&pool);
    let error = pool.get(LEN + 1).unwrap().copy_from(&stream, &source).unwrap_err();
    assert!(error.is_copy() && error.to_string().contains("65536"), "{error}");
}

#[test]
fn a_copy_back_that_fails_gives_no_bytes() {
    let (double, context, pool) = start();
    let stream = context.new_stream().unwrap();
    let source = memory(&stream, 7);
    let _gate = double.hold(stream.cu_stream());
    let arriving = filled(&pool, 0).copy_from(&stream, &source).unwrap();
    let mut buf = filled(&pool, 0);
    stream.memcpy_dtoh(&source, &mut buf).unwrap();
    double.lose_device(Code::LAUNCH_FAILED);
    assert!(arriving.wait().unwrap_err().is_device());
    assert!(buf.wait().unwrap_err().is_device());
    assert!(buf.as_slice_untracked().unwrap_err().is_device());
    assert!(buf.cast_slice_mut::<u32>().unwrap_err().is_device());
    assert!(buf.try_as_mut_slice().unwrap_err().is_device());
    let written = buf.write(&[1]).unwrap_err();
    assert!(written.get_ref().unwrap().downcast_ref::<pinpool::Error>().unwrap().is_device());
    assert_eq!(buf.len(), LEN, "it does not pass for an empty buffer");
    drop(buf);
    pool.poll();
    assert_eq!((pool.stats().lost, pool.stats().buffers_in_pool), (2, 0));
}

#[test]
fn a_buffer_released_behind_the_work_of_others_waits_for_that_work_only() {
    let (double, context, pool) = start();
    let (stream, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let event = context.new_event(None).unwrap();
    let mut target = memory(&stream, 0);
    let gate = double.hold(stream.cu_stream());
    stream.memset_zeros(&mut target).unwrap();
    event.record(&stream).unwrap();
    filled(&pool, 1).release_after(&stream).unwrap();
    filled(&pool, 1).release_after_event(&event).unwrap();
    filled(&pool, 1).release_after(&other).unwrap();
    // What the event stands for later, and that it goes, changes nothing.
    event.record(&other).unwrap();
    drop(event);
    filled(&pool, 1).release_after_event(&context.new_event(None).unwrap()).unwrap();
    other.synchronize().unwrap();
    pool.poll();
    assert!(pool.stats().in_flight >= 2, "{} in flight", pool.stats().in_flight);
    drop(gate);
    stream_is_idle(&pool);
    double.fail("cuEventRecord", 1, Code::UNKNOWN);
    assert!(filled(&pool, 1).release_after(&stream).unwrap_err().is_device());
    assert_eq!((pool.stats().lost, pool.stats().in_flight), (1, 0));
}

#[test]
fn handles_of_other_frameworks_serve_as_streams_and_memory() {
    let (double, context, pool) = start();
    let owner = context.new_stream().unwrap();
    let allocated = memory(&owner, 0);
    let address = allocated.device_ptr(&owner).0;
    // SAFETY: the owner's stream lives to the end of this test.
    let stream = unsafe { context.wrap_borrowed_stream(owner.cu_stream()) };
    // SAFETY: so does its memory, which nothing else uses meanwhile.
    let mut raw = unsafe { RawMem::from_raw(address, LEN, stream.clone()) };
    let gate = double.hold(owner.cu_stream());
    let copy = filled(&pool, 5).copy_to(&stream, &mut raw).unwrap();
    assert!(!copy.is_done().unwrap());
    drop(gate);
    let back = filled(&pool, 0).copy_from(&stream, &raw).unwrap().wait().unwrap();
    assert_eq!(first_wrong(back.as_slice_untracked().unwrap(), 5), None);
}

#[test]
fn a_pinned_buffer_has_an_address_for_kernels_and_an_ordinary_one_has_none() {
    let (_double, context, pool) = start();
    let buf = filled(&pool, 1);
    assert_eq!(buf.device_ptr(&context).unwrap(), buf.as_ptr() as u64);
    let heap = Pool::builder().without_env().backend(Backend::Heap).build().unwrap();
    assert!(filled(&heap, 1).device_ptr(&context).unwrap_err().is_copy());
}

#[test]
fn copies_in_steady_state_make_no_events() {
    let (double, context, pool) = start();
    let stream = context.new_stream().unwrap();
    let mut target = memory(&stream, 0);
    filled(&pool, 1).copy_to(&stream, &mut target).unwrap().wait().unwrap();
    pool.poll();
    let (made, gone) = (double.calls("cuEventCreate"), double.calls("cuEventDestroy_v2"));
    for byte in 0..100 {
        filled(&pool, byte).copy_to(&stream, &mut target).unwrap().wait().unwrap();
        pool.poll();
    }
    assert_eq!((double.calls("cuEventCreate"), double.calls("cuEventDestroy_v2")), (made, gone));
}

#[test]
fn without_an_event_a_copy_is_refused_and_the_buffer_goes_back() {
    let (double, context, pool) = start();
    let stream = context.new_stream().unwrap();
    let mut target = memory(&stream, 0);
    let _gate = double.hold(stream.cu_stream());
    double.fail_from("cuEventCreate", 1, Code::OUT_OF_MEMORY);
    // Those that earlier copies left are used up first.
    let refused = (0..2000).find_map(|_| pool.get(16).unwrap().copy_to(&stream, &mut target).err()).unwrap();
    assert!(refused.is_copy() && refused.to_string().contains("cuEventCreate"), "{refused}");
    assert_eq!((pool.stats().lost, pool.stats().in_use), (0, 0));
}

#[test]
fn on_a_timeline_every_copy_is_over_when_it_is_and_no_sooner_also_through_the_wrap() {
    let (double, context, _) = start();
    let pool = builder().fence(FenceKind::Timeline).build().unwrap();
    let stream = context.new_stream().unwrap();
    let mut target = memory(&stream, 0);
    let records = double.calls("cuEventRecord");
    // A new stream's numbers wrap after 64 copies.
    for round in 0..40 {
        let gate = double.hold(stream.cu_stream());
        let copies: Vec<_> = (0..5).map(|byte| filled(&pool, byte).copy_to(&stream, &mut target).unwrap()).collect();
        for (done, copy) in copies.iter().enumerate() {
            assert!(!copy.is_done().unwrap(), "round {round}, copy {done}");
        }
        assert!(pool.try_get(LEN).unwrap().is_none());
        drop(gate);
        copies.iter().rev().for_each(|copy| copy.wait().unwrap());
        assert!(copies.iter().all(|copy| copy.is_done().unwrap()), "round {round}");
        assert_eq!(first_wrong(&stream.clone_dtoh(&target).unwrap(), 4), None);
        pool.poll();
        assert_eq!(pool.stats().buffers_in_pool, 5);
    }
    assert_eq!(double.calls("cuStreamWriteValue32_v2"), 200);
    // The target's own notes, one a copy and one for each look at it, and no mark.
    assert_eq!(double.calls("cuEventRecord") - records, 240);
}

#[test]
fn timelines_carry_every_batch_whole_on_many_threads_that_share_streams() {
    let (double, context, _) = start();
    let pool = builder().fence(FenceKind::Timeline).build().unwrap();
    let streams: Vec<_> = (0..3).map(|_| context.new_stream().unwrap()).collect();
    thread::scope(|scope| {
        for lane in 0..6_u8 {
            let (pool, context, streams) = (&pool, &context, &streams);
            scope.spawn(move || {
                context.bind_to_thread().unwrap();
                let mut targets: Vec<_> = streams.iter().map(|stream| memory(stream, 0)).collect();
                for round in 0..60_u8 {
                    let byte = |index: u8| lane ^ round.wrapping_mul(5) ^ index.wrapping_mul(63);
                    for ((index, stream), target) in (0..).zip(streams).zip(&mut targets) {
                        filled(pool, byte(index)).copy_to(stream, target).unwrap();
                    }
                    for ((index, stream), target) in (0..).zip(streams).zip(&targets) {
                        let back = pool.get(LEN).unwrap().copy_from(stream, target).unwrap().wait().unwrap();
                        let wrong = first_wrong(back.as_slice_untracked().unwrap(), byte(index));
                        assert_eq!(wrong, None, "first wrong byte, lane {lane}, round {round}, stream {index}");
                    }
                }
            });
        }
    });
    stream_is_idle(&pool);
    assert_eq!((pool.stats().puts, pool.stats().lost), (6 * 60 * 6, 0));
    assert_eq!(double.calls("cuStreamWriteValue32_v2"), 6 * 60 * 3);
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}

#[test]
fn a_word_serves_one_stream_after_another() {
    let (double, context, _) = start();
    let pool = builder().fence(FenceKind::Timeline).build().unwrap();
    let pages = double.counts().host_allocations;
    for round in 0..300 {
        let stream = context.new_stream().unwrap();
        let mut target = memory(&stream, 0);
        let copies: Vec<_> = (1..4).map(|byte| filled(&pool, byte).copy_to(&stream, &mut target).unwrap()).collect();
        assert_eq!(first_wrong(&stream.clone_dtoh(&target).unwrap(), 3), None, "round {round}");
        copies.iter().for_each(|copy| copy.wait().unwrap());
        pool.poll();
    }
    assert!(double.counts().host_allocations <= pages + 2 + 3, "words are used again");
}

#[test]
fn a_lost_device_is_noticed_on_a_timeline_too() {
    let (double, context, _) = start();
    let pool = builder().fence(FenceKind::Timeline).build().unwrap();
    let stream = context.new_stream().unwrap();
    let mut target = memory(&stream, 0);
    let _gate = double.hold(stream.cu_stream());
    let copy = filled(&pool, 1).copy_to(&stream, &mut target).unwrap();
    double.lose_device(Code::LAUNCH_FAILED);
    let error = copy.wait().unwrap_err();
    assert!(error.is_device() && error.to_string().contains("LAUNCH_FAILED"), "{error}");
    while pool.stats().lost == 0 {
        pool.poll();
    }
    assert_eq!((pool.stats().in_flight, pool.stats().buffers_in_pool), (0, 0));
}

#[test]
fn where_the_driver_writes_no_values_events_do() {
    let (double, context, _) = start();
    let pool = builder().fence(FenceKind::Timeline).build().unwrap();
    let stream = context.new_stream().unwrap();
    let mut target = memory(&stream, 0);
    for code in [Code::NOT_SUPPORTED, Code::INVALID_VALUE] {
        double.fail("cuStreamWriteValue32_v2", 1, code);
        let gate = double.hold(stream.cu_stream());
        let copy = filled(&pool, 1).copy_to(&stream, &mut target).unwrap();
        assert!(!copy.is_done().unwrap());
        drop(gate);
        copy.wait().unwrap();
        assert_eq!(first_wrong(&stream.clone_dtoh(&target).unwrap(), 1), None);
    }
    stream_is_idle(&pool);
    assert_eq!(pool.stats().lost, 0);
}

#[test]
fn the_oldest_copy_in_flight_is_known_by_its_age_and_stream() {
    let (double, context, _) = start();
    let clock = ManualClock::default();
    let pool = builder().clock(clock.clone()).build().unwrap();
    let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let mut targets = [memory(&first, 0), memory(&second, 0)];
    let gates = [double.hold(first.cu_stream()), double.hold(second.cu_stream())];
    for (stream, target) in [&first, &second].into_iter().zip(&mut targets) {
        filled(&pool, 1).copy_to(stream, target).unwrap();
        clock.advance_us(1_000_000);
    }
    let oldest = || (pool.stats().oldest_in_flight, pool.stats().oldest_in_flight_stream);
    assert_eq!(oldest(), (Some(Duration::from_secs(2)), Some(first.cu_stream() as u64)));
    let [gate, _still_held] = gates;
    drop(gate);
    first.synchronize().unwrap();
    pool.poll();
    assert_eq!(oldest(), (Some(Duration::from_secs(1)), Some(second.cu_stream() as u64)));
}

#[test]
fn a_stream_with_the_handle_of_a_destroyed_one_says_nothing_of_its_copies() {
    let (double, context, _) = start();
    let pool = builder().fence(FenceKind::Timeline).build().unwrap();
    let (owner, first) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let mut targets = [memory(&owner, 0), memory(&owner, 0), memory(&owner, 0)];
    let old_gate = double.hold(first.cu_stream());
    let old = filled(&pool, 1).copy_to(&first, &mut targets[0]).unwrap();
    let second = stream_in_place_of(&context, first);
    // What the new stream counts to is not what the old one has done.
    filled(&pool, 2).copy_to(&second, &mut targets[1]).unwrap().wait().unwrap();
    assert!(!old.is_done().unwrap(), "ended by another stream");
    let new_gate = double.hold(second.cu_stream());
    let new = filled(&pool, 3).copy_to(&second, &mut targets[2]).unwrap();
    drop(old_gate);
    old.wait().unwrap();
    // Nor is what the old one writes at last a turn of the new one's wheel.
    assert!(!new.is_done().unwrap(), "ended by another stream");
    drop(new_gate);
    new.wait().unwrap();
    assert_eq!(double.calls("cuStreamWriteValue32_v2"), 3, "all of them on timelines");
    for (byte, target) in (1..).zip(&targets) {
        assert_eq!(first_wrong(&owner.clone_dtoh(target).unwrap(), byte), None);
    }
}

#[test]
fn what_a_destroyed_stream_still_writes_is_waited_for_on_the_next_with_its_handle() {
    let (double, context, pool) = start();
    let (owner, down) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let (source, other, mut target) = (memory(&owner, 7), memory(&owner, 8), memory(&owner, 0));
    let mut buf = filled(&pool, 0);
    // Both ways of using it again: it is read, and it is written to.
    for (filling, expected) in [(&source, 7), (&other, 8)] {
        let down = context.new_stream().unwrap();
        let gate = double.hold(down.cu_stream());
        down.memcpy_dtoh(filling, &mut buf).unwrap();
        let up = stream_in_place_of(&context, down);
        let waits = double.calls("cuEventSynchronize");
        thread::scope(|scope| {
            let sender = scope.spawn(|| up.memcpy_htod(&buf, &mut target).unwrap());
            while double.calls("cuEventSynchronize") == waits && !sender.is_finished() {
                thread::yield_now();
            }
            assert!(!sender.is_finished(), "sent before it was there");
            drop(gate);
            sender.join().unwrap();
        });
        assert_eq!(first_wrong(&up.clone_dtoh(&target).unwrap(), expected), None);
    }
    let gate = double.hold(down.cu_stream());
    down.memcpy_htod(&buf, &mut target).unwrap();
    let again = stream_in_place_of(&context, down);
    let waits = double.calls("cuEventSynchronize");
    thread::scope(|scope| {
        let filler = scope.spawn(|| again.memcpy_dtoh(&source, &mut buf).unwrap());
        while double.calls("cuEventSynchronize") == waits && !filler.is_finished() {
            thread::yield_now();
        }
        assert!(!filler.is_finished(), "overwritten while it was sent");
        drop(gate);
        filler.join().unwrap();
    });
    assert_eq!(first_wrong(&owner.clone_dtoh(&target).unwrap(), 8), None);
    assert_eq!(first_wrong(buf.as_slice_untracked().unwrap(), 7), None);
}

#[test]
fn on_one_and_the_same_stream_nothing_waits() {
    let (double, context, pool) = start();
    let owner = context.new_stream().unwrap();
    for stream in [context.new_stream().unwrap(), context.default_stream(), context.per_thread_stream()] {
        let (source, mut target) = (memory(&owner, 7), memory(&owner, 0));
        let gate = double.hold_all();
        let mut buf = filled(&pool, 0);
        stream.memcpy_dtoh(&source, &mut buf).unwrap();
        stream.memcpy_htod(&buf, &mut target).unwrap();
        stream.memcpy_dtoh(&source, &mut buf).unwrap();
        drop(gate);
        assert_eq!(first_wrong(&stream.clone_dtoh(&target).unwrap(), 7), None);
    }
    assert_eq!(double.calls("cuEventSynchronize"), 0);
}

#[test]
fn a_copy_whose_wait_draws_the_stream_into_a_capture_is_refused_before_it_is_made() {
    let (double, context, pool) = start();
    let (origin, stream, other) =
        (context.new_stream().unwrap(), context.new_stream().unwrap(), context.new_stream().unwrap());
    // SAFETY: bytes that nobody reads.
    let [mut target, mut source] = [(); 2].map(|()| unsafe { origin.alloc::<u8>(LEN) }.unwrap());
    origin.synchronize().unwrap();
    captured(&origin, || {
        // The events of both stand in the graph from here on.
        origin.memset_zeros(&mut target).unwrap();
        origin.memset_zeros(&mut source).unwrap();
        let notes = double.calls("cuEventRecord");
        let refused = filled(&pool, 1).copy_to(&stream, &mut target).unwrap_err();
        assert!(refused.is_copy() && refused.to_string().contains("capturing"), "{refused}");
        let refused = filled(&pool, 1).copy_from(&other, &source).unwrap_err();
        assert!(refused.is_copy() && refused.to_string().contains("capturing"), "{refused}");
        assert_eq!(double.calls("cuEventRecord"), notes, "nothing was enqueued, so nobody notes it");
        assert_eq!((pool.stats().lost, pool.stats().in_flight, pool.stats().buffers_in_pool), (0, 0, 1));
        assert_eq!(double.calls("cuMemcpyHtoDAsync_v2") + double.calls("cuMemcpyDtoHAsync_v2"), 0);
        // cudarc's own copy is in the graph, and its buffer stays away for ever.
        stream.memcpy_htod(&filled(&pool, 2), &mut target).unwrap();
    });
    pool.poll();
    assert_eq!((pool.stats().lost, pool.stats().in_flight), (1, 0));
    assert_eq!(double.counts().spoiled_captures, 0);
}

#[test]
fn an_event_of_a_capture_is_refused_and_draws_nobody_in() {
    let (double, context, pool) = start();
    let (origin, stream) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let (in_graph, event) = (context.new_event(None).unwrap(), context.new_event(None).unwrap());
    captured(&origin, || {
        in_graph.record(&origin).unwrap();
        let refused = filled(&pool, 1).release_after_event(&in_graph).unwrap_err();
        assert!(refused.is_device() && refused.to_string().contains("CAPTURED_EVENT"), "{refused}");
        // Those who come after are none the worse.
        let gate = double.hold(stream.cu_stream());
        event.record(&stream).unwrap();
        filled(&pool, 1).release_after_event(&event).unwrap();
        pool.poll();
        assert_eq!((pool.stats().lost, pool.stats().in_flight), (1, 1));
        drop(gate);
        stream_is_idle(&pool);
    });
    assert_eq!((pool.stats().lost, double.counts().spoiled_captures), (1, 0));
}

#[test]
fn an_event_that_is_slow_to_come_holds_back_nobody_behind_another() {
    let (double, context, pool) = start();
    let (slow, fast) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let events = [context.new_event(None).unwrap(), context.new_event(None).unwrap()];
    let gates = [double.hold(slow.cu_stream()), double.hold(fast.cu_stream())];
    for (stream, event) in [&slow, &fast].into_iter().zip(&events) {
        event.record(stream).unwrap();
        filled(&pool, 1).release_after_event(event).unwrap();
    }
    assert_eq!(pool.stats().in_flight, 2);
    let [slow_gate, fast_gate] = gates;
    drop(fast_gate);
    while pool.stats().in_flight == 2 {
        pool.poll();
    }
    assert_eq!((pool.stats().in_flight, pool.stats().buffers_in_pool), (1, 1));
    drop(slow_gate);
    stream_is_idle(&pool);
    // What is over needs no stream, and what is not takes those that are there.
    let made = double.calls("cuStreamCreate");
    for _ in 0..20 {
        let gate = double.hold(slow.cu_stream());
        events[0].record(&slow).unwrap();
        filled(&pool, 1).release_after_event(&events[0]).unwrap();
        filled(&pool, 1).release_after_event(&events[1]).unwrap();
        drop(gate);
        stream_is_idle(&pool);
    }
    assert_eq!(double.calls("cuStreamCreate"), made);
}

#[test]
fn copies_of_one_buffer_on_one_stream_are_one_question() {
    let (double, context, pool) = start();
    let streams = [context.new_stream().unwrap(), context.new_stream().unwrap()];
    let mut targets = [memory(&streams[0], 0), memory(&streams[1], 0)];
    let gate = double.hold_all();
    let mut buf = filled(&pool, 9);
    for _ in 0..50 {
        for (stream, target) in streams.iter().zip(&mut targets) {
            buf.copy_range_to(0..LEN, stream, target).unwrap();
        }
    }
    let asked = double.calls("cuEventQuery");
    assert_eq!(asked, 1, "whether the first is over, when the second stream came");
    drop(buf);
    pool.poll();
    assert!(double.calls("cuEventQuery") <= asked + 4, "two for each look at it");
    assert_eq!(pool.stats().in_flight, 1);
    drop(gate);
    stream_is_idle(&pool);
    for (stream, target) in streams.iter().zip(&targets) {
        assert_eq!(first_wrong(&stream.clone_dtoh(target).unwrap(), 9), None);
    }
}

#[test]
fn a_copy_asks_the_driver_for_no_more_than_it_needs() {
    let (double, context, pool) = start();
    let stream = context.new_stream().unwrap();
    // SAFETY: one stream.
    unsafe { context.disable_event_tracking() };
    let mut target = memory(&stream, 0);
    let _gate = double.hold_all();
    // The first makes its event.
    filled(&pool, 1).copy_to(&stream, &mut target).unwrap();
    let names = ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuStreamIsCapturing", "cuStreamGetId", "cuEventRecord"];
    let calls = || names.map(|name| double.calls(name));
    let (bufs, before) = ([filled(&pool, 2), filled(&pool, 3)], calls());
    for buf in bufs {
        buf.copy_to(&stream, &mut target).unwrap();
    }
    let after = calls();
    assert_eq!(std::array::from_fn(|name| after[name] - before[name]), [2, 0, 2, 0, 2], "{names:?}");
    let mut buf = filled(&pool, 4);
    let before = calls();
    buf.copy_range_to(0..LEN, &stream, &mut target).unwrap();
    let after = calls();
    assert_eq!(std::array::from_fn(|name| after[name] - before[name]), [1, 0, 1, 1, 1], "{names:?}");
}

#[test]
fn a_loan_is_asked_once_for_its_record_and_then_only_whether_it_is_over() {
    let (double, context, pool) = start();
    let stream = context.new_stream().unwrap();
    let mut target = memory(&stream, 0);
    let gate = double.hold(stream.cu_stream());
    stream.memcpy_htod(&filled(&pool, 1), &mut target).unwrap();
    let queries = double.calls("cuEventQuery");
    (0..10).for_each(|_| pool.poll());
    assert_eq!((double.calls("cuEventElapsedTime"), double.calls("cuEventElapsedTime_v2")), (1, 0));
    assert_eq!(double.calls("cuEventQuery"), queries + 10);
    drop(gate);
    stream_is_idle(&pool);
    assert_eq!((double.calls("cuEventElapsedTime"), pool.stats().lost), (1, 0));
}

#[test]
fn every_kind_of_pinned_memory_has_an_address_for_kernels() {
    let (_double, context, _) = start();
    for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
        for reserve_bytes in [0, 4 << 20] {
            let pool =
                Pool::builder().without_env().backend(backend.clone()).reserve_bytes(reserve_bytes).build().unwrap();
            for len in [100, LEN, 3 << 20] {
                let buf = pool.get(len).unwrap();
                assert_eq!(buf.device_ptr(&context).unwrap(), buf.as_ptr() as u64, "{backend:?}, {len} B");
            }
        }
    }
}
