//! A request that finds no idle buffer, and the end of that buffer, for each available backend. The pool keeps nothing (a limit
//! of 0), so every request is a miss.
//!
//! ```text
//!   BACKEND/carved       adaptive: carved from pinned memory, and returned to it
//!   BACKEND/pinned       tensorflow: one pin call and one release each time
//!   plain/malloc         allocate and free
//!   plain/calloc         the same, cleared
//!   plain/pin_per_use    map, lock, write to and unmap memory
//! ```
//!
//! `cargo bench --bench miss`
#![allow(clippy::print_stdout, clippy::print_stderr)]
#![allow(unsafe_code)] // `pin_per_use` calls `mmap`, `mlock` and `munmap`.

use std::hint::black_box;
use std::io;
use std::ptr;
use std::time::{Duration, Instant};

use pinpool::{Backend, Error, Limit, Pool, Preset};

const SIZE: usize = 64 << 10;
const SAMPLE: Duration = Duration::from_millis(100);
/// Requests between two readings of the clock.
const BATCH: u32 = 64;

/// Prints the median time of a request in eleven samples; the first also warms up.
fn measure<T>(group: &str, name: &str, mut get: impl FnMut() -> T) {
    let mut sample = || {
        let (start, mut requests) = (Instant::now(), 0);
        while start.elapsed() < SAMPLE {
            (0..BATCH).for_each(|_| drop(black_box(get())));
            requests += BATCH;
        }
        start.elapsed().as_secs_f64() * 1e9 / f64::from(requests)
    };
    let mut samples: [f64; 11] = std::array::from_fn(|_| sample());
    samples.sort_by(f64::total_cmp);
    println!("{group}/{name}: {:.1} ns", samples[5]);
}

fn without_idle_buffers(backend: &Backend, preset: Preset) -> Result<Pool, Error> {
    let builder = Pool::builder().without_env().backend(backend.clone()).max_bytes(Limit::Unlimited);
    builder.preset(preset).pool_size_limit(0).auto_resize(false).build()
}

/// A pool buffer, with one byte written to it.
fn get(pool: &Pool) -> impl FnMut() -> pinpool::PinnedBuf {
    move || {
        let mut buffer = pool.get(SIZE).expect("the backend served a request of this size before");
        buffer.wait_slice_mut().unwrap()[0] = 1;
        buffer
    }
}

fn measure_backend(backend: &Backend) -> Result<(), Error> {
    let carved = without_idle_buffers(backend, Preset::Adaptive)?;
    // Held throughout, so that the granule of all other buffers stays pinned.
    let anchor = carved.get(4096)?;
    carved.get(SIZE)?;
    measure(backend.name(), "carved", get(&carved));
    drop(anchor);
    let stats = carved.stats();
    assert_eq!((stats.requests.hits, stats.requests.failed, stats.memory.pin.count), (0, 0, 1), "{backend:?}");

    let pinned = without_idle_buffers(backend, Preset::TensorFlow)?;
    measure(backend.name(), "pinned", get(&pinned));
    let stats = pinned.stats();
    assert_eq!((stats.requests.hits, stats.requests.failed), (0, 0), "{backend:?}");
    assert_eq!(stats.memory.pin.count, stats.requests.served, "{backend:?}: a request pinned nothing");
    Ok(())
}

/// Maps, locks, writes to and unmaps memory.
fn pin_per_use() -> io::Result<()> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new anonymous mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(ptr::null_mut(), SIZE, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the range was mapped above.
    let result = match unsafe { libc::mlock(start, SIZE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: the mapping is writable, and no other code uses it.
    unsafe { start.cast::<u8>().write_volatile(1) };
    // SAFETY: mapped above with this length; unmapping unlocks.
    let unmapped = unsafe { libc::munmap(start, SIZE) };
    assert_eq!(unmapped, 0, "{}", io::Error::last_os_error());
    result
}

fn main() {
    for backend in ["heap", "mlock", "cuda"].into_iter().filter_map(|name| name.parse().ok()) {
        let measured = measure_backend(&backend);
        let _ = measured.inspect_err(|error| eprintln!("left out: {}: {error}", backend.name()));
    }
    measure("plain", "malloc", || {
        let mut buffer = Vec::with_capacity(SIZE);
        buffer.push(1_u8);
        buffer
    });
    measure("plain", "calloc", || {
        let mut buffer = vec![0_u8; SIZE];
        buffer[0] = 1;
        buffer
    });
    match pin_per_use() {
        Ok(()) => measure("plain", "pin_per_use", || pin_per_use().expect("raise the limit (ulimit -l)")),
        Err(error) => eprintln!("left out: pin_per_use: {error}"),
    }
}
