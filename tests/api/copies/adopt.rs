//! Adopted user memory is returned once, after its last copy, and is counted separately.
#![allow(unsafe_code)] // Adopts memory.

use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Waker};
use std::thread;
use std::time::Duration;

use crate::fixture::{LONG, heap, held_sink, until_waits};
#[cfg(feature = "observe")]
use crate::recordings::read_recording;
use crate::scratch::scratch;
use crate::until::until;
use crate::valid_stats::valid_stats;
use pinpool::{Backend, PinnedBuf, PinnedBy, Pool, Preset, Request, Stats};
use pinpool_testing::{SinkMemory, SinkStream};

const BYTES: usize = 10_000;

/// User memory, and how often it was released.
#[derive(Default)]
struct Frames {
    returned: Arc<AtomicU32>,
}

impl Frames {
    /// A new frame filled with `byte` and adopted by `pool`.
    fn adopted(&self, pool: &Pool, byte: u8, is_pinned: bool) -> PinnedBuf {
        let mut frame = vec![byte; BYTES];
        let (memory, returned) = (NonNull::from(frame.as_mut_slice()), self.returned.clone());
        let on_release = move || {
            drop(frame);
            returned.fetch_add(1, Ordering::SeqCst);
        };
        // SAFETY: the call owns the frame, and nothing else uses its bytes.
        unsafe { pool.adopt(memory, is_pinned.then_some(PinnedBy::Driver), on_release) }.unwrap()
    }

    fn returned(&self) -> u32 {
        self.returned.load(Ordering::SeqCst)
    }
}

fn pools() -> [Pool; 3] {
    let heap = || heap().maintenance_thread(false);
    [heap().build(), heap().preset(Preset::TensorFlow).build(), heap().zero(true).build()].map(Result::unwrap)
}

#[test]
fn memory_of_a_user_is_a_buffer_until_it_is_dropped() {
    for pool in pools() {
        let frames = Frames::default();
        let mut buf = frames.adopted(&pool, 7, true);
        assert_eq!(*buf.wait_slice().unwrap(), [7; BYTES]);
        buf.wait_slice_mut().unwrap().fill(8);
        assert_eq!((buf.len(), buf.capacity(), buf.unstable_id()), (BYTES, BYTES, None));
        assert!(buf.pinned_by().is_some());
        let Stats { requests, memory, .. } = valid_stats(&pool);
        assert_eq!((requests.adopted, memory.in_use, requests.served, memory.held_bytes), (1, 1, 0, 0));
        assert!(frames.adopted(&pool, 1, false).pinned_by().is_none());
        assert_eq!(frames.returned(), 1);
        drop(buf);
        let stats = valid_stats(&pool);
        assert_eq!((frames.returned(), stats.requests.adopted, stats.memory.in_use, stats.memory.idle), (2, 0, 0, 0));
        assert!(pool.try_get(BYTES).unwrap().is_none(), "it is never kept");
    }
}

#[test]
fn user_memory_is_returned_only_after_its_last_copy() {
    for pool in pools() {
        let frames = Frames::default();
        let (stream, mut device, held) = held_sink(BYTES);
        let copy = frames.adopted(&pool, 5, true).copy_to(&stream, &mut device).unwrap();
        pool.maintain();
        let Stats { requests, copies, .. } = valid_stats(&pool);
        assert_eq!((frames.returned(), requests.adopted, copies.in_flight, copies.in_flight_bytes), (0, 1, 1, 0));
        drop(held);
        copy.wait().unwrap();
        pool.maintain();
        assert_eq!((frames.returned(), pool.stats().requests.adopted), (1, 0));
        assert_eq!(device.read(), [5; BYTES]);
    }
}

#[test]
fn a_pool_that_ends_returns_user_memory_after_its_copies() {
    let [pool, ..] = pools();
    let frames = Frames::default();
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(BYTES));
    let outlives = frames.adopted(&pool, 1, true);
    frames.adopted(&pool, 2, true).copy_to(&stream, &mut device).unwrap();
    drop(pool);
    assert_eq!(*outlives.wait_slice().unwrap(), [1; BYTES]);
    drop(outlives);
    assert_eq!(frames.returned(), 2);
    assert_eq!(device.read(), [2; BYTES]);
}

#[test]
fn a_return_callback_may_panic_or_use_the_pool() {
    let [pool, ..] = pools();
    let mut frame = vec![0; BYTES];
    let memory = NonNull::from(frame.as_mut_slice());
    // SAFETY: `frame` outlives the buffer and is not used meanwhile.
    drop(unsafe { pool.adopt(memory, None, || panic!("of a user")) }.unwrap());
    let other = pool.clone();
    // SAFETY: as above.
    drop(unsafe { pool.adopt(memory, None, move || drop(other.get(BYTES).unwrap())) }.unwrap());
    let stats = valid_stats(&pool);
    assert_eq!((stats.requests.adopted, stats.requests.served, stats.requests.returned), (0, 1, 1));
}

