//! Released memory leaves the resident memory of the process.
#![allow(clippy::print_stdout)] // Prints why it skips.

use std::fs;

use pinpool::{Backend, PinnedBuf, Pool, PoolBuilder};

use crate::child::alone;
use crate::fixture::{MIB, over_sim, status_kib, with_manual_clock};

/// Below the usual `RLIMIT_MEMLOCK`.
const BYTES: usize = 6 * MIB;
const MAX_BYTES: u64 = 7 << 20;
/// Tolerance for the process's other memory, which may change meanwhile.
const NOISE: usize = MIB;

fn resident_bytes() -> usize {
    fs::read_to_string("/proc/self/statm").unwrap().split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Bytes that the kernel has locked for this process.
fn locked_bytes() -> usize {
    usize::try_from(status_kib("VmLck")).unwrap() << 10
}

fn builder(backend: Backend) -> PoolBuilder {
    over_sim(MAX_BYTES).backend(backend)
}

/// Buffers of three sizes, every byte written.
fn written(pool: &Pool) -> Vec<PinnedBuf> {
    let fill = |len| {
        let mut buffer = pool.get(len).unwrap();
        buffer.wait_slice_mut().unwrap().fill(1);
        buffer
    };
    [3 * MIB, 2 * MIB, MIB].map(fill).into()
}

#[test]
fn resident_memory_falls_after_each_kind_of_release() {
    // Resident memory is measured for the whole process, not for a pool.
    alone(|| [Backend::Mlock, Backend::Heap].into_iter().for_each(check_resident_memory));
}

fn check_resident_memory(backend: Backend) {
    let name = backend.name();
    let (pool, clock) = with_manual_clock(builder(backend.clone()));
    if pool.stats().limits.max_bytes < Some(MAX_BYTES) {
        println!("skipped {name}: this process may lock {:?} bytes, not {MAX_BYTES}", pool.stats().limits.max_bytes);
        return;
    }
    let before = resident_bytes();
    let releases: [(&str, &dyn Fn()); 3] = [
        ("trim", &|| pool.trim(0)),
        ("clear", &|| pool.clear()),
        ("time", &|| {
            for _ in 0..100 {
                clock.advance_us(1_000_000);
                pool.maintain();
            }
        }),
    ];
    for (way, release) in releases {
        drop(written(&pool));
        let full = resident_bytes();
        assert!(full + NOISE >= before + BYTES, "{name}: {before} B before, {full} B with {BYTES} B written");
        assert!(pool.stats().pinned_by.is_none() || locked_bytes() >= BYTES, "{name}: {} B locked", locked_bytes());
        release();
        let after = resident_bytes();
        assert!(after + BYTES <= full + NOISE, "{name}, {way}: {full} B full, {after} B after");
        assert_eq!((locked_bytes(), pool.stats().memory.held_bytes), (0, 0), "{name}, {way}");
    }
    // The end of a pool, with a reserve.
    drop(pool);
    let pool = builder(backend).reserve(4 << 20).build().unwrap();
    let mut last = pool.get(2 * MIB).unwrap();
    last.wait_slice_mut().unwrap().fill(1);
    let full = resident_bytes();
    assert!(full + NOISE >= before + 4 * MIB, "{name}: a reserve is resident immediately: {before} B before, {full} B");
    drop(pool);
    drop(last);
    assert!(resident_bytes() + 4 * MIB <= full + NOISE, "{name}: {full} B full, {} B at the end", resident_bytes());
    assert_eq!(locked_bytes(), 0);
}
