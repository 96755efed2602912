//! A word per stream that the stream itself counts up, so that any thread learns completion by a load.
//!
//! ```text
//!   stream:  ──copy──[word = 17]──copy──[word = 18]──▶        page of words, one cache line each, pinned, never freed
//!   fence 18 is over once the word has reached 18
//! ```
//!
//! The write costs the enqueuing thread more than the record of an event, the question nothing; many threads that ask
//! events of the driver stand in each other's way there. So the timeline is for pools in which many threads ask
//! ([`FenceKind`](crate::config::FenceKind)).
//!
//! Needs `cuStreamWriteValue32_v2`, which cudarc binds only in some versions: it is found by name. Where it is missing or
//! the driver does not support it, and where a stream has no [id](super::stream_id::id), events are used instead.
//!
//! Invariants:
//!
//! 1. A word is written by one stream only, in the order of its numbers. One stream: it goes by its id, for its handle may
//!    already be another's while its own copies still run. In order: a number is taken and its write enqueued under one
//!    lock, and no number is taken twice, not even if its write failed.
//! 2. Words live as long as the process, as their context does (home H1), so a fence may look at any time.
//! 3. A word that stands still says nothing about a lost device, so a fence that is not over asks the driver now and then
//!    whether the device is well, by a stream of our own on which nothing ever runs: one thread in each
//!    [`HEALTH_EVERY_US`].
#![allow(unsafe_code)] // Calls the driver, and reads memory that a device writes.

use std::collections::HashMap;
use std::ffi::c_uint;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaStream, DriverError, result, sys};

use super::context::Home;
use super::said;
use super::sequence::{FIRST, Sequence};
use super::stream_id::number;
use crate::driver::{self, RelaxedCapture};
use crate::error::{Error, Result};
use crate::in_flight::{Fence, StreamId};
use crate::sync::plain::Mutex;
use crate::sync::process::{AtomicU64, Ordering};

/// Between two questions whether the device is well.
const HEALTH_EVERY_US: u64 = 1000;
const WORDS_BYTES: usize = 4096;
/// A word has a line to itself, so that no stream disturbs another's readers.
const WORD_STEP: usize = 64;
/// A waiter looks so often before it lets others run, and so often in all before it sleeps.
const SPINS: u32 = 100;
const YIELDS: u32 = 200;
const LONGEST_SLEEP: Duration = Duration::from_micros(200);

/// As in the driver's header; `CUstream` and `CUdeviceptr` are the same in every version.
type WriteValue32 = unsafe extern "C" fn(sys::CUstream, u64, u32, c_uint) -> sys::CUresult;

/// The timelines of one context.
#[derive(Debug, Default)]
pub(super) struct Timelines {
    write: OnceLock<Option<WriteValue32>>,
    by_stream: Mutex<HashMap<StreamId, Arc<Timeline>>>,
    words: Mutex<Vec<Word>>,
    health: Health,
}

/// When the device was last asked how it is.
#[derive(Debug, Default)]
struct Health {
    since: OnceLock<Instant>,
    asked_us: AtomicU64,
}

/// Where a stream writes, as the host and as the device see it.
#[derive(Clone, Copy)]
struct Word {
    host: *mut u32,
    device: u64,
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.device)
    }
}

// SAFETY: four bytes that live for ever (2) and are only ever accessed atomically.
unsafe impl Send for Word {}
// SAFETY: as above.
unsafe impl Sync for Word {}

impl Word {
    fn read(self) -> u32 {
        // SAFETY: aligned memory that lives for ever (2).
        let word = unsafe { std::sync::atomic::AtomicU32::from_ptr(self.host) };
        // Acquire: pairs with the device's write, which comes after all that the stream did before.
        word.load(Ordering::Acquire)
    }
}

/// How far one stream has come.
#[derive(Debug)]
struct Timeline {
    stream: u64,
    word: Word,
    sequence: Sequence,
    /// The last number whose write was enqueued.
    last: Mutex<u64>,
}

impl Home {
    /// Puts a number behind all work so far on the stream, which has this id; `None` if an event has to do it. The context
    /// is current.
    pub(super) fn count(&'static self, stream: &CudaStream, id: StreamId) -> Result<Option<Reached>, DriverError> {
        let Some(write) = self.timelines.write() else { return Ok(None) };
        // There to be asked (3) before anybody has to wait.
        self.own()?;
        let Some(timeline) = self.timelines.of(stream, id)? else { return Ok(None) };
        let mut last = timeline.last.lock();
        let Some(next) = timeline.sequence.next(*last, || timeline.word.read()) else { return Ok(None) };
        #[allow(clippy::cast_possible_truncation)] // The low half is what the stream writes.
        // SAFETY: a live stream, and a word that lives for ever (2). The default flags order the write behind all work
        // before it.
        let written = unsafe { write(stream.cu_stream(), timeline.word.device, next as u32, 0) };
        let written = written.result();
        if let Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED)) = written {
            // Nothing was enqueued.
            return Ok(None);
        }
        // After any other error the write may be on its way: nobody else gets its number.
        *last = next;
        drop(last);
        written.map(|()| Some(Reached { timeline, number: next, home: self }))
    }

    /// Fails if the device does. Asks the driver now and then (3).
    fn check_health(&self) -> Result<()> {
        let Some(own) = self.timelines.health.is_due().then(|| self.own().ok()).flatten() else { return Ok(()) };
        let _relaxed = RelaxedCapture::enter();
        // SAFETY: the stream is never destroyed.
        match unsafe { sys::cuStreamQuery(own.stream.cu_stream()) }.result() {
            Ok(()) | Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(()),
            Err(error) => Err(Error::device(said("cuStreamQuery", error))),
        }
    }
}

