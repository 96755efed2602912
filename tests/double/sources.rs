//! The back-ends `vmm` and `register` without a GPU, on the driver double: their contract, every failing step undone, and
//! pools over them whose data is checked at the device.
//!
//! A process of its own, with a driver of its own; tests take turns ([`Double::load`]).
#![allow(unsafe_code)] // Locks, moves and releases granules by hand.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, sys};
use driver_double::{Code, Counts, Double};
use pinpool::backend::{
    AddressRange, PAGE_BYTES, RegisterSource, RemapError, Source, Subrange, VirtualMemory, VmmSource,
};
use pinpool::testing::ManualClock;
use pinpool::testing::check_source;
use pinpool::{Backend, Pool, PoolBuilder, Preset, ReleasePolicy};

const MIB: usize = 1 << 20;
const GRANULE: usize = 2 * MIB;
const VIRTUAL_HOST_MEMORY: i32 = 141;
const REGISTERS: i32 = 99;

/// What a source may leave behind: nothing.
fn held(double: &Double) -> [u64; 5] {
    let Counts { pinned_bytes, registrations, granules, mappings, reservations, .. } = double.counts();
    [pinned_bytes, registrations, granules, mappings, reservations]
}

fn builder(backend: Backend) -> PoolBuilder {
    Pool::builder().without_env().backend(backend)
}

/// A stream and device memory on it, with nothing left to run.
fn device(context: &Arc<CudaContext>, len: usize) -> (Arc<CudaStream>, CudaSlice<u8>) {
    let stream = context.new_stream().unwrap();
    let memory = stream.alloc_zeros(len).unwrap();
    stream.synchronize().unwrap();
    (stream, memory)
}

/// A range of `vmm` with its first granules locked and filled with a byte each.
struct Run {
    source: VmmSource,
    range: AddressRange,
}

impl Run {
    fn locked(granules: usize) -> Self {
        let source = VmmSource::new(0, None).unwrap();
        let range = source.reserve(16 * GRANULE).unwrap();
        let run = Self { source, range };
        run.commit(0, granules).unwrap();
        (0..granules).for_each(|granule| run.bytes(granule).fill(u8::try_from(granule).unwrap() + 1));
        run
    }

    fn commit(&self, first: usize, count: usize) -> Result<(), pinpool::backend::SourceError> {
        // SAFETY: each test locks only what is not locked.
        unsafe { self.source.commit(&self.range, first * GRANULE, count * GRANULE) }
    }

    fn decommit(&self, first: usize, count: usize) -> Result<(), pinpool::backend::SourceError> {
        // SAFETY: each test unlocks only what is locked and unused.
        unsafe { self.source.decommit(&self.range, first * GRANULE, count * GRANULE) }
    }

    fn remap(&self, from: usize, to: usize, count: usize) -> Result<(), RemapError> {
        self.gather(&[(from, count)], to)
    }

    fn gather(&self, from: &[(usize, usize)], to: usize) -> Result<(), RemapError> {
        let piece = |&(first, count)| Subrange { offset: first * GRANULE, bytes: count * GRANULE };
        let pieces: Vec<_> = from.iter().map(piece).collect();
        // SAFETY: each test moves only what is locked and unused, to where nothing is.
        unsafe { self.source.remap(&self.range, &pieces, to * GRANULE) }
    }

    #[allow(clippy::mut_from_ref)] // One slice at a time, by each test.
    fn bytes(&self, granule: usize) -> &mut [u8] {
        let start = self.range.at(granule * GRANULE, GRANULE).unwrap();
        // SAFETY: locked, and looked at by one test alone.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), GRANULE) }
    }

    /// Do these granules hold what `locked` wrote into as many of the first?
    fn are_intact(&self, granules: impl IntoIterator<Item = usize>) -> bool {
        (1..).zip(granules).all(|(byte, granule)| self.bytes(granule).iter().all(|&found| found == byte))
    }

    fn unreserve(self) {
        // SAFETY: each test unlocks all it locked.
        unsafe { self.source.unreserve(self.range) }.unwrap();
    }
}

