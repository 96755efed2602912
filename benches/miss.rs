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
#![allow(missing_docs)] // Criterion defines the entry point.
#![allow(clippy::print_stderr)] // Names the backends that are left out.
#![allow(unsafe_code)] // `pin_per_use` calls `mmap`, `mlock` and `munmap`.

use std::hint::black_box;
use std::io;
use std::ptr;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use pinpool::{Backend, Error, Pool, Preset};

const SIZE: usize = 64 << 10;

fn each_time<T>(criterion: &mut Criterion, group: &str, name: &str, mut get: impl FnMut() -> T) {
    criterion.benchmark_group(group).bench_function(name, |bencher| bencher.iter(|| drop(black_box(get()))));
}

fn without_idle_buffers(backend: &Backend, preset: Preset) -> Result<Pool, Error> {
    let builder = Pool::builder().without_env().backend(backend.clone()).max_bytes(None);
    builder.preset(preset).setting("pool_size_limit", 0).setting("auto_resize", false).build()
}

/// A pool buffer, with one byte written to it.
fn get(pool: &Pool) -> impl FnMut() -> pinpool::PinnedBuf {
    move || {
        let mut buffer = pool.get(SIZE).expect("the backend served a request of this size before");
        buffer.wait_slice_mut().unwrap()[0] = 1;
        buffer
    }
}

fn of_backend(criterion: &mut Criterion, backend: &Backend) -> Result<(), Error> {
    let cut = without_idle_buffers(backend, Preset::Adaptive)?;
    // Held throughout, so that the granule of all other buffers stays pinned.
    let anchor = cut.get(4096)?;
    cut.get(SIZE)?;
    each_time(criterion, backend.name(), "cut", get(&cut));
    drop(anchor);
    let stats = cut.stats();
    assert_eq!(
        (stats.requests.hits, stats.requests.failed, stats.memory.pin.count),
        (0, 0, 1),
        "{backend:?}: not only misses"
    );

    let locked = without_idle_buffers(backend, Preset::TensorFlow)?;
    each_time(criterion, backend.name(), "locked", get(&locked));
    let stats = locked.stats();
    assert_eq!((stats.requests.hits, stats.requests.failed), (0, 0), "{backend:?}: not only misses");
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

fn miss(criterion: &mut Criterion) {
    for backend in ["heap", "mlock", "cuda"].into_iter().filter_map(|name| name.parse().ok()) {
        let measured = of_backend(criterion, &backend);
        let _ = measured.inspect_err(|error| eprintln!("left out: {}: {error}", backend.name()));
    }
    each_time(criterion, "plain", "malloc", || {
        let mut buffer = Vec::with_capacity(SIZE);
        buffer.push(1_u8);
        buffer
    });
    each_time(criterion, "plain", "calloc", || {
        let mut buffer = vec![0_u8; SIZE];
        buffer[0] = 1;
        buffer
    });
    match pin_per_use() {
        Ok(()) => each_time(criterion, "plain", "pin_per_use", || pin_per_use().expect("raise the limit (ulimit -l)")),
        Err(error) => eprintln!("left out: pin_per_use: {error}"),
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1))
        .without_plots();
    targets = miss
}
criterion_main!(benches);
