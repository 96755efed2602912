//! Timelines: each stream writes increasing numbers to a word of host memory (`cuStreamWriteValue32`), as with a Vulkan timeline
//! semaphore. Any thread detects completion by a load.
//!
//! ```text
//!   stream:  ──copy──[word = 17]──copy──[word = 18]──▶        page of words, one cache line each, pinned, never freed
//!   fence 18 is complete once the word has reached 18
//! ```
//!
//! One load covers all earlier copies of the stream. The words serve all pools of the process. Events are used instead for
//! cudarc's own copies, for a stream without an [id](super::stream::id_number), and if the driver lacks or refuses
//! `cuStreamWriteValue32_v2`.
//!
//! Invariants:
//!
//! - **timeline-I1**: a word is written by one stream at a time, in increasing order. Another stream may use the word only when
//!   all numbers are written, and continues from there, so a fence of the earlier stream stays complete. Streams are identified
//!   by id, which is unique for the life of the process, because a handle may name another stream while the copies of the first
//!   still run. A number is taken and its write enqueued under one lock, and no number is taken twice, even if its write failed.
//! - **timeline-I2**: words live as long as the process, as the state of their context does (context-I1), so a fence may read its
//!   word at any time.
//! - **timeline-I3**: an unchanged word does not show that a device was lost. So a pending fence also queries a stream on which
//!   no work ever runs, at most once per [`HEALTH_EVERY_US`].
//! - **timeline-I4**: numbers have 64 bits and never wrap; the stream writes the low half. A reading is extended to 64 bits
//!   relative to the last number seen. It exceeds that number by less than 2^31, because [`Sequence::next`] returns no larger
//!   number. A reading that seems to exceed it by more is an old value, and is ignored.
#![allow(unsafe_code)] // Calls the driver, and reads memory that a device writes.

use std::collections::BTreeMap;
use std::thread;
use std::time::Duration;

use cudarc::driver::sys;

use super::context_fence::ContextWaits;
use crate::backend;
use crate::driver::code::{Code, FailedCall};
use crate::driver::{self, RelaxedCapture, calls, watchdog};
use crate::error::Result;
use crate::in_flight::{Fence, StreamId};
use pinpool_os::clock::monotonic_ns;
use pinpool_os::fork::PerProcess;
use pinpool_os::sync::unmodeled::{AtomicBool, AtomicU32, AtomicU64, Mutex, Ordering};

/// Time between two health queries of a device.
const HEALTH_EVERY_US: u64 = 1000;
const WORDS_BYTES: usize = 4096;
/// Each word has its own cache line, to avoid false sharing.
const WORD_STEP: usize = 64;
/// Reads before a waiter yields.
const SPINS: u32 = 100;
/// Reads before it sleeps.
const YIELDS: u32 = 200;
const SLEEP_MAX: Duration = Duration::from_micros(200);
/// The last number assigned exceeds the last number seen by less than this.
const SEQUENCE_WINDOW: u64 = 1 << 31;
/// The id of a free word. No stream has it, because drivers number streams from small numbers.
const NO_STREAM: u64 = u64::MAX;
/// The initial number. It is shortly before the first wrap of the low half, so that 64 copies of a stream pass one.
const FIRST_NUMBER: u64 = (1 << 32) - 64;

/// Bytes that this process has pinned for timelines.
static HELD_BYTES: AtomicU64 = AtomicU64::new(0);

/// Returns the bytes that the timelines of this process have pinned. They belong to contexts, for the life of the process, and to
/// no pool, because each page serves the streams of all pools.
pub(crate) fn held_bytes() -> u64 {
    // Relaxed: a statistic.
    HELD_BYTES.load(Ordering::Relaxed)
}

/// If false, copies record events, as with a driver that writes no words: for tests and benches.
static IS_ENABLED: AtomicBool = AtomicBool::new(true);

pub(crate) fn set_enabled(is_enabled: bool) {
    IS_ENABLED.store(is_enabled, Ordering::Relaxed);
}

/// The timelines in use in this process, by the numbers of their streams' ids.
static TIMELINES: PerProcess<Mutex<BTreeMap<u64, &'static Timeline>>> = PerProcess::new(Mutex::default);