#[test]
fn the_sources_keep_the_contract_and_leave_nothing() {
    let double = Double::load();
    let before = held(&double);
    check_source(&VmmSource::new(0, None).unwrap());
    check_source(&RegisterSource::new(0, None).unwrap());
    assert_eq!(held(&double), before);
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}

#[test]
fn the_sources_hold_what_they_say_they_hold() {
    let double = Double::load();
    let sources: [&dyn Source; 2] = [&VmmSource::new(0, None).unwrap(), &RegisterSource::new(0, None).unwrap()];
    for source in sources {
        for len in [1, PAGE_BYTES, 100_000, GRANULE - 1, GRANULE, GRANULE + 1] {
            for is_fast in [false, true] {
                let (name, before) = (source.name(), double.counts().pinned_bytes);
                let region = if is_fast { source.acquire_fast(len, 2, &|_| {}) } else { source.acquire(len) }.unwrap();
                assert_eq!(double.counts().pinned_bytes - before, source.held_bytes(len) as u64, "{name}, {len} B");
                // SAFETY: acquired above, used by nobody.
                unsafe { source.release(region) }.unwrap();
            }
        }
    }
}

#[test]
fn making_a_pool_asks_what_there_is_and_creates_no_context() {
    let double = Double::load();
    let before = held(&double);
    for backend in [Backend::Auto, Backend::Vmm, Backend::Register] {
        let pool = builder(backend).build().unwrap();
        assert_eq!((double.calls("cuDevicePrimaryCtxRetain"), held(&double)[..4].to_vec()), (0, before[..4].to_vec()));
        drop(pool);
    }
    let pool = builder(Backend::Vmm).build().unwrap();
    drop(pool.get(MIB).unwrap());
    assert_eq!(double.calls("cuDevicePrimaryCtxRetain"), 1);
}

#[test]
fn a_driver_that_wants_a_context_for_addresses_gets_one() {
    let double = Double::load();
    // The first addresses are the source's trial, the second the pool's.
    double.fail("cuMemAddressReserve", 1, Code::INVALID_CONTEXT);
    double.fail("cuMemAddressReserve", 2, Code::INVALID_CONTEXT);
    let pool = builder(Backend::Vmm).build().unwrap();
    assert_eq!(double.calls("cuDevicePrimaryCtxRetain"), 1);
    drop(pool.get(MIB).unwrap());
}

#[test]
fn auto_takes_the_best_that_the_driver_has_and_each_refusal_names_what_is_missing() {
    let double = Double::load();
    let taken = |preset| builder(Backend::Auto).preset(preset).build().unwrap().stats().backend;
    assert_eq!((taken(Preset::Adaptive), taken(Preset::Tensorflow)), ("vmm", "cuda"));

    for name in ["cuMemCreate", "cuMemSetAccess", "cuMemUnmap"] {
        assert!(double.hide(name));
        let error = builder(Backend::Vmm).build().unwrap_err();
        assert!(error.is_backend() && error.to_string().contains(&format!("no {name}")), "{error}");
        assert_eq!(taken(Preset::Adaptive), "register");
        double.reset();
    }
    double.set_attribute(VIRTUAL_HOST_MEMORY, 0);
    let error = builder(Backend::Vmm).build().unwrap_err();
    assert!(error.is_backend() && error.to_string().contains("no virtual memory on the host"), "{error}");
    assert_eq!(taken(Preset::Adaptive), "register");
    double.set_attribute(REGISTERS, 0);
    let error = builder(Backend::Register).build().unwrap_err();
    assert!(error.is_backend() && error.to_string().contains("registers no host memory"), "{error}");
    assert_eq!(taken(Preset::Adaptive), "cuda");
}

