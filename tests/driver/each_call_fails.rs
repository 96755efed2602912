//! Each driver call that a pool makes fails once in a separate run, at several of its first calls. In further runs, several
//! random calls fail. No run panics or hangs, nothing leaks without a log line, the pool serves requests again, and once the
//! driver has recovered, a trim leaves nothing pinned.
//!
//! `DRIVER_FAULTS=all` tries every code at every call, in about 4,000 runs in all, and makes 300 random runs per test.
#![allow(unsafe_code)] // Runs a thread without a context.

use std::collections::BTreeMap;
use std::panic::{self, AssertUnwindSafe};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, sys};
use log::Level;
use mock_driver::{Code, MockDriver};
use pinpool::{Backend, CopyError, PinnedBuf, Pool, Request, Result};

use crate::captured_log::{lines_with_levels, listen};
use crate::draw::Draw;
use crate::events_only::EventsOnly;
use crate::fixture::{Held, MIB, builder, held};
use crate::until::until;
use crate::valid_stats::valid_stats;

/// Each driver function fails at one of its first calls, up to this number; after the fifth only at every third call, unless
/// everything is tried.
const FIRST_CALLS: u64 = 20;
const LEN: usize = 100_000;
/// Four granules, so that a buffer of two needs granules that are remapped.
const LIMIT: u64 = 8 << 20;
/// The time limit for all runs of one backend, so that a hang is reported.
const LONGEST: Duration = Duration::from_secs(1200);
/// Failures of one random run.
const FAILURES_PER_RUN: usize = 8;

/// A backend and the kind of fences of its pool.
#[derive(Debug, Clone)]
struct Case {
    backend: Backend,
    has_events: bool,
    /// The calls that fail, separated by spaces; if empty, all calls.
    only: &'static str,
}

/// A stream with memory in a context that no earlier run has used, so that no cached state from earlier runs applies.
struct Lane {
    stream: Arc<CudaStream>,
    memory: CudaSlice<u8>,
}

impl Lane {
    fn new(driver: &MockDriver) -> Self {
        driver.renew_contexts();
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let memory = stream.alloc_zeros(LEN).unwrap();
        stream.synchronize().unwrap();
        Self { stream, memory }
    }

    /// Fills a buffer, copies it to the lane, and checks what arrived.
    fn round_trip(&mut self, pool: &Pool, byte: u8) -> Result<()> {
        let buf = filled(pool, LEN, byte)?;
        buf.copy_to(&self.stream, &mut self.memory)?.wait()?;
        let back = pool.get(LEN)?.copy_from(&self.stream, &self.memory)?.wait()?;
        assert!(back.wait_slice()?.iter().all(|&found| found == byte), "a wrong byte");
        Ok(())
    }
}

fn filled(pool: &Pool, len: usize, byte: u8) -> Result<PinnedBuf> {
    let mut buf = pool.get(len)?;
    buf.wait_slice_mut()?.fill(byte);
    Ok(buf)
}

/// Retries a failed release with the buffer from the error, which would never be reused if it were dropped.
fn release(buf: PinnedBuf, attempt: impl Fn(PinnedBuf) -> Result<(), CopyError>) {
    let _refused = attempt(buf).or_else(|refused| refused.into_buf().map_or(Ok(()), &attempt));
}

