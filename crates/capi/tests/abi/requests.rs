//! Requests, returns, what a config string sets, and errors.

use std::ffi::CStr;
use std::{ptr, thread};

use pinpool_c::*;

use crate::fixture::{
    Address, HEAP, Handle, OPTIONS, bytes, destroy, get, get_with, is_pinned, last_error, open, outcome, put, skipped,
    stats, try_get, try_open,
};

#[test]
fn a_buffer_reports_whether_it_is_pinned_and_is_reused() {
    let pool = open(HEAP);
    let first = get(pool, 1 << 20).unwrap();
    bytes(first, 1 << 20).fill(7);
    assert_eq!((first.0.addr() % 4096, is_pinned(pool, first)), (0, Ok(0)));
    put(pool, first).unwrap();
    assert_eq!(is_pinned(pool, first).unwrap_err().0, pp_status::PP_UNKNOWN_POINTER);
    let second = get(pool, 1 << 20).unwrap();
    assert_eq!(first, second);
    let found = stats(pool);
    assert_eq!((&found["requests"]["hits"], &found["requests"]["returned"]), (&1.into(), &1.into()), "{found}");
    put(pool, second).unwrap();
    destroy(pool);
}

#[test]
fn try_get_returns_only_idle_buffers() {
    let pool = open(HEAP);
    let text = last_error();
    assert_eq!(try_get(pool, 0), (pp_status::PP_OK, Address(ptr::null_mut())));
    assert_eq!(try_get(pool, 4096), (pp_status::PP_NONE_IDLE, Address(ptr::null_mut())));
    assert_eq!(last_error(), text, "no error");
    let held = get(pool, 4096).unwrap();
    put(pool, held).unwrap();
    assert_eq!(try_get(pool, 4096), (pp_status::PP_OK, held));
    put(pool, held).unwrap();
    destroy(pool);
}

#[test]
fn a_request_at_the_limit_times_out_and_reports_usage() {
    let pool = open("backend=heap; max_bytes=4MiB; on_full=error; wait=1h");
    let held = get(pool, 4 << 20).unwrap();
    let waits = |timeout_ms| get_with(pool, 4 << 20, pp_request_options { timeout_ms, ..OPTIONS });
    for (timeout_ms, status) in [(0, pp_status::PP_OVER_LIMIT), (1, pp_status::PP_TIMED_OUT)] {
        let (code, text) = waits(timeout_ms).unwrap_err();
        assert_eq!(code, status);
        assert!(text.contains("held 4.0MiB") && text.contains("PINPOOL_MAX_BYTES"), "{text}");
    }
    put(pool, held).unwrap();
    // Even the longest possible timeout does not delay a request that can be served.
    put(pool, waits(PP_WAIT_FOREVER).unwrap()).unwrap();
    destroy(pool);
}

#[test]
fn memory_pinned_by_the_kernel_is_not_pinned_by_the_driver() {
    let pool = open("backend=mlock; max_bytes=4MiB");
    if stats(pool)["limits"]["max_bytes"].as_u64() < Some(4 << 20) {
        skipped("this process may not lock 4 MiB");
    } else {
        let held = get(pool, 4096).unwrap();
        assert_eq!(is_pinned(pool, held), Ok(0));
        put(pool, held).unwrap();
    }
    destroy(pool);
}

#[test]
fn a_config_accepts_the_names_of_variables() {
    let pool = open(" PINPOOL_BACKEND=heap ;\n Max_Bytes = 2MiB;wait=0s\nname=loader;; name=loader; on_full=error;");
    let found = stats(pool);
    assert_eq!((&found["limits"]["max_bytes"], &found["name"]), (&(2 << 20).into(), &"loader".into()), "{found}");
    assert_eq!(get(pool, 4 << 20).unwrap_err().0, pp_status::PP_OVER_LIMIT);
    destroy(pool);
}