#[test]
fn every_device_that_has_virtual_memory_may_copy_from_it() {
    let double = Double::load();
    double.set_device_count(2);
    let contexts = [0, 1].map(|ordinal| CudaContext::new(ordinal).unwrap());
    let pool = builder(Backend::Vmm).build().unwrap();
    for (byte, context) in (1..).zip(&contexts) {
        let (stream, mut memory) = device(context, 3 * MIB);
        let mut buf = pool.get(3 * MIB).unwrap();
        buf.as_mut_slice().unwrap().fill(byte);
        buf.copy_to(&stream, &mut memory).unwrap().wait().unwrap();
        assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![byte; 3 * MIB]);
    }
}

#[test]
fn a_driver_that_announces_host_memory_and_refuses_it_is_passed_over() {
    let double = Double::load();
    double.fail("cuMemCreate", 1, Code::NOT_PERMITTED);
    let refusal = VmmSource::new(0, None).unwrap_err().to_string();
    assert!(refusal.contains("cuMemCreate") && refusal.contains("NOT_PERMITTED"), "{refusal}");
    double.fail("cuMemCreate", 1, Code::INVALID_CONTEXT);
    assert!(VmmSource::new(0, None).is_ok(), "a context comes with the first get");
    for refused in ["cuMemCreate", "cuMemAddressReserve"] {
        double.fail(refused, 1, Code::NOT_PERMITTED);
        assert_eq!(builder(Backend::Auto).build().unwrap().stats().backend, "register", "{refused}");
    }
}

#[test]
fn a_lock_that_fails_at_any_step_changes_nothing() {
    let double = Double::load();
    let run = Run::locked(2);
    let before = held(&double);
    let steps = [("cuMemCreate", 4), ("cuMemMap", 4), ("cuMemSetAccess", 1)];
    for (name, nth) in steps.into_iter().flat_map(|(name, count)| (1..=count).map(move |nth| (name, nth))) {
        double.fail(name, nth, Code::OUT_OF_MEMORY);
        let refusal = run.commit(2, 4).unwrap_err().to_string();
        assert!(refusal.contains(name) && refusal.contains("OUT_OF_MEMORY"), "{refusal}");
        assert!(refusal.contains("PINPOOL_MAX_BYTES"), "{refusal}");
        assert_eq!(held(&double), before, "{name}, call {nth}");
    }
    run.commit(2, 4).unwrap();
    assert!(run.are_intact(0..2));
    run.decommit(0, 6).unwrap();
    run.unreserve();
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}

#[test]
fn an_unlock_that_fails_leaves_the_run_locked_and_whole() {
    let double = Double::load();
    let run = Run::locked(4);
    let before = held(&double);
    for nth in 1..=4 {
        double.fail("cuMemUnmap", nth, Code::UNKNOWN);
        assert!(run.decommit(0, 4).is_err());
        assert_eq!(held(&double), before, "unmap {nth}");
        assert!(run.are_intact(0..4), "unmap {nth}");
    }
    run.decommit(0, 4).unwrap();
    run.unreserve();
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}

#[test]
fn granules_that_the_driver_will_not_take_back_are_the_next_to_be_used() {
    let double = Double::load();
    let run = Run::locked(4);
    let (before, created) = (held(&double), double.calls("cuMemCreate"));
    double.fail("cuMemRelease", 2, Code::UNKNOWN);
    run.decommit(0, 4).unwrap();
    assert_eq!(double.counts().granules, before[2] - 3);
    run.commit(0, 4).unwrap();
    assert_eq!((held(&double), double.calls("cuMemCreate") - created), (before, 3));
    run.decommit(0, 4).unwrap();
    run.unreserve();
}

#[test]
fn a_move_keeps_what_the_granules_hold_and_pins_nothing() {
    let double = Double::load();
    let run = Run::locked(4);
    let (before, created) = (held(&double), double.calls("cuMemCreate"));
    run.remap(1, 9, 3).unwrap();
    assert_eq!((held(&double), double.calls("cuMemCreate")), (before, created));
    assert!(run.are_intact([0, 9, 10, 11]));
    run.decommit(0, 1).unwrap();
    run.decommit(9, 3).unwrap();
    run.unreserve();
}