/// Everything that a pool does with a driver. A failing step does not prevent later steps.
fn use_pool(pool: &Pool, lane: &mut Lane) {
    // Like a program's thread that makes its context current only during its own calls.
    // SAFETY: no context is current then; no call of this thread relies on one.
    let _refused = unsafe { sys::cuCtxSetCurrent(std::ptr::null_mut()) };
    let _refused = pool.reserve(MIB as u64);
    for byte in 1..4 {
        let _refused = lane.round_trip(pool, byte);
    }
    if let Ok(buf) = filled(pool, LEN, 4) {
        let _refused = buf.copy_to(&lane.stream, &mut lane.memory).map(drop);
    }
    if let Ok(mut buf) = filled(pool, LEN, 5) {
        let _refused = buf.copy_range_to(0..LEN, &lane.stream, &mut lane.memory).map(drop);
        let _refused = buf.wait_slice_mut().map(|bytes| bytes.fill(6));
        // Panics if the copy cannot be tracked.
        let _refused = panic::catch_unwind(AssertUnwindSafe(|| lane.stream.memcpy_htod(&buf, &mut lane.memory)));
    }
    if let Ok(buf) = filled(pool, LEN, 7) {
        release(buf, |buf| buf.release_after(&lane.stream));
    }
    if let (Ok(buf), Ok(event)) = (filled(pool, LEN, 8), lane.stream.record_event(None)) {
        release(buf, |buf| buf.release_after_event(&event));
    }
    let _refused = lane.stream.synchronize();
    // Grows to the limit; then every other granule is free, and the next buffer needs two in a row.
    let mut bufs: Vec<_> = (0..4).filter_map(|_| pool.get(2 * MIB - 4096).ok()).collect();
    (0..bufs.len()).rev().step_by(2).for_each(|index| drop(bufs.swap_remove(index)));
    let _refused = pool.get_with(Request::new(3 * MIB).timeout(Duration::ZERO));
    drop(bufs);
    pool.maintain();
    pool.trim(2 * MIB as u64);
    let _refused = pool.get(3 * MIB).map(drop);
    pool.clear();
    pool.maintain();
    pool.trim(0);
}

/// Makes one run; `script` selects the calls that fail, before or during the end of the pool. Returns how often each function
/// was called before and during the end. Panics if something is wrong.
fn run(driver: &MockDriver, case: &Case, recovers_before_end: bool, script: impl FnOnce()) -> [Vec<(String, u64)>; 2] {
    let _events = case.has_events.then(EventsOnly::begin);
    listen();
    driver.reset();
    let mut lane = Lane::new(driver);
    driver.reset();
    script();
    let build = || {
        let builder = builder(case.backend.clone()).max_bytes(LIMIT).wait(Duration::ZERO);
        builder.unstable_settings(|only| only.copies_wait = Some(Duration::from_millis(100))).build()
    };
    // A failed attempt may leave the 2 MiB of its backend trial.
    let attempt = |_| {
        let before = held(driver);
        Some((build().ok()?, before))
    };
    let (pool, before) = (0..=2 * FAILURES_PER_RUN).find_map(attempt).expect("a later attempt succeeds");
    use_pool(&pool, &mut lane);
    let (calls, mut wrong_uses) = (driver.all_calls(), driver.wrong_uses());
    if recovers_before_end {
        driver.reset();
    }
    // At this point a script has at most one failure left.
    let served = lane.round_trip(&pool, 9).or_else(|_| lane.round_trip(&pool, 10));
    assert!(served.is_ok(), "it does not serve again: {served:?}");
    until("the work has completed", || driver.counts().work_in_flight == 0);
    pool.trim(0);
    // The mock driver's work completes shortly before its events do. Work that never completes is a hang, which is reported.
    while pool.stats().copies.in_flight > 0 || recovers_before_end && pool.stats().memory.quarantined > 0 {
        thread::yield_now();
        pool.trim(0);
    }
    // The last copy may have ended after the last trim.
    pool.trim(0);
    let stats = valid_stats(&pool);
    assert_eq!((stats.memory.in_use, stats.copies.in_flight), (0, 0));
    if recovers_before_end {
        let kept_bytes = stats.memory.held_bytes - stats.memory.reserve_bytes;
        let expected = (0, stats.memory.quarantined_bytes);
        assert_eq!((stats.memory.quarantined, kept_bytes), expected, "{stats}\n{:?}", lines_with_levels());
    }
    let pinned_bytes = held(driver).pinned_bytes - before.pinned_bytes;
    // The driver may have refused to release a granule. The pool no longer counts this granule, but reuses it first.
    let refused = if calls.iter().any(|(name, _)| name == "cuMemRelease") { 2 << 20 } else { 0 };
    let reported = stats.memory.held_bytes..=stats.memory.held_bytes + refused;
    assert!(reported.contains(&pinned_bytes), "{pinned_bytes} B are pinned, the pool says {}", stats.memory.held_bytes);
    lines_with_levels();
    drop(pool);
    let (after, lines) = (held(driver), lines_with_levels());
    let is_logged = lines.iter().any(|(level, line)| *level == Level::Error && line.contains("until the process ends"));
    let is_clean = is_nothing_left(&after, &before);
    assert!(is_clean || is_logged, "left behind without a log line: {after:?}, not {before:?}; {lines:?}");
    wrong_uses.extend(driver.wrong_uses());
    assert!(wrong_uses.is_empty(), "{wrong_uses:?}");
    let calls_at_end = driver.all_calls();
    drop(lane);
    [calls, calls_at_end]
}

