//! Seeded runs of a pool over an adversarial driver: each seed draws the switches of the mock driver, one or two GPUs, a backend, a fence,
//! a limit, and steps. Steps are copies by the pool, copies by others on its streams and on streams that it knows only by
//! their handle, captures, refused calls and device resets. Every byte on the devices and in buffers is compared.
//!
//! | command | runs |
//! | --- | --- |
//! | `cargo test --all-features --test driver seeds` | 80 seeds |
//! | `DRIVER_FIRST=7 DRIVER_SEEDS=1 cargo test --all-features --test driver seeds` | one seed |
//! | `tests/driver/seeds.sh 100000` | 100,000, in parts of 200 seeds and eight processes at once |
#![allow(unsafe_code)] // Makes copies that the pool does not see, and resets devices.

use std::cell::RefCell;
use std::ptr;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use cudarc::driver::sys::{CUresult, CUstream, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtrMut, result, sys};
use mock_driver::{Code, Deviation, MockDriver};
use pinpool::{Backend, PinnedBuf, Pool};

use crate::child::alone;
use crate::draw::{Draw, number_from};
use crate::events_only::EventsOnly;
use crate::fixture::{MIB, builder};
use crate::valid_stats::valid_stats;

const SEEDS: u64 = 80;
const STEPS: u64 = 40;
const MOST_HELD: usize = 5;
/// The longest time that a device's work takes.
const WORK: Duration = Duration::from_millis(10);
const LARGEST: usize = 3 * MIB;
/// Mostly small lengths, which take less time, and some that need several granules.
const LENGTHS: [usize; 7] = [4096, 4096, 100_000, 100_000, MIB, 2 * MIB + 1, LARGEST];
/// Calls that are refused once in a while.
const REFUSED: [&str; 12] = [
    "cuMemCreate",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemHostRegister_v2",
    "cuMemHostAlloc",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventCreate",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamIsCapturing",
    "cuCtxGetId",
];
const CODES: [Code; 3] = [Code::OUT_OF_MEMORY, Code::NOT_PERMITTED, Code::UNKNOWN];

thread_local! {
    /// Bytes read back from a device, in reused memory, because fresh pages cost more than the copy.
    static ARRIVED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// A stream with memory that copies of this stream alone write to.
struct Lane {
    stream: Arc<CudaStream>,
    memory: CudaSlice<u8>,
    address: u64,
    /// What the last copy wrote; `None` if it is not known.
    expected: Option<(u8, usize)>,
    /// A stream that the pool knows only by its handle, if there is one now. Its copies write to the same memory.
    lent: Option<CUstream>,
}

impl Lane {
    fn new(context: &Arc<CudaContext>) -> Self {
        let stream = context.new_stream().unwrap();
        // SAFETY: no byte is read before a copy has written it.
        let mut memory = unsafe { stream.alloc(LARGEST) }.unwrap();
        stream.synchronize().unwrap();
        let address = memory.device_ptr_mut(&stream).0;
        Self { stream, memory, address, expected: None, lent: None }
    }

    fn enter(&self) {
        // Avoids cudarc's own function, which reports errors of earlier calls that the context object keeps.
        // SAFETY: a live context.
        unsafe { result::ctx::set_current(self.stream.context().cu_ctx()) }.unwrap();
    }

    /// Returns the handle of the lane's other stream, once both streams are idle. `flags` make a new stream blocking or not.
    fn lend(&mut self, flags: u32) -> CUstream {
        self.settle(false);
        self.enter();
        // SAFETY: a live stream.
        unsafe { sys::cuStreamSynchronize(self.stream.cu_stream()) }.result().unwrap();
        *self.lent.get_or_insert_with(|| {
            let mut stream = ptr::null_mut();
            // SAFETY: a place for the stream, in the context that is current.
            unsafe { sys::cuStreamCreate(&raw mut stream, flags) }.result().unwrap();
            stream
        })
    }

    /// Waits for the stream that is known only by its handle, because its copies are not ordered with the other stream.
    /// Destroys it if `is_over`.
    fn settle(&mut self, is_over: bool) {
        let Some(stream) = self.lent else { return };
        self.enter();
        // SAFETY: created by `lend`, and not destroyed yet.
        unsafe { sys::cuStreamSynchronize(stream) }.result().unwrap();
        if is_over {
            self.lent = None;
            // SAFETY: as above, and not used again.
            unsafe { sys::cuStreamDestroy_v2(stream) }.result().unwrap();
        }
    }

    fn check(&self, what: &str) {
        if let Some(stream) = self.lent {
            self.enter();
            // SAFETY: created by `lend`, and not destroyed yet.
            unsafe { sys::cuStreamSynchronize(stream) }.result().unwrap();
        }
        // Clears the errors of refused calls that cudarc keeps.
        let _of_earlier_calls = self.stream.context().check_err();
        let Some((byte, len)) = self.expected else { return };
        ARRIVED.with_borrow_mut(|arrived| {
            arrived.resize(LARGEST, 0);
            let arrived = &mut arrived[..len];
            self.stream.memcpy_dtoh(&self.memory.slice(..len), arrived).unwrap();
            assert!(is_all(arrived, byte), "{what}: wrong bytes on the device, expected {byte}, found {}", arrived[0]);
        });
    }

    /// A copy that the pool does not see, on the stream of this lane or the one by its handle.
    fn copy_untracked(&mut self, buf: &PinnedBuf, stream: CUstream) -> bool {
        self.enter();
        // SAFETY: both have this length; the caller records the stream, or keeps the buffer out of use.
        unsafe { sys::cuMemcpyHtoDAsync_v2(self.address, buf.as_ptr().cast(), buf.len(), stream) }.result().is_ok()
    }
}

/// Runs `run` while work runs on a stream. The work ends after a while in any case, as on a device. Otherwise a release that
/// waits for the work, and copies that wait for the release, would hang.
fn with_other_work<R>(driver: &MockDriver, stream: CUstream, run: impl FnOnce() -> R) -> R {
    let gate = driver.hold(stream);
    let (running, ends) = mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            let _ended = ends.recv_timeout(WORK);
            drop(gate);
        });
        let result = run();
        drop(running);
        result
    })
}