#[test]
fn a_move_that_fails_at_any_step_leaves_the_granules_where_they_were() {
    let double = Double::load();
    let run = Run::locked(3);
    let before = held(&double);
    let steps = [("cuMemUnmap", 3), ("cuMemMap", 3), ("cuMemSetAccess", 1)];
    for (name, nth) in steps.into_iter().flat_map(|(name, count)| (1..=count).map(move |nth| (name, nth))) {
        double.fail(name, nth, Code::UNKNOWN);
        let error = run.remap(0, 8, 3).unwrap_err();
        assert!(matches!(error, RemapError::Kept(_)), "{name}, call {nth}: {error}");
        assert_eq!(held(&double), before, "{name}, call {nth}");
        assert!(run.are_intact(0..3), "{name}, call {nth}");
    }
    // Neither there nor back: the granules are given up, and nothing is left of them.
    double.fail_from("cuMemMap", 1, Code::UNKNOWN);
    assert!(matches!(run.remap(0, 8, 3).unwrap_err(), RemapError::Lost(_)));
    assert_eq!((double.counts().granules, double.counts().mappings), (before[2] - 3, before[3] - 3));
    double.reset();
    run.commit(0, 3).unwrap();
    run.decommit(0, 3).unwrap();
    run.unreserve();
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}

#[test]
fn granules_gathered_from_many_places_are_all_moved_or_none_with_one_setting_of_access() {
    let double = Double::load();
    let run = Run::locked(6);
    let (before, pieces) = (held(&double), [(4, 2), (0, 1), (2, 1)]);
    let steps = [("cuMemUnmap", 4), ("cuMemMap", 4), ("cuMemSetAccess", 1)];
    for (name, nth) in steps.into_iter().flat_map(|(name, count)| (1..=count).map(move |nth| (name, nth))) {
        double.fail(name, nth, Code::UNKNOWN);
        let error = run.gather(&pieces, 9).unwrap_err();
        assert!(matches!(error, RemapError::Kept(_)), "{name}, call {nth}: {error}");
        assert_eq!(held(&double), before, "{name}, call {nth}");
        assert!(run.are_intact(0..6), "{name}, call {nth}");
    }
    let set = double.calls("cuMemSetAccess");
    run.gather(&pieces, 9).unwrap();
    assert_eq!((held(&double), double.calls("cuMemSetAccess") - set), (before, 1));
    assert!(run.are_intact([11, 1, 12, 3, 9, 10]));
    // Neither there nor back: all of them are given up, and none of those that were not to move.
    double.fail_from("cuMemMap", 1, Code::UNKNOWN);
    assert!(matches!(run.gather(&[(9, 2), (12, 1)], 4).unwrap_err(), RemapError::Lost(_)));
    assert_eq!((double.counts().granules, double.counts().mappings), (before[2] - 3, before[3] - 3));
    double.reset();
    // Nor if the second will not go and the first not come back.
    double.fail("cuMemUnmap", 2, Code::UNKNOWN);
    double.fail_from("cuMemMap", 1, Code::UNKNOWN);
    assert!(matches!(run.gather(&[(1, 1), (3, 1)], 14).unwrap_err(), RemapError::Lost(_)));
    double.reset();
    run.decommit(11, 1).unwrap();
    run.commit(1, 3).unwrap();
    run.decommit(1, 3).unwrap();
    run.unreserve();
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}

#[test]
fn granules_come_go_and_move_beside_copies_of_their_neighbours() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, memory) = device(&context, 2 * GRANULE);
    // Granules 1 and 2 are read by the device, across the edge between them.
    let run = Run::locked(4);
    let source = run.range.at(GRANULE + GRANULE / 2, 2 * MIB).unwrap();
    let gate = double.hold(stream.cu_stream());
    let address = {
        use cudarc::driver::DevicePtr;
        memory.device_ptr(&stream).0
    };
    // SAFETY: locked until the copy is over, and the target is as long.
    let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(address, source.as_ptr().cast(), 2 * MIB, stream.cu_stream()) };
    copied.result().unwrap();
    run.remap(0, 5, 1).unwrap();
    run.remap(3, 6, 1).unwrap();
    run.commit(3, 2).unwrap();
    run.decommit(5, 2).unwrap();
    drop(gate);
    let arrived = stream.clone_dtoh(&memory).unwrap();
    assert_eq!(arrived[..2 * MIB], [vec![2; MIB], vec![3; MIB]].concat());
    run.decommit(1, 4).unwrap();
    run.unreserve();
    let counts = double.counts();
    assert_eq!((counts.frees_with_work_in_flight, double.wrong_uses()), (0, Vec::new()));
}