/// The words of one context.
#[derive(Debug, Default)]
pub(super) struct TimelinePages {
    /// Whether the driver refused a page for words, or writes no words. It is then not called again for each copy.
    is_refused: AtomicBool,
    /// Timelines without a stream. Locked by the thread that creates a page.
    free: Mutex<Vec<&'static Timeline>>,
    health: DeviceHealth,
}

/// The time and the result of the last health query.
#[derive(Debug, Default)]
struct DeviceHealth {
    queried_us: AtomicU64,
    /// The code of a permanent failure, or 0.
    failure: AtomicU32,
}

/// A word and the progress of the stream that uses it. Never freed. When the stream has written all of its numbers, another
/// stream may continue from there. A fence needs no reference count, because its number stays reached.
#[derive(Debug)]
#[repr(align(64))] // Avoids false sharing between streams.
pub(super) struct Timeline {
    /// The word that the stream writes (timeline-I2), and its device address.
    word: &'static AtomicU32,
    address: u64,
    sequence: Sequence,
    /// The number of the stream's id, or [`NO_STREAM`]. Cleared under the lock of `last`.
    id: AtomicU64,
    /// The last number enqueued for writing.
    last: Mutex<u64>,
    pages: &'static TimelinePages,
    context: &'static ContextWaits,
}

impl Timeline {
    fn read(&self) -> u32 {
        // Acquire: pairs with the device's write, which follows all earlier work of the stream.
        self.word.load(Ordering::Acquire)
    }

    /// Returns the timeline of the stream with this id, if it has one.
    pub(super) fn find(id: u64) -> Option<&'static Self> {
        // Relaxed: a switch that guards no memory.
        if !IS_ENABLED.load(Ordering::Relaxed) {
            return None;
        }
        TIMELINES.get().lock().get(&id).copied()
    }

    /// Enqueues a write of the next number after all work so far on the stream, which has this id, and returns its fence. Returns
    /// `None` if another stream has the word now, too many numbers are pending, or the driver refuses.
    pub(super) fn write(&'static self, id: u64, stream: sys::CUstream) -> Option<TimelineFence> {
        let mut last = self.last.lock();
        // The word may now belong to another stream.
        if self.id.load(Ordering::Relaxed) != id {
            return None;
        }
        let next = self.sequence.next(*last, || self.read())?;
        #[allow(clippy::cast_possible_truncation)] // The low half is what the stream writes.
        // SAFETY: a live stream, and a word that is never freed (timeline-I2). The default flags order the write after all
        // work before it.
        let written = unsafe { calls::stream_write_value(stream, self.address, next as u32, 0) };
        // Even if the driver refuses, the write may be enqueued, so its number is not taken again (timeline-I1).
        *last = next;
        drop(last);
        if written.is_err_and(|failed| failed.code == Code::NOT_SUPPORTED) {
            // Later copies record events without another attempt.
            self.pages.is_refused.store(true, Ordering::Relaxed);
            TIMELINES.get().lock().remove(&id);
        }
        written.ok()?;
        Some(TimelineFence { timeline: self, number: next, stream_id: self.context.stream_id(id) })
    }

    /// Takes the word from its stream if the stream has written all of its numbers. Returns whether it did.
    fn free_if_at_rest(&self) -> bool {
        // A thread that holds the lock is enqueueing a write, so the stream has not written all of its numbers.
        let Some(last) = self.last.try_lock() else { return false };
        let is_at_rest = self.sequence.update(|| self.read()) == *last;
        if is_at_rest {
            self.id.store(NO_STREAM, Ordering::Relaxed);
        }
        is_at_rest
    }
}