/// Returns whether all bytes equal `byte`. Compares the slice with itself, shifted by one byte.
fn is_all(bytes: &[u8], byte: u8) -> bool {
    bytes.is_empty() || bytes[0] == byte && bytes[1..] == bytes[..bytes.len() - 1]
}

fn filled(pool: &Pool, len: usize, byte: u8) -> Option<PinnedBuf> {
    let mut buf = pool.get(len).ok()?;
    buf.wait_slice_mut().unwrap().fill(byte);
    Some(buf)
}

struct Run<'a> {
    driver: &'a MockDriver,
    draw: Draw,
    backend: Backend,
    _events: Option<EventsOnly>,
    devices: usize,
    max_bytes: u64,
    pool: Pool,
    contexts: Vec<Arc<CudaContext>>,
    lanes: Vec<Lane>,
    held: Vec<(PinnedBuf, u8)>,
    byte: u8,
    /// Whether the driver refuses a call that gives devices access to memory of this pool.
    is_access_refused: bool,
}

impl<'a> Run<'a> {
    fn new(driver: &'a MockDriver, seed: u64) -> Self {
        driver.reset();
        driver.set_sparse(true);
        let mut draw = Draw::of(seed);
        let switches: Vec<_> = Deviation::ALL.iter().copied().filter(|_| draw.once_in(2)).collect();
        driver.set_deviations(&switches);
        let devices = draw.pick(&[1, 2]);
        driver.set_device_count(devices);
        let backend = draw.pick(&["auto", "auto", "register", "cuda"]);
        let backend = match backend {
            "register" if !switches.contains(&Deviation::NoRegistering) => Backend::Register,
            "cuda" => Backend::Cuda,
            _ => Backend::Auto,
        };
        let _events = draw.pick(&[true, false]).then(EventsOnly::begin);
        let max_bytes = draw.pick(&[6, 8, 16]) << 20;
        let contexts = contexts(devices);
        let pool = pool_of(&backend, max_bytes);
        let lanes = lanes(&contexts);
        let (held, byte, is_access_refused) = Default::default();
        Self {
            driver,
            draw,
            backend,
            _events,
            devices,
            max_bytes,
            pool,
            contexts,
            lanes,
            held,
            byte,
            is_access_refused,
        }
    }

    fn next_byte(&mut self) -> u8 {
        self.byte = self.byte % 250 + 1;
        self.byte
    }

    fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.draw.below(len as u64)).unwrap()
    }

    fn take(&mut self) -> Option<(PinnedBuf, u8)> {
        if self.held.is_empty() {
            return None;
        }
        let index = self.index(self.held.len());
        let (buf, byte) = self.held.swap_remove(index);
        assert!(is_all(buf.wait_slice().unwrap(), byte), "a buffer that is held was written to");
        Some((buf, byte))
    }

    fn step(&mut self) {
        match self.draw.weighted(&[30, 20, 12, 4, 4, 6, 3, 3, 6, 2]) {
            0 if self.held.len() < MOST_HELD => {
                let (len, byte) = (self.draw.pick(&LENGTHS), self.next_byte());
                self.held.extend(filled(&self.pool, len, byte).map(|buf| (buf, byte)));
            }
            1 => self.copy(),
            2 => self.copy_of_others(),
            3 => self.capture(),
            4 => drop(self.take()),
            5 => self.pool.maintain(),
            6 => self.pool.trim(self.draw.below(self.max_bytes)),
            7 => {
                let lane = self.index(self.lanes.len());
                let by_handle = self.draw.once_in(2);
                let stream = self.stream_of(lane, by_handle);
                with_other_work(self.driver, stream, || {
                    self.copy_either_way(lane, by_handle, stream);
                    self.pool.maintain();
                    self.pool.trim(self.draw.below(self.max_bytes));
                    let byte = self.next_byte();
                    drop(filled(&self.pool, 4096, byte));
                });
            }
            8 => {
                let (nth, call) = (self.draw.between(1, 3), self.draw.pick(&REFUSED));
                self.is_access_refused |= call == "cuMemSetAccess";
                self.driver.fail(call, nth, self.draw.pick(&CODES));
            }
            9 => self.reset(),
            _ => {}
        }
    }

    fn copy(&mut self) {
        let lane = self.index(self.lanes.len());
        self.stream_of(lane, false);
        self.copy_on(lane);
    }

    /// A stream for copies to the lane's memory, while the other stream is idle. A stream that was lent by its handle may be
    /// destroyed.
    fn stream_of(&mut self, lane: usize, by_handle: bool) -> CUstream {
        let (is_over, flags) = (self.draw.once_in(2), self.draw.pick(&[0, 1]));
        let lane = &mut self.lanes[lane];
        lane.settle(is_over);
        if by_handle { lane.lend(flags) } else { lane.stream.cu_stream() }
    }

    /// Copies through cudarc, or on `stream` by its handle.
    fn copy_either_way(&mut self, lane: usize, by_handle: bool, stream: CUstream) {
        if by_handle { self.copy_of_others_on(lane, stream) } else { self.copy_on(lane) }
    }

    fn copy_on(&mut self, lane: usize) {
        let Some((buf, byte)) = self.take() else { return };
        let (lane, len) = (&mut self.lanes[lane], buf.len());
        lane.expected = buf.copy_to(&lane.stream, &mut lane.memory).is_ok().then_some((byte, len));
    }

    /// Returns whether untracked copies may read the buffer on the device of this lane. If the driver refused access for the
    /// GPU, the pool logs a warning, and a copy would end the context.
    fn reaches(&self, lane: usize, buf: &PinnedBuf) -> bool {
        !self.is_access_refused || buf.device_ptr(self.lanes[lane].stream.context()).is_ok()
    }

    /// A copy that the pool learns of only through the handle of its stream.
    fn copy_of_others(&mut self) {
        let (lane, by_handle) = (self.index(self.lanes.len()), self.draw.once_in(2));
        let stream = self.stream_of(lane, by_handle);
        self.copy_of_others_on(lane, stream);
    }

    fn copy_of_others_on(&mut self, lane: usize, stream: CUstream) {
        let Some((mut buf, byte)) = self.take() else { return };
        if !self.reaches(lane, &buf) {
            return;
        }
        let lane = &mut self.lanes[lane];
        lane.expected = lane.copy_untracked(&buf, stream).then_some((byte, buf.len()));
        // The buffer is dropped even if the driver refuses a fence.
        // SAFETY: a live stream.
        let _lost = unsafe { buf.unstable_record_stream(stream.cast()) };
    }

    /// A captured copy reads its memory at each launch, so that memory is never reused.
    fn capture(&mut self) {
        let Some((mut buf, _)) = self.take() else { return };
        let (lane, by_handle) = (self.index(self.lanes.len()), self.draw.once_in(2));
        if !self.reaches(lane, &buf) {
            return;
        }
        let stream = self.stream_of(lane, by_handle);
        let lane = &mut self.lanes[lane];
        let _of_earlier_calls = lane.stream.context().check_err();
        lane.enter();
        // SAFETY: a live stream. Its capture ends below.
        unsafe { result::stream::begin_capture(stream, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED) }.unwrap();
        lane.copy_untracked(&buf, stream);
        let address = buf.as_ptr();
        // SAFETY: a live stream.
        assert!(unsafe { buf.unstable_record_stream(stream.cast()) }.is_err());
        drop(buf);
        let again: Vec<_> = (0..4).filter_map(|_| self.pool.get(4096).ok()).collect();
        assert!(again.iter().all(|other| other.as_ptr() != address), "memory of a graph is handed out");
        let mut flags = 0;
        // SAFETY: a live stream, and space for its flags.
        unsafe { sys::cuStreamGetFlags(stream, &raw mut flags) }.result().unwrap();
        // SAFETY: a live stream that captures.
        match unsafe { result::stream::end_capture(stream) } {
            // SAFETY: just made, never launched.
            Ok(graph) => unsafe { result::graph::destroy(graph) }.unwrap(),
            // The maintenance thread asked the default stream just as the capture began.
            Err(why) => assert_eq!((why.0, flags), (CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, 0)),
        }
    }

    fn check(&self, what: &str) {
        self.lanes.iter().for_each(|lane| lane.check(what));
        for (buf, byte) in &self.held {
            assert!(is_all(buf.wait_slice().unwrap(), *byte), "{what}: wrong bytes in a buffer");
        }
        valid_stats(&self.pool);
    }

    /// Resets all devices while the pool is in use. The pool ends, and a new pool replaces it.
    fn reset(&mut self) {
        self.driver.reset_scripts();
        self.check("before a reset");
        let (lane, by_handle) = (self.index(self.lanes.len()), self.draw.once_in(2));
        let stream = self.stream_of(lane, by_handle);
        with_other_work(self.driver, stream, || {
            self.copy_either_way(lane, by_handle, stream);
            for device in 0..self.devices {
                // SAFETY: the streams and memory of the old contexts are not used again.
                unsafe { sys::cuDevicePrimaryCtxReset_v2(i32::try_from(device).unwrap()) }.result().unwrap();
            }
        });
        std::mem::forget((std::mem::take(&mut self.lanes), std::mem::take(&mut self.contexts)));
        self.contexts = contexts(self.devices);
        self.pool.maintain();
        let held = usize::try_from(self.pool.stats().memory.held_bytes).unwrap();
        // A pool that had pinned nothing continues with the new context.
        assert!(held == 0 || self.pool.get(held + LARGEST).is_err(), "memory of two contexts in one pool");
        self.held.clear();
        self.pool = pool_of(&self.backend, self.max_bytes);
        self.is_access_refused = false;
        self.lanes = lanes(&self.contexts);
    }
}