#[test]
fn a_registration_that_is_refused_holds_nothing_and_one_that_stays_keeps_its_memory() {
    let double = Double::load();
    let source = RegisterSource::new(0, None).unwrap();
    let before = held(&double);
    double.fail("cuMemHostRegister_v2", 1, Code::OUT_OF_MEMORY);
    let refusal = source.acquire(MIB).unwrap_err().to_string();
    assert!(refusal.contains("cuMemHostRegister") && refusal.contains("PINPOOL_MAX_BYTES"), "{refusal}");
    assert_eq!(held(&double), before);

    let region = source.acquire(MIB).unwrap();
    let start = region.start();
    double.fail("cuMemHostUnregister", 1, Code::UNKNOWN);
    // SAFETY: acquired above, used by nobody.
    assert!(unsafe { source.release(region) }.is_err());
    assert_eq!(double.counts().registrations, before[1] + 1);
    // SAFETY: C1: a region whose release failed stays mapped.
    assert_eq!(unsafe { start.read_volatile() }, 0);
}

#[test]
fn on_a_lost_device_every_call_is_an_error_and_nothing_is_taken() {
    let double = Double::load();
    let run = Run::locked(2);
    double.lose_device(Code::LAUNCH_FAILED);
    for refusal in [run.commit(2, 1), run.decommit(0, 1), run.remap(0, 4, 1).map_err(Into::into)] {
        assert!(refusal.unwrap_err().to_string().contains("LAUNCH_FAILED"));
    }
    assert!(run.are_intact(0..2), "still mapped");
    let pool = builder(Backend::Register).build().unwrap();
    assert!(pool.get(MIB).unwrap_err().is_backend());
    double.reset();
    run.decommit(0, 2).unwrap();
    run.unreserve();
}

/// Batches of many threads and streams into memory of their own, while the pool grows, shrinks, trims and reuses at once;
/// all checked at the device.
fn churn(backend: Backend, double: &Double) {
    const THREADS: u8 = 3;
    const ROUNDS: u8 = 24;
    let name = backend.name();
    let before = held(double);
    let context = CudaContext::new(0).unwrap();
    let pool = builder(backend).max_bytes(24 << 20).build().unwrap();
    let lens = [PAGE_BYTES, 100_001, MIB - 1, GRANULE + 5, 3 * MIB];
    let batches_of =
        |lane: u8| (0..ROUNDS).map(move |round| (lane * 80 + round, lens[usize::from(round * THREADS + lane) % 5]));
    // Nothing but the pool's copies runs meanwhile: whatever a free waits for is one of them.
    let mut lanes: Vec<_> = (0..THREADS)
        .map(|lane| {
            let stream = context.new_stream().unwrap();
            let memories: Vec<CudaSlice<u8>> =
                batches_of(lane).map(|(_, len)| stream.alloc_zeros(len).unwrap()).collect();
            stream.synchronize().unwrap();
            (stream, memories)
        })
        .collect();
    // Nor what an earlier run gave back on streams of its own.
    let at_rest = || {
        while double.counts().work_in_flight > 0 {
            thread::yield_now();
        }
    };
    at_rest();
    thread::scope(|scope| {
        for (lane, (stream, memories)) in (0..).zip(&mut lanes) {
            let (pool, context) = (&pool, &context);
            scope.spawn(move || {
                context.bind_to_thread().unwrap();
                for ((byte, len), memory) in batches_of(lane).zip(memories) {
                    let mut buf = pool.get(len).unwrap();
                    buf.as_mut_slice().unwrap().fill(byte);
                    match byte % 3 {
                        // Dropped without a wait: the next get may want this very memory.
                        0 => drop(buf.copy_to(stream, memory).unwrap()),
                        1 => drop(buf.copy_range_to(0..len, stream, memory).unwrap()),
                        _ => stream.memcpy_htod(&buf, memory).unwrap(),
                    }
                    match byte % 4 {
                        1 => pool.trim(0),
                        3 => pool.clear(),
                        _ => {}
                    }
                }
            });
        }
    });
    assert_eq!(double.counts().frees_with_work_in_flight, 0, "{name} gave memory back under a copy");
    for (lane, (stream, memories)) in (0..).zip(&lanes) {
        for ((byte, len), memory) in batches_of(lane).zip(memories) {
            let arrived = stream.clone_dtoh(memory).unwrap();
            assert!(arrived.iter().all(|&found| found == byte), "{name}: {len} B of lane {lane}");
        }
    }
    // What looked at the memories leaves notes behind on the streams: the end of the pool is no copy of theirs.
    at_rest();
    pool.poll();
    let stats = pool.stats();
    stats.validate().unwrap();
    assert_eq!((stats.backend, stats.puts), (name, u64::from(THREADS) * u64::from(ROUNDS)));
    assert_eq!((stats.in_flight, stats.lost), (0, 0));
    drop(pool);
    assert_eq!(held(double), before, "{name} left something behind");
    assert_eq!(double.wrong_uses(), Vec::<String>::new(), "{name}");
}