impl TimelinePages {
    /// Returns the timeline of the stream with this id, which must belong to the context of these words. Creates the timeline if
    /// necessary. Returns `None` if there is no memory for a timeline, or if the driver writes no words. The context must be
    /// current.
    pub(super) fn timeline(&'static self, id: StreamId, context: &'static ContextWaits) -> Option<&'static Timeline> {
        let is_own = |timeline: &&Timeline| std::ptr::eq(timeline.pages, self);
        if let Some(known) = Timeline::find(id.number()) {
            return Some(known).filter(is_own);
        }
        // Relaxed: both are hints.
        let is_off = self.is_refused.load(Ordering::Relaxed) || !IS_ENABLED.load(Ordering::Relaxed);
        if is_off || driver::symbol(c"cuStreamWriteValue32_v2").is_none() {
            return None;
        }
        // The stream is created before any thread waits, since waiters query it (timeline-I3).
        context.idle_stream().ok()?;
        let free = self.take_free(context)?;
        let mut timelines = TIMELINES.get().lock();
        let timeline = *timelines.entry(id.number()).or_insert(free);
        if std::ptr::eq(timeline, free) {
            free.id.store(id.number(), Ordering::Relaxed);
        } else {
            // Another thread has added a timeline for this stream first.
            drop(timelines);
            self.free.lock().push(free);
        }
        Some(timeline).filter(is_own)
    }

    /// Returns a timeline without a stream: a spare timeline, the timeline of a stream that has written all of its numbers, or a
    /// timeline on a new page.
    fn take_free(&'static self, context: &'static ContextWaits) -> Option<&'static Timeline> {
        let mut free = self.free.lock();
        if free.is_empty() {
            TIMELINES.get().lock().retain(|_, timeline| {
                let is_free = std::ptr::eq(timeline.pages, self) && timeline.free_if_at_rest();
                free.extend(is_free.then_some(*timeline));
                !is_free
            });
        }
        // Relaxed, here and below: the lock orders the accesses.
        if free.is_empty() && !self.is_refused.load(Ordering::Relaxed) {
            let made = self.new_page(context);
            self.is_refused.store(made.is_none(), Ordering::Relaxed);
            free.extend(made?);
        }
        free.pop()
    }

    /// Creates timelines over a page of pinned and mapped memory, which is never freed. The memory belongs to this process and
    /// not to the driver, so a fence may read its word even after a device reset has ended the registration. A refused page stays
    /// mapped: there is at most one in each context.
    fn new_page(&'static self, context: &'static ContextWaits) -> Option<Vec<&'static Timeline>> {
        let _relaxed = RelaxedCapture::enter();
        let page = backend::page_of_this_process(WORDS_BYTES)?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: a page of this process that is never unmapped; the stream's context is current (`TimelinePages::timeline`).
        unsafe { calls::host_register(page, WORDS_BYTES, flags) }.ok()?;
        // Relaxed: a statistic.
        HELD_BYTES.fetch_add(WORDS_BYTES as u64, Ordering::Relaxed);
        let device = calls::host_device_pointer(page, 0).ok()?;
        let timelines = (0..WORDS_BYTES).step_by(WORD_STEP).map(|offset| {
            let word = page.cast::<u8>().wrapping_add(offset).cast::<u32>();
            // SAFETY: inside the page, aligned, and never freed (timeline-I2).
            let word = unsafe { AtomicU32::from_ptr(word) };
            #[allow(clippy::cast_possible_truncation)] // The low half is meant.
            word.store(FIRST_NUMBER as u32, Ordering::Relaxed);
            &*Box::leak(Box::new(Timeline {
                word,
                address: device + offset as u64,
                sequence: Sequence::new(FIRST_NUMBER),
                id: AtomicU64::new(NO_STREAM),
                last: Mutex::new(FIRST_NUMBER),
                pages: self,
                context,
            }))
        });
        Some(timelines.collect())
    }
}

impl DeviceHealth {
    /// Queries the device if a query is due, and returns the answer. Otherwise, or if the driver is stuck in a query of another
    /// thread, fails if the last query found a permanent failure (timeline-I3).
    fn check(&self, context: &ContextWaits) -> Result<(), FailedCall> {
        // Relaxed, here and below: the exchange only elects one caller, and the code comes with no other data.
        let (now_us, queried_us) = (monotonic_ns() / 1000, self.queried_us.load(Ordering::Relaxed));
        let due = now_us >= queried_us.saturating_add(HEALTH_EVERY_US);
        let elect = || self.queried_us.compare_exchange(queried_us, now_us, Ordering::Relaxed, Ordering::Relaxed);
        let answer = if due && elect().is_ok() { watchdog::query(|| Self::query(context)) } else { None };
        let Some(answer) = answer else {
            let last = Code::check(self.failure.load(Ordering::Relaxed).cast_signed());
            return last.map_err(|code| FailedCall { call: "cuStreamQuery", code });
        };
        let failed = answer.err().filter(|failed| failed.code.is_permanent());
        self.failure.store(failed.map_or(0, |FailedCall { code, .. }| code.0.cast_unsigned()), Ordering::Relaxed);
        answer
    }

