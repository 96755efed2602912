//! Invalid handles, buffers and arguments.

use std::ptr;
use std::thread;

use pinpool_c::*;

use crate::fixture::{Address, HEAP, Handle, OPTIONS, close, get, get_with, last_error, open, outcome, put, stats};

fn assert_refused(status: pp_status, expected: pp_status, words: &str) {
    let (code, text) = last_error();
    assert_eq!((status, code), (expected, expected), "{text}");
    assert!(text.contains(words), "{words} is missing in: {text}");
}

#[test]
fn foreign_addresses_are_refused_with_the_reason() {
    let (pool, other) = (open(HEAP), open(HEAP));
    let mut local = 0_u8;
    let unknown = pp_status::PP_UNKNOWN_POINTER;
    assert_refused(pp_put(pool.0, (&raw mut local).cast()), unknown, "not from this pool, or already returned");
    let held = get(pool, 5000).unwrap();
    let inside = held.0.wrapping_byte_add(64);
    let name = format!("{:#x}: inside the buffer at {:#x} of 5000B", inside.addr(), held.0.addr());
    assert_refused(pp_put(pool.0, inside), unknown, &name);
    assert_refused(pp_put(other.0, held.0), unknown, "another pool's buffer");
    // SAFETY: no stream is checked before the buffer is.
    assert_refused(unsafe { pp_put_after_stream(pool.0, inside, ptr::null_mut()) }, unknown, &name);
    // SAFETY: as above.
    assert_refused(unsafe { pp_record_stream(pool.0, inside, ptr::null_mut()) }, unknown, &name);
    // SAFETY: as above.
    assert_refused(unsafe { pp_put_after_event(other.0, held.0, ptr::null_mut()) }, unknown, "another pool's buffer");
    put(pool, held).unwrap();
    close(pool);
    close(other);
}

#[test]
fn a_null_argument_is_named() {
    let pool = open(HEAP);
    let mut ptr = ptr::null_mut();
    let mut flag = 0;
    let (no_pool, no_ptr) = (ptr::null_mut(), ptr::null_mut());
    let mut calls = Vec::new();
    let mut note = |name: &str, status| calls.push((name.to_owned(), status, last_error().1));
    macro_rules! unsafely {
        ($($name:literal: $call:expr;)+) => {
            $(
                // SAFETY: NULL is allowed to be passed, and is what this is about.
                note($name, unsafe { $call });
            )+
        };
    }
    unsafely! {
        "pool": pp_pool_open(ptr::null(), ptr::null_mut());
        "pool": pp_get(no_pool, 1, &raw mut ptr);
        "ptr": pp_get(pool.0, 1, ptr::null_mut());
        "ptr": pp_get_with(pool.0, 1, &OPTIONS, ptr::null_mut());
        "options": pp_get_with(pool.0, 1, ptr::null(), &raw mut ptr);
        "ptr": pp_try_get(pool.0, 1, ptr::null_mut());
        "pool": pp_put_after_stream(no_pool, no_ptr, ptr::null_mut());
        "pool": pp_put_after_event(no_pool, no_ptr, ptr::null_mut());
        "pool": pp_record_stream(no_pool, no_ptr, ptr::null_mut());
        "json": pp_stats_json(pool.0, ptr::null_mut());
        "is_pinned": pp_is_pinned(pool.0, ptr, ptr::null_mut());
        "pool": pp_is_pinned(no_pool, ptr, &raw mut flag);
        "ptr": pp_is_pinned(pool.0, ptr::null(), &raw mut flag);
    }
    note("pool", pp_pool_close(no_pool));
    note("pool", pp_put(no_pool, no_ptr));
    note("pool", pp_reserve(no_pool, 1));
    note("pool", pp_trim(no_pool, 1));
    note("pool", pp_clear(no_pool));
    note("pool", pp_maintain(no_pool));
    // SAFETY: allowed.
    unsafe { pp_string_free(ptr::null_mut()) };
    for (name, status, text) in calls {
        assert_eq!((status, text), (pp_status::PP_INVALID_ARGUMENT, format!("the argument `{name}` is NULL")));
    }
    assert_eq!(stats(pool)["memory"]["in_use"], 0);
    close(pool);
}

#[test]
fn lengths_and_alignments_out_of_range_are_named() {
    let pool = open(HEAP);
    let (status, _) = get(pool, usize::MAX).unwrap_err();
    assert_refused(status, pp_status::PP_INVALID_ARGUMENT, "cannot allocate 16777216.0TiB");
    for alignment in [0, 3, 1 << 31] {
        let (status, _) = get_with(pool, 1, pp_get_options { alignment, ..OPTIONS }).unwrap_err();
        assert_refused(status, pp_status::PP_INVALID_ARGUMENT, &format!("aligned to {alignment}"));
    }
    close(pool);
}

#[test]
fn an_invalid_handle_is_never_dereferenced() {
    let mut ptr = ptr::null_mut();
    let local = 0_u64;
    for no_pool in [1_usize, 4096, 0xdead_beef, usize::MAX, (&raw const local).addr()] {
        let no_pool = Handle(ptr::without_provenance_mut(no_pool));
        // SAFETY: a place for the address.
        assert_refused(unsafe { pp_get(no_pool.0, 1, &raw mut ptr) }, pp_status::PP_UNKNOWN_POOL, "not a handle");
        assert_refused(pp_put(no_pool.0, ptr), pp_status::PP_UNKNOWN_POOL, "not a handle");
        assert_refused(pp_pool_close(no_pool.0), pp_status::PP_UNKNOWN_POOL, "not a handle");
    }
}

#[test]
fn without_a_driver_put_after_stream_leaves_the_buffer_in_use() {
    let pool = open(HEAP);
    let held = get(pool, 4096).unwrap();
    // SAFETY: the default stream, which needs no object.
    let on_stream = unsafe { pp_put_after_stream(pool.0, held.0, ptr::null_mut()) };
    if on_stream == pp_status::PP_UNAVAILABLE {
        assert_refused(on_stream, pp_status::PP_UNAVAILABLE, "the CUDA driver is unavailable: no libcuda.so.1");
    } else {
        // The machine has a driver, but this thread has no context.
        assert_eq!(on_stream, pp_status::PP_INVALID_HANDLE, "{:?}", last_error());
    }
    // SAFETY: a NULL event is refused, too.
    assert_eq!(unsafe { pp_put_after_event(pool.0, held.0, ptr::null_mut()) }, on_stream);
    put(pool, held).unwrap();
    close(pool);
}

#[test]
fn each_thread_has_its_own_last_error() {
    let first = outcome(pp_maintain(ptr::null_mut()), ()).unwrap_err();
    let (fresh, other) =
        thread::spawn(|| (last_error(), get(open(HEAP), usize::MAX).map(|held| held.0.addr()))).join().unwrap();
    assert_eq!(fresh, (pp_status::PP_OK, String::new()));
    assert_ne!(first.1, other.unwrap_err().1);
    assert_eq!(last_error(), first, "a success or another thread does not change it");
    put(open(HEAP), Address(ptr::null_mut())).unwrap();
    assert_eq!(last_error(), first);
}