#[test]
fn pools_over_each_carry_every_batch_whole_and_release_nothing_under_a_copy() {
    let double = Double::load();
    for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
        churn(backend, &double);
    }
}

#[test]
fn a_reserve_of_vmm_is_one_registration_and_buffers_are_cut_from_it() {
    let double = Double::load();
    let before = held(&double);
    let pool = builder(Backend::Vmm).reserve_bytes(16 << 20).build().unwrap();
    let created = double.calls("cuMemCreate");
    let bufs = [1, MIB, 5 * MIB].map(|len| pool.get(len).unwrap());
    let counts = double.counts();
    assert_eq!((counts.registrations - before[1], double.calls("cuMemCreate")), (1, created));
    assert_eq!(counts.pinned_bytes - before[0], 16 << 20);
    // What the reserve lies in, the kernel says; of what grows beyond it, the driver.
    let tiers = pool.page_tiers().unwrap();
    assert_eq!((tiers.transparent_bytes + tiers.small_bytes, tiers.driver_bytes), (16 << 20, 0), "{tiers}");
    let beyond = pool.get(16 * MIB).unwrap();
    assert_eq!(pool.page_tiers().unwrap().driver_bytes, 16 << 20);
    drop((bufs, beyond, pool));
    assert_eq!(held(&double), before);
}

/// A pool, and a copy of 4096 B from it that stands still.
fn with_a_copy_in_flight(pool: &Pool, stream: &Arc<CudaStream>, memory: &mut CudaSlice<u8>) {
    let mut buf = pool.get(4096).unwrap();
    buf.as_mut_slice().unwrap().fill(7);
    drop(buf.copy_to(stream, memory).unwrap());
}