#[test]
fn an_invalid_config_item_is_named() {
    let (setting, argument) = (pp_status::PP_INVALID_SETTING, pp_status::PP_INVALID_ARGUMENT);
    for (config, status, words) in [
        ("max_byte=1GiB", setting, "unknown setting PINPOOL_MAX_BYTE; did you mean PINPOOL_MAX_BYTES?"),
        ("name=a; NAME = b", setting, "name=b: already set to a; leave one of the two out"),
        ("max_bytes=lots", setting, "PINPOOL_MAX_BYTES=lots"),
        ("backend=heap; reserve=2GiB; max_bytes=1GiB", setting, "PINPOOL_RESERVE"),
        ("backend=cuda; device=99", pp_status::PP_UNAVAILABLE, "cuda"),
        ("A_ ; B_", argument, "two prefixes, `A_` and `B_`"),
        ("hello world", argument, "`hello world` is neither NAME=VALUE nor a variable prefix"),
        ("backend=heap; max_bytes 4GiB", argument, "`max_bytes 4GiB` is neither"),
        ("max_bytes", argument, "ending in `_`"),
    ] {
        let (found, text) = try_open(config).map(destroy).unwrap_err();
        assert_eq!(found, status, "{config}: {text}");
        assert!(text.contains(words), "{config}: {text}");
    }
}

#[test]
fn the_limit_can_change_while_the_pool_is_in_use() {
    let pool = open("backend=heap; max_bytes=4MiB; on_full=error; wait=0s");
    assert_eq!(get(pool, 6 << 20).unwrap_err().0, pp_status::PP_OVER_LIMIT);
    outcome(pp_set_max_bytes(pool.0, 8 << 20), ()).unwrap();
    put(pool, get(pool, 6 << 20).unwrap()).unwrap();
    let error = outcome(pp_set_max_bytes(pool.0, 0), ()).unwrap_err();
    assert!(error.0 == pp_status::PP_INVALID_ARGUMENT && error.1.contains("max_bytes=0"), "{error:?}");
    assert_eq!(stats(pool)["limits"]["max_bytes"], 8 << 20);
    outcome(pp_set_max_bytes(pool.0, PP_NO_LIMIT), ()).unwrap();
    assert!(stats(pool)["limits"]["max_bytes"].is_null());
    destroy(pool);
}

#[test]
fn a_partition_has_its_own_limit_and_keeps_its_pool_alive() {
    let (pool, mut partition) =
        (open("backend=heap; max_bytes=16MiB; on_full=error; wait=0s; name=train"), ptr::null_mut());
    // SAFETY: a C string and a place for the handle, here and below.
    let opened = unsafe { pp_partition_open(pool.0, c"eval".as_ptr(), 4 << 20, &raw mut partition) };
    let partition = outcome(opened, Handle(partition)).unwrap();
    let held = get(partition, 1 << 20).unwrap();
    assert_eq!(get(partition, 6 << 20).unwrap_err().0, pp_status::PP_OVER_LIMIT);
    assert_eq!(stats(partition)["name"], "train/eval");
    let tagged = get_with(partition, 4096, pp_request_options { tag: c"own".as_ptr(), ..OPTIONS }).map(drop);
    for refusal in [tagged, outcome(pp_trim(partition.0, 0), ())] {
        let (status, text) = refusal.unwrap_err();
        assert!(status == pp_status::PP_INVALID_ARGUMENT && text.contains("train/eval"), "{text}");
    }
    destroy(pool);
    bytes(held, 1 << 20).fill(3);
    put(partition, held).unwrap();
    destroy(partition);

    let pool = open("backend=heap; preset=tensorflow");
    let mut partition = ptr::dangling_mut();
    // SAFETY: NULL is refused.
    let refused = unsafe { pp_partition_open(pool.0, ptr::null(), 4 << 20, &raw mut partition) };
    assert_eq!((refused, partition.is_null()), (pp_status::PP_INVALID_ARGUMENT, true));
    // SAFETY: as above.
    assert_eq!(unsafe { pp_partition_open(pool.0, c"none".as_ptr(), 0, &raw mut partition) }, refused);
    // SAFETY: as above.
    assert_eq!(unsafe { pp_partition_open(pool.0, c"eval".as_ptr(), 4 << 20, &raw mut partition) }, pp_status::PP_OK);
    destroy(Handle(partition));
    destroy(pool);
}