impl Health {
    /// Is it this caller's turn to ask?
    fn is_due(&self) -> bool {
        let now_us = u64::try_from(self.since.get_or_init(Instant::now).elapsed().as_micros()).unwrap_or(u64::MAX);
        // Relaxed: only one of many may ask; nothing is published by it.
        let asked_us = self.asked_us.load(Ordering::Relaxed);
        now_us >= asked_us.saturating_add(HEALTH_EVERY_US)
            && self.asked_us.compare_exchange(asked_us, now_us, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl Timelines {
    fn write(&self) -> Option<WriteValue32> {
        *self.write.get_or_init(|| {
            let found = driver::symbol(c"cuStreamWriteValue32_v2")?;
            // SAFETY: the driver's function of this name has this type.
            Some(unsafe { std::mem::transmute::<std::ptr::NonNull<std::ffi::c_void>, WriteValue32>(found) })
        })
    }

    /// The timeline of a stream; `None` where there is no memory for one.
    fn of(&self, stream: &CudaStream, id: StreamId) -> Result<Option<Arc<Timeline>>, DriverError> {
        let mut by_stream = self.by_stream.lock();
        if let Some(timeline) = by_stream.get(&id) {
            return Ok(Some(timeline.clone()));
        }
        let Some(word) = self.take_word(&mut by_stream)? else { return Ok(None) };
        // What the word's last stream counted to goes on here: by then it had written all of its numbers.
        let seen = (FIRST & !u64::from(u32::MAX)) | u64::from(word.read());
        let (stream, sequence, last) = (number(stream), Sequence::new(seen), Mutex::new(seen));
        let timeline = Arc::new(Timeline { stream, word, sequence, last });
        by_stream.insert(id, timeline.clone());
        Ok(Some(timeline))
    }

    /// A free word: one left over, one of a stream at rest, or the first of a new page.
    fn take_word(&self, by_stream: &mut HashMap<StreamId, Arc<Timeline>>) -> Result<Option<Word>, DriverError> {
        let mut words = self.words.lock();
        if words.is_empty() {
            by_stream.retain(|_, timeline| {
                // Nobody is enqueuing on it (he would hold a reference, taken under the lock that we hold), no fence is
                // open, and all is written: the word is free.
                let is_at_rest = Arc::strong_count(timeline) == 1
                    && timeline.sequence.look(|| timeline.word.read()) == *timeline.last.lock();
                if is_at_rest {
                    words.push(timeline.word);
                }
                !is_at_rest
            });
        }
        if words.is_empty() {
            words.extend(page_of_words()?);
        }
        Ok(words.pop())
    }
}

/// Page-locked and mapped, for the life of the process.
fn page_of_words() -> Result<Vec<Word>, DriverError> {
    let _relaxed = RelaxedCapture::enter();
    let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
    // SAFETY: the stream's context is current (`Home::count`).
    let page = unsafe { result::malloc_host(WORDS_BYTES + WORD_STEP, flags) }?;
    let mut device = 0;
    // SAFETY: room for an address, and memory that was just allocated.
    unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut device, page, 0) }.result()?;
    // The driver aligns large blocks only.
    let skip = page.cast::<u8>().align_offset(WORD_STEP);
    let words = (0..WORDS_BYTES).step_by(WORD_STEP).map(|offset| {
        let offset = skip + offset;
        let host = page.cast::<u8>().wrapping_add(offset).cast::<u32>();
        #[allow(clippy::cast_possible_truncation)] // The low half is meant.
        // SAFETY: inside the page, aligned, and nobody else's yet.
        unsafe {
            host.write(FIRST as u32)
        };
        Word { host, device: device + offset as u64 }
    });
    Ok(words.collect())
}

/// A number that a stream writes behind some work.
pub(super) struct Reached {
    timeline: Arc<Timeline>,
    number: u64,
    home: &'static Home,
}

impl fmt::Debug for Reached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reached({} on {:#x})", self.number, self.timeline.stream)
    }
}

// SAFETY: the stream writes the number behind the work, and the word only grows (1), also through its wraps (`sequence`).
unsafe impl Fence for Reached {
    fn is_done(&self) -> Result<bool> {
        let Timeline { sequence, word, .. } = &*self.timeline;
        if sequence.seen() >= self.number || sequence.look(|| word.read()) >= self.number {
            return Ok(true);
        }
        self.home.check_health().map(|()| false)
    }

    fn wait(&self) -> Result<()> {
        let mut pause = Duration::from_micros(10);
        for round in 0_u32.. {
            if self.is_done()? {
                break;
            }
            match round {
                0..SPINS => std::hint::spin_loop(),
                SPINS..YIELDS => thread::yield_now(),
                _ => {
                    thread::sleep(pause);
                    pause = (pause * 2).min(LONGEST_SLEEP);
                }
            }
        }
        Ok(())
    }

    fn stream(&self) -> u64 {
        self.timeline.stream
    }
}