#[test]
fn no_bytes_are_a_buffer_and_too_many_are_an_error() {
    let [pool, ..] = pools();
    let frames = Frames::default();
    let returned = frames.returned.clone();
    let none = NonNull::slice_from_raw_parts(NonNull::dangling(), 0);
    // SAFETY: the slice is empty.
    let buf = unsafe { pool.adopt(none, None, move || _ = returned.fetch_add(1, Ordering::SeqCst)) }.unwrap();
    assert!(buf.is_empty() && frames.returned() == 0);
    drop(buf);
    assert_eq!(frames.returned(), 1);
    let all = NonNull::slice_from_raw_parts(NonNull::dangling(), usize::MAX);
    // SAFETY: the call is refused, so the memory is never used.
    assert!(unsafe { pool.adopt(all, None, || ()) }.unwrap_err().is_invalid_request());
}

#[cfg(feature = "observe")]
#[test]
fn a_recording_omits_user_memory() {
    let (_dir, path) = scratch("t.trace");
    let pool = heap().maintenance_thread(false).trace(path.clone()).build().unwrap();
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(BYTES));
    let frames = Frames::default();
    drop(frames.adopted(&pool, 1, true));
    frames.adopted(&pool, 1, true).copy_to(&stream, &mut device).unwrap().wait().unwrap();
    pool.maintain();
    drop(pool.get(BYTES).unwrap());
    drop(pool);
    let recording = read_recording(&path).unwrap();
    let events: Vec<_> = recording.records.iter().map(|record| format!("{:?}", record.event)).collect();
    let of = |kind: &str| events.iter().filter(|event| event.contains(kind)).count();
    assert_eq!((of("New {"), of("Get {"), of("Put {"), of("Completed {")), (1, 1, 1, 0), "{events:#?}");
}

/// Whole pages.
#[repr(align(4096))]
struct Pages([u8; 8192]);

#[test]
fn pinned_memory_is_under_the_limit_until_its_owner_is_gone() {
    let builder = || heap().max_bytes(16_384_u64).maintenance_thread(false);
    for pool in [builder().build().unwrap(), builder().preset(Preset::TensorFlow).build().unwrap()] {
        drop(pool.get(12_000).unwrap());
        let locked = lock(&pool, 0).expect("idle memory makes room");
        assert_eq!((locked.pinned_by(), locked.memory().len()), (None, 8192));
        assert_eq!(locked.owner().0[0], 3);
        assert!(pool.get_with(Request::new(12_000).timeout(Duration::ZERO)).unwrap_err().is_limit());
        let other = lock(&pool, 0).unwrap();
        let error = lock(&pool, 0).unwrap_err();
        assert!(error.is_limit() && error.to_string().contains("user memory 16.0KiB"), "{error}");
        let stats = valid_stats(&pool);
        assert_eq!((stats.memory.user_memory_bytes, stats.memory.held_bytes), (16_384, 0));
        for from in [1, 8192] {
            let error = lock(&pool, from).unwrap_err();
            assert!(error.is_invalid_request() && error.to_string().contains("4096"), "{error}");
        }
        drop((locked, other));
        pool.get(12_000).unwrap();
    }
}

/// Pins two pages as memory of `pool`, without their first `from` bytes.
fn lock(pool: &Pool, from: usize) -> Result<pinpool::UserMemory<Box<Pages>>, pinpool::Error> {
    let mut pages = Box::new(Pages([3; 8192]));
    // SAFETY: mapped as long as `pages`, which nothing else uses.
    unsafe { pool.pin(NonNull::from(&mut pages.0[from..]), pages) }
}

#[test]
fn idle_memory_makes_room_whichever_pool_keeps_it() {
    let direct = heap().max_bytes(32_768_u64).maintenance_thread(false).preset(Preset::TensorFlow).build().unwrap();
    let first = lock(&direct, 0).unwrap();
    drop(direct.get(12_000).unwrap());
    assert_eq!(direct.stats().memory.idle_bytes, 16_384);
    let rest = [(); 2].map(|()| lock(&direct, 0).expect("idle memory next to an earlier pin makes room"));
    drop((first, rest));
}

#[test]
fn user_memory_leaves_less_for_requests_that_pass_the_head() {
    let builder = heap().max_bytes(65_536_u64).preset(Preset::TensorFlow).setting("rounding", "exact");
    let pool = builder.wait(LONG).build().unwrap();
    let _pinned = [(); 2].map(|()| lock(&pool, 0).unwrap());
    let held = pool.get(12_000).unwrap();
    thread::scope(|scope| {
        let head = scope.spawn(|| pool.get(40_000).map(drop));
        until_waits(&pool, 1);
        let next = pool.get_with(Request::new(20_000).timeout(Duration::ZERO));
        assert!(next.unwrap_err().is_limit(), "both do not fit next to the user memory");
        drop(held);
        head.join().unwrap().unwrap();
    });
}