#[test]
fn options_set_the_alignment_the_timeout_and_the_tag() {
    let pool = open("backend=heap; max_bytes=4MiB; on_full=error; wait=1h");
    for alignment in [1, 4096, 1 << 16, 1 << 21] {
        let found = get_with(pool, 5000, pp_request_options { alignment, ..OPTIONS }).unwrap();
        assert_eq!(found.0.addr() % alignment, 0);
        put(pool, found).unwrap();
    }
    let options = pp_request_options { alignment: 1 << 16, timeout_ms: 0, tag: c"decode".as_ptr(), ..OPTIONS };
    let held = get_with(pool, 3 << 20, options).unwrap();
    assert_eq!(held.0.addr() % (1 << 16), 0);
    let (status, text) = get_with(pool, 3 << 20, options).unwrap_err();
    assert!(status == pp_status::PP_OVER_LIMIT && text.contains("decode"), "{text}");
    put(pool, held).unwrap();
    for (options, words) in [
        (pp_request_options { alignment: 0, ..OPTIONS }, "aligned to 0"),
        (pp_request_options { alignment: 3, ..OPTIONS }, "aligned to 3"),
        (pp_request_options { alignment: 1 << 31, ..OPTIONS }, "aligned to 2147483648"),
        (pp_request_options { tag: c"\xff".as_ptr(), ..OPTIONS }, "`tag` is not UTF-8"),
        (pp_request_options { struct_size: 24, ..OPTIONS }, "struct_size=24, not one of [32]: "),
    ] {
        let (status, text) = get_with(pool, 4096, options).unwrap_err();
        assert!(status == pp_status::PP_INVALID_ARGUMENT && text.contains(words), "{text}");
    }
    destroy(pool);
}

#[test]
fn each_thread_has_its_own_last_error() {
    let first = outcome(pp_maintain(ptr::null_mut()), ()).unwrap_err();
    let (fresh, other) = thread::spawn(|| (last_error(), get(open(HEAP), usize::MAX).unwrap_err())).join().unwrap();
    assert_eq!(fresh, (pp_status::PP_OK, String::new()));
    assert_eq!(other.0, pp_status::PP_INVALID_ARGUMENT);
    assert!(other.1.contains("cannot allocate 16777216.0TiB") && other.1 != first.1, "{}", other.1);
    assert_eq!(last_error(), first, "a success or another thread does not change it");
    put(open(HEAP), Address(ptr::null_mut())).unwrap();
    assert_eq!(last_error(), first);
}

#[test]
fn every_status_has_its_name() {
    // SAFETY: static texts.
    let name = |status| unsafe { CStr::from_ptr(pp_status_name(status)) }.to_str().unwrap();
    macro_rules! all {
        ($($name:ident)+) => { [$((pp_status::$name, stringify!($name))),+] };
    }
    let all = all! {
        PP_OK PP_INVALID_ARGUMENT PP_INVALID_SETTING PP_UNKNOWN_POINTER PP_UNKNOWN_POOL PP_OVER_LIMIT PP_NONE_IDLE
        PP_MEMORY_REFUSED PP_DEVICE_FAILED PP_FORKED PP_INTERNAL PP_UNAVAILABLE PP_STREAM_CAPTURING PP_INVALID_HANDLE
        PP_TOO_MANY_POOLS PP_LOGGER_SET PP_CLOSED PP_BUFFER_LOST PP_DEVICE_RESET PP_TIMED_OUT PP_REFUSED_BY_CAPTURE
    };
    for (number, (status, text)) in (0..).zip(all) {
        assert_eq!((status as i32, format!("{status:?}").as_str(), name(number)), (number, text, text));
    }
    assert_eq!((name(21), name(-1)), ("unknown", "unknown"));
    // SAFETY: a static text.
    assert_eq!(unsafe { CStr::from_ptr(pp_version()) }.to_str(), Ok(env!("CARGO_PKG_VERSION")));
}