    fn query(context: &ContextWaits) -> Result<(), FailedCall> {
        let idle_stream = context.idle_stream()?;
        // SAFETY: the stream is destroyed only with its context, which still exists (context-I2).
        match context.query(|| unsafe { calls::stream_query(idle_stream.0) }) {
            // A refusal during a capture says nothing about the device.
            Err(failed) if !failed.code.can_succeed_after_capture() => Err(failed),
            _ => Ok(()),
        }
    }
}

/// A number that a stream writes after some work.
#[derive(Debug)]
pub(super) struct TimelineFence {
    timeline: &'static Timeline,
    number: u64,
    /// The stream that writes the number. The word may belong to another stream later.
    stream_id: StreamId,
}

impl TimelineFence {
    fn is_reached(&self) -> bool {
        let sequence = &self.timeline.sequence;
        sequence.seen() >= self.number || sequence.update(|| self.timeline.read()) >= self.number
    }
}

// SAFETY: the stream writes the number after the work, and the word only grows (timeline-I1), even when its low half
// wraps (timeline-I4).
unsafe impl Fence for TimelineFence {
    fn is_complete(&self) -> Result<bool> {
        if self.is_reached() {
            return Ok(true);
        }
        self.timeline.pages.health.check(self.timeline.context)?;
        Ok(false)
    }

    fn is_complete_by_load(&self) -> Option<bool> {
        Some(self.is_reached())
    }

    fn stream_id(&self) -> Option<StreamId> {
        Some(self.stream_id)
    }

    fn wait(&self) -> Result<()> {
        let mut pause = Duration::from_micros(10);
        for round in 0_u32.. {
            if self.is_complete()? {
                break;
            }
            match round {
                0..SPINS => std::hint::spin_loop(),
                SPINS..YIELDS => thread::yield_now(),
                _ => {
                    thread::sleep(pause);
                    pause = (pause * 2).min(SLEEP_MAX);
                }
            }
        }
        Ok(())
    }
}

/// The numbers of one stream, extended from the 32 bits that it writes (timeline-I4). Does arithmetic only, and calls no driver.
#[derive(Debug)]
struct Sequence {
    seen: AtomicU64,
}

impl Sequence {
    fn new(seen: u64) -> Self {
        Self { seen: AtomicU64::new(seen) }
    }

    /// Returns the last number seen, without reading the word.
    fn seen(&self) -> u64 {
        // Acquire: pairs with the release in `update`, so that this thread sees all that the thread that read the word saw.
        self.seen.load(Ordering::Acquire)
    }

    /// Reads the word and returns the number that the stream has reached. `read` is called after `seen` is loaded, so that its
    /// reading is the newer of the two. An older reading would change nothing.
    fn update(&self, read: impl FnOnce() -> u32) -> u64 {
        let seen = self.seen();
        #[allow(clippy::cast_possible_truncation)] // The low half is meant.
        let ahead = u64::from(read().wrapping_sub(seen as u32));
        if ahead >= SEQUENCE_WINDOW {
            return seen;
        }
        let now = seen + ahead;
        // AcqRel, for the reason given in `seen`. Stores the maximum, since another thread may have read the word later. This is a
        // compare-exchange, because ThreadSanitizer knows no atomic maximum.
        let newer = |before: u64| (before < now).then_some(now);
        self.seen.fetch_update(Ordering::AcqRel, Ordering::Acquire, newer).map_or_else(|later| later, |_| now)
    }

    /// Returns the number after `last`, or `None` if it would be too far ahead of the last number seen.
    fn next(&self, last: u64, read: impl FnOnce() -> u32) -> Option<u64> {
        let next = last + 1;
        (next - self.update(read) < SEQUENCE_WINDOW).then_some(next)
    }
}

#[cfg(test)]
mod all_readings;