/// Whether no more is left than before. Building a pool may release what an earlier run has left.
fn is_nothing_left(after: &Held, before: &Held) -> bool {
    let counts = |held: &Held| {
        let Held { pinned_bytes, host_allocations, registrations, granules, mappings, reservations } = *held;
        [pinned_bytes, host_allocations, registrations, granules, mappings, reservations]
    };
    counts(after).into_iter().zip(counts(before)).all(|(after, before)| after <= before)
}

/// The codes of the failures.
const CODES: [Code; 5] = [Code::OUT_OF_MEMORY, Code(4), Code::NOT_PERMITTED, Code::UNKNOWN, UNLISTED];
/// A code of a newer driver, which the bindings do not list.
const UNLISTED: Code = Code(9999);
/// Calls with errors that cudarc stores and returns later. It converts the stored number to its enumeration, which ends the
/// process if the enumeration does not list the number.
const STORED_BY_CUDARC: &str = "cuCtxGetCurrent cuCtxSetCurrent cuEventDestroy_v2 cuEventRecord cuEventSynchronize \
    cuMemFreeAsync cuMemFree_v2 cuStreamSynchronize cuStreamWaitEvent";

/// Whether `names`, separated by spaces, contain this name.
fn contains(names: &str, name: &str) -> bool {
    names.split(' ').any(|each| each == name)
}

/// The `nth` call of `name` fails.
#[derive(Debug, Clone)]
struct Fault {
    name: String,
    nth: u64,
    code: Code,
}

impl Fault {
    fn new(name: &str, nth: u64, code: Code) -> Self {
        let is_unusable = code == UNLISTED && contains(STORED_BY_CUDARC, name);
        Self { name: name.to_owned(), nth, code: if is_unusable { Code::UNKNOWN } else { code } }
    }
}

/// Makes all runs of a case. Returns the reasons of failed runs, and in how many runs each call was the only one to fail.
fn sweep(case: &Case, driver: &MockDriver, current: &Mutex<String>) -> (Vec<String>, BTreeMap<String, u64>) {
    let is_everything_tried = std::env::var("DRIVER_FAULTS").is_ok_and(|value| value == "all");
    let is_meant = |(name, _): &(String, u64)| case.only.is_empty() || contains(case.only, name);
    let [mut calls, _] = run(driver, case, true, || {});
    let [_, mut all_calls] = run(driver, case, false, || {});
    calls.retain(is_meant);
    all_calls.retain(is_meant);
    let (mut wrong, mut failed, mut runs) = (Vec::new(), BTreeMap::new(), [0; 2]);
    let mut try_run = |faults: &[Fault], recovers_before_end: bool| {
        let what = format!("{case:?}: {faults:?}");
        current.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&what);
        let script = || faults.iter().for_each(|fault| driver.fail(&fault.name, fault.nth, fault.code));
        if let Err(why) = panic::catch_unwind(AssertUnwindSafe(|| run(driver, case, recovers_before_end, script))) {
            let text = why.downcast_ref::<String>().cloned();
            let text = text.or_else(|| why.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            wrong.push(format!("{what}: {}", text.unwrap_or_default()));
        }
    };
    for (name, count) in &all_calls {
        let before_end = calls.iter().find(|(other, _)| other == name).map_or(0, |(_, count)| *count);
        let is_chosen = |nth: &u64| *nth <= 5 || nth % 3 == 2 || is_everything_tried;
        for nth in (1..=*count.min(&FIRST_CALLS)).filter(is_chosen) {
            let codes = if is_everything_tried { &CODES[..] } else { &CODES[(nth % 5) as usize..][..1] };
            for &code in codes {
                try_run(&[Fault::new(name, nth, code)], nth <= before_end);
                *failed.entry(name.clone()).or_insert(0) += 1;
                runs[0] += 1;
            }
        }
    }
    let mut draw = Draw::of(1);
    for _ in 0..if is_everything_tried { 300 } else { 20 } {
        let faults: Vec<_> = (0..FAILURES_PER_RUN)
            .map(|_| {
                let (name, count) = &calls[usize::try_from(draw.below(calls.len() as u64)).unwrap()];
                Fault::new(name, draw.between(1, *count), draw.pick(&CODES))
            })
            .collect();
        try_run(&faults, true);
        runs[1] += 1;
    }
    // Not `eprintln`, because the harness hides its output if a test passes.
    let line = format!("{case:?}: {} runs in turn, {} at random, {} went wrong\n", runs[0], runs[1], wrong.len());
    std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).unwrap();
    driver.reset();
    driver.renew_contexts();
    (wrong, failed)
}