fn contexts(devices: usize) -> Vec<Arc<CudaContext>> {
    (0..devices).map(|ordinal| CudaContext::new(ordinal).unwrap()).collect()
}

fn lanes(contexts: &[Arc<CudaContext>]) -> Vec<Lane> {
    contexts.iter().flat_map(|context| [Lane::new(context), Lane::new(context)]).collect()
}

fn pool_of(backend: &Backend, max_bytes: u64) -> Pool {
    let builder = builder(backend.clone()).max_bytes(max_bytes).wait(std::time::Duration::ZERO);
    builder.unstable_settings(|only| only.copies_wait = Some(std::time::Duration::from_millis(10))).build().unwrap()
}

#[test]
#[allow(clippy::print_stdout)] // The mock driver may end the process, so the seed is printed first.
fn every_seed_runs_without_wrong_bytes_hangs_or_driver_misuse() {
    alone(|| {
        let (first, count) = (number_from("DRIVER_FIRST", 0), number_from("DRIVER_SEEDS", SEEDS));
        let driver = MockDriver::load();
        let mut steps = 0;
        for seed in first..first + count {
            println!("seed {seed}");
            let mut run = Run::new(&driver, seed);
            for _ in 0..STEPS {
                run.step();
                steps += 1;
            }
            driver.reset_scripts();
            run.check("at the end");
            drop(run);
            assert!(driver.wrong_uses().is_empty(), "seed {seed}: {:?}", driver.wrong_uses());
        }
        println!("{count} seeds, {steps} steps");
    });
}