#[test]
fn idle_memory_makes_room_for_a_reserve_next_to_an_earlier_pin() {
    let pool = heap().max_bytes(64_u64 << 20).maintenance_thread(false).build().unwrap();
    let pinned = lock(&pool, 0).unwrap();
    drop(pool.get(56 << 20).unwrap());
    pool.reserve(16 << 20).unwrap();
    let stats = valid_stats(&pool);
    assert_eq!((stats.memory.user_memory_bytes, stats.memory.reserve_bytes), (8192, 16 << 20));
    drop(pinned);
}

/// Two pages that stay mapped until this process ends.
#[cfg(all(target_os = "linux", not(miri)))]
fn mapped(protection: libc::c_int) -> NonNull<[u8]> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: anonymous pages at an address of the kernel's choice.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), 8192, protection, flags, -1, 0) };
    NonNull::slice_from_raw_parts(NonNull::new(start.cast::<u8>()).unwrap(), 8192)
}

#[cfg(all(target_os = "linux", not(miri)))]
#[test]
fn memory_with_content_keeps_it_and_may_be_read_only() {
    for backend in [Backend::Heap, Backend::Mlock] {
        let pool = Pool::builder().without_env().backend(backend).max_bytes(1_u64 << 20).build().unwrap();
        let memory = mapped(libc::PROT_READ | libc::PROT_WRITE);
        let start = memory.cast::<u8>().as_ptr();
        // SAFETY: two pages, mapped above.
        unsafe { start.write_bytes(7, 8192) };
        // SAFETY: this is the second of the two pages.
        assert_eq!(unsafe { libc::mprotect(start.wrapping_byte_add(4096).cast(), 4096, libc::PROT_READ) }, 0);
        // SAFETY: mapped until the end of this process.
        let locked = unsafe { pool.pin(memory, ()) };
        // SAFETY: mapped above.
        assert!(unsafe { memory.as_ref() }.iter().all(|&byte| byte == 7));
        drop(locked.unwrap());
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
#[test]
fn a_refused_pin_has_no_advice_on_the_reserve() {
    let pool = Pool::builder().without_env().backend(Backend::Mlock).max_bytes(1_u64 << 20).build().unwrap();
    let memory = mapped(libc::PROT_NONE);
    // SAFETY: mapped until the end of this process; the kernel refuses to lock unreadable pages.
    let error = unsafe { pool.pin(memory, ()) }.unwrap_err();
    let report = error.report();
    assert!(error.is_backend() && report.contains("request a smaller buffer"), "{error}: {report}");
    assert!(!report.contains("PINPOOL_RESERVE"), "{report}");
}

#[cfg(all(target_os = "linux", not(miri)))]
#[test]
fn a_forked_child_can_neither_adopt_nor_return_user_memory() {
    crate::child::alone(|| {
        let [pool, ..] = pools();
        let frames = Frames::default();
        let (pinned, plain) = (frames.adopted(&pool, 1, true), frames.adopted(&pool, 2, false));
        crate::child::in_a_child(|| {
            let none = NonNull::slice_from_raw_parts(NonNull::dangling(), 0);
            // SAFETY: the slice is empty.
            let refused = unsafe { pool.adopt(none, None, || ()) };
            let held = [
                ("adopting is refused", refused.is_err_and(|error| error.is_forked())),
                ("pinned memory cannot be read", pinned.wait_slice().is_err()),
                ("other memory can", plain.wait_slice().is_ok_and(|bytes| bytes[0] == 2)),
            ];
            drop((pinned, plain));
            held.into_iter().chain([("nothing comes back", frames.returned() == 0)]).collect()
        });
    });
}

/// Pages with an owner that panics when it is dropped.
struct Panicking(#[allow(dead_code)] Box<Pages>); // Never read: it keeps the pages mapped.

impl Drop for Panicking {
    fn drop(&mut self) {
        // Panics without a message, because the waiting request could check again while the message is printed.
        resume_unwind(Box::new("the owner panics"));
    }
}

#[test]
fn a_waiting_request_gets_the_memory_of_an_owner_that_panics_in_its_drop() {
    let pool = heap().max_bytes(8192_u64).maintenance_thread(false).build().unwrap();
    let mut pages = Box::new(Pages([3; 8192]));
    // SAFETY: mapped as long as `pages`, which nothing else uses.
    let locked = unsafe { pool.pin(NonNull::from(pages.0.as_mut_slice()), Panicking(pages)) }.unwrap();
    let mut get = pin!(pool.get_async(8192));
    assert!(get.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert!(catch_unwind(AssertUnwindSafe(|| drop(locked))).is_err());
    until("it is served", || get.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
}