/// Fails each call of a case. The calls in `needed`, separated by spaces, must be among them.
fn check(case: Case, needed: &str) {
    let current = Arc::new(Mutex::new(String::new()));
    let ((begun, turn), (done, result)) = (channel(), channel());
    let shared = current.clone();
    thread::spawn(move || {
        let driver = MockDriver::load();
        let _began = begun.send(());
        let _ended = done.send(sweep(&case, &driver, &shared));
    });
    // Waits for its turn after other tests, so that the time limit covers only these runs.
    turn.recv().unwrap();
    let Ok((wrong, failed)) = result.recv_timeout(LONGEST) else {
        panic!("hangs or panicked: {}", current.lock().unwrap_or_else(PoisonError::into_inner));
    };
    assert!(wrong.is_empty(), "{} runs went wrong:\n{}", wrong.len(), wrong.join("\n"));
    for name in needed.split(' ') {
        assert!(failed.contains_key(name), "{name} never failed: {failed:?}");
    }
}

const OF_EACH: &str = "cuInit cuDeviceGet cuCtxSetCurrent cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuEventCreate \
    cuEventRecord cuThreadExchangeStreamCaptureMode";

#[test]
fn a_pool_on_vmm_recovers_from_each_failed_call() {
    let own = "cuMemAddressReserve cuMemCreate cuMemMap cuMemSetAccess cuMemUnmap cuMemRelease cuMemAddressFree \
        cuMemHostRegister_v2 cuMemHostUnregister";
    check(Case { backend: Backend::Vmm, has_events: true, only: "" }, &format!("{OF_EACH} {own}"));
}

#[test]
fn a_pool_on_vmm_with_timelines_recovers_from_each_failed_call() {
    let needed = "cuStreamWriteValue32_v2 cuMemHostRegister_v2 cuStreamGetId cuMemHostGetDevicePointer_v2";
    let only = "cuCtxGetCurrent cuDeviceGetAttribute cuDevicePrimaryCtxGetState cuDevicePrimaryCtxRetain \
        cuMemHostRegister_v2 cuMemHostGetDevicePointer_v2 cuStreamCreate cuStreamGetId cuStreamQuery \
        cuStreamWriteValue32_v2";
    check(Case { backend: Backend::Vmm, has_events: false, only }, needed);
}

#[test]
fn a_pool_on_register_recovers_from_each_failed_call() {
    let needed = format!("{OF_EACH} cuMemHostRegister_v2 cuMemHostUnregister");
    check(Case { backend: Backend::Register, has_events: true, only: "" }, &needed);
}

#[test]
fn a_pool_on_cuda_recovers_from_each_failed_call() {
    let needed = format!("{OF_EACH} cuMemHostAlloc cuMemFreeHost");
    check(Case { backend: Backend::Cuda, has_events: true, only: "" }, &needed);
}
