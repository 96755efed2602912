//! Invalid handles, buffers and arguments.

use std::ptr;
use std::thread;

use pinpool_c::*;

use crate::fixture::{Address, HEAP, OPTIONS, destroy, get, get_with, last_error, open, outcome, put};

fn assert_refused(status: pp_status, expected: pp_status, words: &str) {
    let (code, text) = last_error();
    assert_eq!((status, code), (expected, expected), "{text}");
    assert!(text.contains(words), "{words} is missing in: {text}");
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
    destroy(pool);
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