#[test]
fn what_is_due_waits_for_copies_is_used_again_first_and_goes_on_a_thread_of_its_own() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = device(&context, 4096);
    for backend in [Backend::Register, Backend::Cuda] {
        let clock = ManualClock::default();
        let pool = builder(backend).clock(clock.clone()).build().unwrap();
        let at_start = double.counts();
        drop(pool.get(3 * MIB).unwrap());
        let large = double.counts();
        let gate = double.hold(stream.cu_stream());
        with_a_copy_in_flight(&pool, &stream, &mut memory);
        // Buffers age out of the front; then their regions are due.
        for _ in 0..8 {
            clock.advance_us(60_000_000);
            pool.poll();
        }
        let stats = pool.stats();
        assert!(stats.awaiting_release_bytes >= 3 << 20, "{stats:?}");
        assert!(stats.awaiting_release_bytes <= stats.arena_free_bytes);
        stats.validate().unwrap();
        assert_eq!(double.counts().peak_pinned_bytes, double.counts().pinned_bytes, "nothing was given back");
        // What waits serves the next one that fits.
        let locks = stats.underlying.allocs;
        drop(pool.get(3 * MIB).unwrap());
        assert_eq!(pool.stats().underlying.allocs, locks);
        drop(gate);
        stream.synchronize().unwrap();
        let call = if stats.backend == "cuda" { "cuMemFreeHost" } else { "cuMemHostUnregister" };
        let held_call = double.hold_call(call);
        for _ in 0..8 {
            clock.advance_us(60_000_000);
            pool.poll();
        }
        // The poll came back, while the release stands in the driver.
        held_call.wait_for(1);
        assert_eq!(pool.stats().awaiting_release_bytes, 0, "on its way");
        drop(held_call);
        while double.counts().pinned_bytes >= large.pinned_bytes {
            clock.advance_us(60_000_000);
            pool.poll();
            thread::yield_now();
        }
        drop(pool);
        let counts = double.counts();
        assert_eq!((counts.pinned_bytes, counts.frees_with_work_in_flight), (at_start.pinned_bytes, 0));
        double.reset();
    }
}

#[test]
fn a_trim_beside_a_copy_is_done_once_the_copy_is_over() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = device(&context, 4096);
    let pool = builder(Backend::Register).build().unwrap();
    drop(pool.get(3 * MIB).unwrap());
    let gate = double.hold(stream.cu_stream());
    with_a_copy_in_flight(&pool, &stream, &mut memory);
    pool.clear();
    pool.trim(0);
    assert_eq!(double.calls("cuMemHostUnregister"), 0);
    assert!(pool.stats().awaiting_release_bytes >= 3 << 20);
    drop(gate);
    stream.synchronize().unwrap();
    while double.calls("cuMemHostUnregister") == 0 {
        pool.poll();
        thread::sleep(Duration::from_millis(1));
    }
    drop(pool);
    assert_eq!(double.counts().frees_with_work_in_flight, 0);
}

#[test]
fn a_borrowed_copy_counts_as_in_flight_until_its_buffer_is_free() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = device(&context, 4096);
    let pool = builder(Backend::Register).build().unwrap();
    drop(pool.get(3 * MIB).unwrap());
    let mut buf = pool.get(4096).unwrap();
    let gate = double.hold(stream.cu_stream());
    buf.copy_range_to(0..4096, &stream, &mut memory).unwrap();
    pool.trim(0);
    assert_eq!(double.calls("cuMemHostUnregister"), 0);
    drop(gate);
    buf.as_mut_slice().unwrap().fill(1);
    pool.trim(0);
    assert!(double.calls("cuMemHostUnregister") > 0, "the buffer is in use, but no copy runs");
    assert_eq!(double.counts().frees_with_work_in_flight, 0);
}

#[test]
fn no_copy_begins_while_memory_goes_back_and_hits_go_on() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = device(&context, 4096);
    let pool = builder(Backend::Register).build().unwrap();
    let mut buf = pool.get(4096).unwrap();
    buf.as_mut_slice().unwrap().fill(7);
    drop(pool.get(3 * MIB).unwrap());
    let gate = double.hold_call("cuMemHostUnregister");
    thread::scope(|scope| {
        scope.spawn(|| pool.trim(0));
        gate.wait_for(1);
        let copies = double.calls("cuMemcpyHtoDAsync_v2");
        let copy = scope.spawn(|| {
            context.bind_to_thread().unwrap();
            drop(buf.copy_to(&stream, &mut memory).unwrap());
        });
        drop(pool.get(4096).unwrap());
        assert!(pool.try_get(4096).unwrap().is_some(), "a hit while the release stands in the driver");
        assert_eq!((double.calls("cuMemcpyHtoDAsync_v2"), copy.is_finished()), (copies, false));
        drop(gate);
        copy.join().unwrap();
    });
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![7; 4096]);
    assert_eq!(double.counts().frees_with_work_in_flight, 0);
}

