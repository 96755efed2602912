//! Measures how many nanoseconds a request and its return take through the C functions, and through the Rust library:
//! cargo run --release -p pinpool-capi --example cost
#![allow(unsafe_code)] // Calls the C functions.
#![allow(clippy::print_stdout)] // A program prints its results.

use std::ffi::CString;
use std::hint::black_box;
use std::ptr;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use pinpool::{Backend, Pool};
use pinpool_c::{pp_get, pp_pool, pp_pool_close, pp_pool_open, pp_put, pp_status};

const PAIRS: u32 = 2_000_000;
const ROUNDS: usize = 5;
const LEN: usize = 64 << 10;

#[derive(Clone, Copy)]
struct Handle(*mut pp_pool);

// SAFETY: any thread may use a handle.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

fn pair_in_c(Handle(pool): Handle) {
    let mut buf = ptr::null_mut();
    // SAFETY: `buf` is a place for the address.
    let got = unsafe { pp_get(pool, black_box(LEN), &raw mut buf) };
    let put = pp_put(pool, black_box(buf));
    assert!(got == pp_status::PP_OK && put == pp_status::PP_OK);
}

/// Runs `pair` on `threads` threads at once. Returns the nanoseconds for each pair on the slowest thread of the fastest round.
fn measure(threads: usize, pair: impl Fn() + Sync) -> f64 {
    let round = |_| {
        let start = Barrier::new(threads);
        let work = || {
            (0..1000).for_each(|_| pair());
            start.wait();
            let begun = Instant::now();
            (0..PAIRS).for_each(|_| pair());
            begun.elapsed().as_secs_f64() / f64::from(PAIRS) * 1e9
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap_or(f64::NAN)).fold(0.0, f64::max)
        })
    };
    (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min)
}

fn main() {
    let config = CString::new("backend=heap").unwrap_or_default();
    let mut pool = ptr::null_mut();
    // SAFETY: a C string and a place for the handle.
    assert_eq!(unsafe { pp_pool_open(config.as_ptr(), &raw mut pool) }, pp_status::PP_OK);
    let handle = Handle(pool);
    let Ok(rust) = Pool::builder().backend(Backend::Heap).build() else { return };
    for threads in [1, 2, 4] {
        let in_rust = measure(threads, || drop(black_box(rust.get(black_box(LEN)))));
        let in_c = measure(threads, || pair_in_c(handle));
        println!("{threads} threads: {in_rust:.1} ns for get and drop in Rust, {in_c:.1} ns for pp_get and pp_put");
    }
    pp_pool_close(pool);
}
