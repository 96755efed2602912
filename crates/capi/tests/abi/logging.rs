//! The log callback. One process has one, so these tests take turns.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use pinpool_c::*;

use crate::fixture::{HEAP, destroy, get, last_error, open, put};

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> impl Drop {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Lines of pools with this name, and an action for each line.
struct Listener {
    name: &'static str,
    lines: Mutex<Vec<(c_int, String)>>,
    at_each: fn(),
    is_gone: AtomicBool,
}

impl Listener {
    fn new(name: &'static str, at_each: fn()) -> Self {
        Self { name, lines: Mutex::default(), at_each, is_gone: AtomicBool::new(false) }
    }

    fn set(&self, level: c_int) {
        // SAFETY: every test unsets it before the listener ends.
        let status = unsafe { pp_set_log(Some(listen), ptr::from_ref(self).cast_mut().cast(), level) };
        assert_eq!(status, pp_status::PP_OK, "{:?}", last_error());
    }

    fn lines(&self) -> Vec<(c_int, String)> {
        self.lines.lock().unwrap().clone()
    }
}

impl Drop for Listener {
    /// A failing test unsets its callback, because later tests would otherwise call it with freed data.
    fn drop(&mut self) {
        if thread::panicking() {
            unset();
        }
    }
}

unsafe extern "C" fn listen(level: c_int, text: *const c_char, user_data: *mut c_void) {
    // SAFETY: a C string.
    let text = unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("no UTF-8").to_owned();
    // SAFETY: the listener, which lives until it is unset.
    let listener = unsafe { &*user_data.cast::<Listener>() };
    if text.contains(listener.name) {
        listener.lines.lock().unwrap().push((level, text));
        (listener.at_each)();
    }
    // Also checked at the end: the thread that unsets the callback must wait until it has returned.
    (0..10).for_each(|_| thread::yield_now());
    if listener.is_gone.load(Ordering::SeqCst) {
        // A panic could not leave this function.
        std::process::abort();
    }
}

fn unset() {
    // SAFETY: NULL.
    assert_eq!(unsafe { pp_set_log(None, ptr::null_mut(), 0) }, pp_status::PP_OK);
}

#[test]
fn lines_arrive_with_their_level_up_to_the_set_level() {
    let _turn = turn();
    let listener = Listener::new("[levels]", || {});
    listener.set(3);
    destroy(open("backend=heap; name=levels"));
    let lines = listener.lines();
    assert!(lines.iter().any(|(level, text)| *level == 3 && text.contains("preset=adaptive")), "{lines:?}");
    listener.set(2);
    destroy(open("backend=heap; name=levels"));
    assert_eq!(listener.lines(), lines, "no warning");
    unset();
    destroy(open("backend=heap; name=levels"));
    assert_eq!(listener.lines(), lines);
    for level in [-1, 6] {
        // SAFETY: refused.
        let status = unsafe { pp_set_log(Some(listen), ptr::null_mut(), level) };
        assert_eq!(status, pp_status::PP_INVALID_ARGUMENT);
        assert!(last_error().1.contains(&format!("`level` is {level}")), "{:?}", last_error());
    }
}

#[test]
fn a_callback_may_use_pools_and_set_the_callback() {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let _turn = turn();
    let listener = Listener::new("[outer]", || {
        let pool = open(HEAP);
        put(pool, get(pool, 4096).unwrap()).unwrap();
        destroy(pool);
        if MADE.fetch_add(1, Ordering::SeqCst) == 2 {
            unset();
        }
    });
    listener.set(5);
    for _ in 0..3 {
        let pool = open("backend=heap; name=outer");
        put(pool, get(pool, 1 << 20).unwrap()).unwrap();
        destroy(pool);
    }
    unset();
    assert_eq!(MADE.load(Ordering::SeqCst), 3, "{:?}", listener.lines());
}

#[test]
fn a_removed_callback_has_returned_and_is_not_called_again() {
    let _turn = turn();
    let is_over = AtomicBool::new(false);
    let seen: usize = thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !is_over.load(Ordering::SeqCst) {
                    destroy(open("backend=heap; maintenance_thread=0; name=unset"));
                }
            });
        }
        let (mut seen, quiet) = (0, Listener::new("[unset]", || {}));
        // They stay alive, so that a late callback is detected and does no harm.
        let listeners: Vec<_> = (0..100).map(|_| Listener::new("[unset]", || {})).collect();
        for (round, listener) in listeners.iter().enumerate() {
            listener.set(3);
            while round == 0 && listener.lines().is_empty() {
                thread::yield_now();
            }
            thread::yield_now();
            if round % 2 == 0 {
                unset()
            } else {
                quiet.set(2)
            }
            listener.is_gone.store(true, Ordering::SeqCst);
            seen += listener.lines().len();
        }
        unset();
        is_over.store(true, Ordering::SeqCst);
        assert_eq!(quiet.lines(), [], "above its level");
        seen
    });
    assert!(seen > 0);
}