#[test]
fn at_the_ceiling_idle_regions_wait_for_copies_or_are_drained_when_forced() {
    for release in [ReleasePolicy::Idle, ReleasePolicy::Force] {
        let double = Double::load();
        let context = CudaContext::new(0).unwrap();
        let (stream, mut memory) = device(&context, 4096);
        let before = double.counts().pinned_bytes;
        let wait = Duration::from_secs(if release == ReleasePolicy::Force { 20 } else { 0 });
        let pool = builder(Backend::Register).max_bytes(6 << 20).release_policy(release).wait(wait).build().unwrap();
        let gate = double.hold(stream.cu_stream());
        with_a_copy_in_flight(&pool, &stream, &mut memory);
        drop(pool.get(3 * MIB).unwrap());
        // Nothing idle is large enough, and there is no room for one more region.
        thread::scope(|scope| {
            let get = scope.spawn(|| {
                context.bind_to_thread().unwrap();
                pool.get(5 * MIB).map(drop)
            });
            if release == ReleasePolicy::Idle {
                assert!(get.join().unwrap().unwrap_err().is_limit());
                return;
            }
            while pool.stats().drains == 0 {
                thread::yield_now();
            }
            assert!(!get.is_finished());
            drop(gate);
            get.join().unwrap().unwrap();
        });
        assert_eq!(pool.stats().drains, u64::from(release == ReleasePolicy::Force));
        let most_bytes = double.counts().peak_pinned_bytes - before;
        assert!(most_bytes <= 6 << 20, "{release:?}: {most_bytes}, {:?}", pool.stats());
        assert_eq!(double.counts().frees_with_work_in_flight, 0);
    }
}

#[test]
fn beside_copies_a_pool_grows_in_short_steps() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = device(&context, 4096);
    let pool = builder(Backend::Register).build().unwrap();
    let step = |len: usize| {
        let before = double.counts().pinned_bytes;
        let mut bufs = Vec::new();
        while double.counts().pinned_bytes == before {
            bufs.push(pool.get(len).unwrap());
        }
        (double.counts().pinned_bytes - before, bufs)
    };
    let (at_rest, _kept) = step(2 * MIB);
    assert_eq!(at_rest, 16 << 20);
    let gate = double.hold(stream.cu_stream());
    with_a_copy_in_flight(&pool, &stream, &mut memory);
    let (beside_a_copy, _kept) = step(2 * MIB);
    assert_eq!(beside_a_copy, 8 << 20);
    let (one_buffer, _kept) = step(10 * MIB);
    assert_eq!(one_buffer, 10 << 20);
    drop(gate);
}

#[test]
fn with_a_stuck_copy_the_end_of_a_pool_releases_nothing_that_would_wait_for_it() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = device(&context, 4096);
    let pool = builder(Backend::Register).close_wait(Duration::ZERO).build().unwrap();
    drop(pool.get(3 * MIB).unwrap());
    let gate = double.hold(stream.cu_stream());
    with_a_copy_in_flight(&pool, &stream, &mut memory);
    let held_before = held(&double);
    drop(pool);
    assert_eq!(held(&double), held_before);
    drop(gate);
    assert_eq!(stream.clone_dtoh(&memory).unwrap(), vec![7; 4096]);
}

#[test]
fn buffers_and_copies_that_outlive_their_pool_give_everything_back_in_the_end() {
    let double = Double::load();
    let context = CudaContext::new(0).unwrap();
    let (stream, mut memory) = device(&context, 4096);
    for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
        let before = held(&double);
        let pool = builder(backend).build().unwrap();
        let late = pool.get(3 * MIB).unwrap();
        let gate = double.hold(stream.cu_stream());
        with_a_copy_in_flight(&pool, &stream, &mut memory);
        thread::scope(|scope| {
            let end = scope.spawn(|| drop(pool));
            drop(gate);
            end.join().unwrap();
        });
        drop(late);
        assert_eq!(held(&double), before);
    }
    assert_eq!(double.counts().frees_with_work_in_flight, 0);
}
