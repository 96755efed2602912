//! The reading threads, and the batches that they fill, in order.
//!
//! [`Loader::run`] copies the batches to a destination; [`BatchReader`] returns them to the caller.
//!
//! ```text
//!   filled batches, as threads finish them     early (kept for later)
//!         3 1 2                     ->         [1] [2] [3]
//!
//!   completed <= sent <= started <= sent + read_ahead
//!   |            |        '- batches that a thread has taken from the plan
//!   |            '- batches passed to the destination, or without anything to send
//!   '- batches with a buffer that has returned to the pool
//! ```
//!
//! - **reader-threads-I1**: batches come in the order of the plan, even if later ones are filled first.
//! - **reader-threads-I2**: when [`ReaderThreads`] ends, its threads have ended and all remaining buffers have returned to the pool.
//! - **ahead-I1**: every batch started is eventually sent and completed, unless the read-ahead was closed.
//! - **ahead-I2**: once closed, no batch is started and no thread waits.
//! - **thread-I1**: a batch is started and gets its buffer under one lock, so buffers are allocated in batch order. Batches
//!   are sent in that order, so the batch that the sender waits for already has its buffer: a pool limit slows a run down but
//!   cannot block it.
//! - **thread-I2**: a thread checks for the end of the load after each chunk, and every [`CHECK_EVERY`] while it waits for a
//!   buffer.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::task::{Context, Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pinpool_os::fork::ForkGeneration;
use pinpool_os::sync::unmodeled::{Condvar, Mutex};

use crate::batch_plan::{BatchPlan, LoadedBatch, PlannedBatch};
use crate::loader::Loader;
use crate::loader::sample_reader::{SampleReader, batch_bytes};
use crate::state::LoadState;
use crate::stop::Unpark;
use crate::summary::LoadError;
use pinpool::{Error, PinnedBuf};

/// Longest time between two checks for the end of the load.
const CHECK_EVERY: Duration = Duration::from_millis(50);

/// Limits the batches that the threads read ahead of the copies, and so the memory of a run.
#[derive(Debug)]
pub(super) struct ReadAhead {
    max_batches: u64,
    counts: Mutex<BatchCounts>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct BatchCounts {
    started: u64,
    sent: u64,
    completed: u64,
    is_closed: bool,
    /// Whether the consumer is not waiting for the next batch. It may then return the buffer of an earlier batch.
    is_consumer_busy: bool,
}

impl ReadAhead {
    fn new(max_batches: u64) -> Self {
        Self { max_batches, counts: Mutex::default(), changed: Condvar::default() }
    }

    /// Waits until one more batch may be started. Returns whether it may: `false` if the read-ahead is closed.
    fn wait_to_start(&self) -> bool {
        let mut counts = self.counts.lock();
        while !counts.is_closed && counts.started - counts.sent >= self.max_batches {
            counts = self.changed.wait(counts);
        }
        counts.started += u64::from(!counts.is_closed);
        !counts.is_closed
    }

    pub(super) fn count_sent(&self) {
        self.update(|counts| counts.sent += 1);
    }

    pub(super) fn count_completed(&self) {
        self.update(|counts| counts.completed += 1);
    }

    pub(super) fn close(&self) {
        self.update(|counts| counts.is_closed = true);
    }

    /// Sets whether the consumer is doing something other than waiting for the next batch. Initially, it counts as waiting.
    fn set_consumer_busy(&self, is_busy: bool) {
        self.update(|counts| counts.is_consumer_busy = is_busy);
    }

    fn update(&self, change: impl FnOnce(&mut BatchCounts)) {
        change(&mut self.counts.lock());
        self.changed.notify_all();
    }

    /// Waits on behalf of a thread that found no memory for its batch. The wait ends when more than `completions` batches are
    /// completed, or when no other batch is in progress and a consumer waits for this batch. Returns whether the thread
    /// should try again. It should not if the read-ahead is closed, or if the call had nothing to wait for: then no buffer
    /// will return.
    fn wait_for_completion(&self, completions: u64) -> bool {
        let mut counts = self.counts.lock();
        // The caller's own batch is started and not completed.
        let mut has_waited = false;
        while !counts.is_closed
            && counts.completed == completions
            && (counts.started > counts.completed + 1 || counts.is_consumer_busy)
        {
            counts = self.changed.wait(counts);
            has_waited = true;
        }
        !counts.is_closed && (has_waited || counts.completed > completions)
    }
}

/// Closes the read-ahead when a thread ends, even by a panic, so that other threads do not wait for its batch.
#[derive(Debug)]
struct CloseOnDrop<'a>(&'a ReadAhead);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// State shared by the threads of a run.
#[derive(Debug)]
struct SharedState {
    loader: Loader,
    ahead: ReadAhead,
    /// Locked while a batch is started and gets its buffer (thread-I1).
    batches: Mutex<BatchPlan>,
}

impl SharedState {
    /// Reads batches until the plan is done or the read-ahead is closed.
    fn work(&self, filled: &Sender<LoadedBatch>) {
        let _close = CloseOnDrop(&self.ahead);
        let mut reader = SampleReader::new(&self.loader);
        while let Some((planned, buffer)) = self.start_batch()
            && let Some(batch) = reader.load(planned, buffer)
            && filled.send(batch).is_ok()
        {}
    }

    fn start_batch(&self) -> Option<(PlannedBatch, Result<PinnedBuf, Error>)> {
        let mut batches = self.batches.lock();
        if self.loader.stop.is_raised() || !self.ahead.wait_to_start() {
            return None;
        }
        let planned = batches.next()?;
        let buffer = self.get_buffer(&planned)?;
        Some((planned, buffer))
    }

    /// Requests a buffer for the batch. At the pool limit, waits for the buffers of earlier batches. Fails if the batch does
    /// not fit although these buffers have returned, or although the consumer that holds them waits for this batch. Returns
    /// `None` if the load has ended.
    fn get_buffer(&self, planned: &PlannedBatch) -> Option<Result<PinnedBuf, Error>> {
        let len = batch_bytes(&self.loader.options.decode, planned, &self.loader.catalog);
        let mut tried_at = None;
        loop {
            let completions = self.ahead.counts.lock().completed;
            match self.get_unless_ended(len)? {
                Err(error) if error.is_limit() || error.is_backend() => {
                    // A consumer that polls is busy again, but it waited for this attempt.
                    if tried_at == Some(completions) || !self.ahead.wait_for_completion(completions) {
                        return Some(Err(error));
                    }
                    tried_at = Some(completions);
                }
                other => return Some(other),
            }
        }
    }

    /// Requests a buffer as `Pool::get` does, which may wait for a long time. Cancels the request and returns `None` if the
    /// load ends (thread-I2).
    fn get_unless_ended(&self, len: usize) -> Option<Result<PinnedBuf, Error>> {
        let mut get = pin!(self.loader.pool.get_async(len));
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        loop {
            if let Poll::Ready(buffer) = get.as_mut().poll(&mut Context::from_waker(&waker)) {
                return Some(buffer);
            }
            if self.loader.stop.is_raised() || self.ahead.counts.lock().is_closed {
                return None;
            }
            thread::park_timeout(CHECK_EVERY);
        }
    }
}

/// The batches of a load as its threads fill them.
#[derive(Debug)]
pub(super) struct ReaderThreads {
    shared: Arc<SharedState>,
    threads: Vec<JoinHandle<()>>,
    /// `None` after [`end`](Self::end).
    filled: Option<Receiver<LoadedBatch>>,
    early: BTreeMap<u64, LoadedBatch>,
    next_index: u64,
    generation: ForkGeneration,
}

impl ReaderThreads {
    /// Starts the threads. Fails if the system cannot start any.
    pub(super) fn start(loader: &Loader) -> Result<Self, LoadError> {
        let threads = loader.options.threads.get();
        let read_ahead = loader.options.read_ahead.map_or(threads.saturating_mul(2), NonZeroUsize::get);
        let (send, filled) = mpsc::channel();
        let mut reading = Self::from_channel(loader, read_ahead as u64, filled);
        for number in 0..threads {
            let (send, shared) = (send.clone(), reading.shared.clone());
            let thread = thread::Builder::new().name(format!("pinpool-read-{number}"));
            match thread.spawn(move || shared.work(&send)) {
                Ok(thread) => reading.threads.push(thread),
                Err(error) if number == 0 => return Err(LoadError::NoThread(error)),
                // Fewer threads load the same batches.
                Err(_) => break,
            }
        }
        Ok(reading)
    }

    /// Creates a `ReaderThreads` without threads, which receives its batches from a channel.
    pub(super) fn from_channel(loader: &Loader, read_ahead: u64, filled: Receiver<LoadedBatch>) -> Self {
        let shared = SharedState {
            loader: loader.clone(),
            ahead: ReadAhead::new(read_ahead),
            batches: Mutex::new(BatchPlan::new(&loader.catalog, &loader.options, &loader.start)),
        };
        Self {
            shared: Arc::new(shared),
            threads: Vec::new(),
            filled: Some(filled),
            early: BTreeMap::new(),
            next_index: loader.start.index_overall,
            generation: ForkGeneration::now(),
        }
    }

    pub(super) fn ahead(&self) -> &ReadAhead {
        &self.shared.ahead
    }

    /// Returns the next batch in order (reader-threads-I1), or `None` if there is none. `until` of `None` means forever.
    pub(super) fn next(&mut self, until: Option<Instant>) -> Result<Option<LoadedBatch>, TimedOut> {
        let Some(filled) = &self.filled else { return Ok(None) };
        loop {
            if let Some(batch) = self.early.remove(&self.next_index) {
                self.next_index += 1;
                return Ok(Some(batch));
            }
            let wait = until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()));
            match filled.recv_timeout(wait) {
                Ok(batch) => drop(self.early.insert(batch.index_overall, batch)),
                Err(RecvTimeoutError::Timeout) => return Err(TimedOut),
                // A thread that panicked has left a batch out, so the load must not end as if it were complete.
                Err(RecvTimeoutError::Disconnected) => {
                    self.threads.drain(..).try_for_each(JoinHandle::join).unwrap_or_else(|panic| resume_unwind(panic));
                    return Ok(None);
                }
            }
        }
    }

    /// Ends the threads and returns the buffers that were not taken.
    fn end(&mut self) {
        if self.generation.is_stale() {
            // A forked child does not have these threads, and their locks may be held forever.
            std::mem::forget((self.filled.take(), std::mem::take(&mut self.early), std::mem::take(&mut self.threads)));
            return;
        }
        self.ahead().close();
        // These are dropped before the threads are joined, so that no thread waits for the memory of a batch without a consumer.
        self.filled = None;
        self.early.clear();
        for thread in self.threads.drain(..) {
            // `next` propagates the panic of a thread when it misses the thread's batch.
            let _ = thread.join();
        }
    }
}

impl Drop for ReaderThreads {
    fn drop(&mut self) {
        self.end();
    }
}

/// No batch was filled in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no batch was filled in time")]
pub struct TimedOut;

/// An iterator over the batches of a load, in order. Dropping it ends the reading threads and returns their buffers to the pool.
///
/// In a forked child it yields nothing.
#[derive(Debug)]
pub struct BatchReader {
    reader_threads: ReaderThreads,
    /// The state after the last batch that was returned.
    state: LoadState,
}

impl BatchReader {
    pub(super) fn new(reader_threads: ReaderThreads, state: LoadState) -> Self {
        // Until the first call no consumer waits for a batch.
        reader_threads.ahead().set_consumer_busy(true);
        Self { reader_threads, state }
    }

    /// Returns the next batch as [`next`](Iterator::next) does.
    ///
    /// # Errors
    ///
    /// The batch was not filled within `timeout`. A later call returns it.
    pub fn next_timeout(&mut self, timeout: Duration) -> Result<Option<LoadedBatch>, TimedOut> {
        // A forked child has no threads.
        if self.reader_threads.generation.is_stale() || self.reader_threads.shared.loader.stop.is_raised() {
            self.stop();
            return Ok(None);
        }
        // With a zero timeout the consumer does not wait for this batch, so a thread without memory keeps waiting for a buffer to return.
        self.reader_threads.ahead().set_consumer_busy(timeout.is_zero());
        let next = self.reader_threads.next(Instant::now().checked_add(timeout));
        self.reader_threads.ahead().set_consumer_busy(true);
        let Some(batch) = next? else {
            self.stop();
            return Ok(None);
        };
        self.reader_threads.ahead().count_sent();
        // The consumer owns the buffer now. A thread that finds no memory waits until the consumer calls again, and then
        // makes one more attempt, which waits up to `PINPOOL_WAIT`.
        self.reader_threads.ahead().count_completed();
        (self.state.epoch, self.state.index_in_epoch, self.state.index_overall) =
            (batch.epoch, batch.index_in_epoch + 1, batch.index_overall + 1);
        Ok(Some(batch))
    }

    /// Ends the load. When this returns, the threads have ended and the batches read ahead have returned to the pool.
    pub fn stop(&mut self) {
        self.reader_threads.end();
    }

    /// Returns the state from which a later load continues: after the last batch returned. Batches read ahead do not count.
    pub fn state(&self) -> LoadState {
        self.state
    }
}

impl Iterator for BatchReader {
    type Item = LoadedBatch;

    /// Waits until the next batch in order is filled and returns it. Returns `None` at the end of the load, or once its
    /// [`StopFlag`](crate::StopFlag) was raised.
    ///
    /// # Panics
    ///
    /// If a reading thread has panicked, for example in [`Decode::len_bytes`](crate::Decode::len_bytes).
    fn next(&mut self) -> Option<LoadedBatch> {
        loop {
            if let Ok(batch) = self.next_timeout(Duration::MAX) {
                return batch;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    #[test]
    fn a_consumer_counts_as_busy_after_a_timeout() {
        let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).max_bytes(1 << 20).build().unwrap();
        let held = pool.get(1 << 20).unwrap();
        let loader = Loader::new(&pool, &crate::Catalog::synthetic(1, 1), crate::LoadOptions::default());
        let mut reader = loader.batches().unwrap();
        assert_eq!(reader.next_timeout(Duration::from_millis(1)).err(), Some(TimedOut));
        assert!(reader.reader_threads.ahead().counts.lock().is_consumer_busy);
        drop(held);
        assert!(reader.next().unwrap().failures.is_empty());
    }

    #[test]
    fn no_more_than_read_ahead_batches_are_started() {
        let ahead = ReadAhead::new(3);
        let (starts, started) = channel();
        thread::scope(|scope| {
            let _close = CloseOnDrop(&ahead);
            for _ in 0..4 {
                let starts = starts.clone();
                let ahead = &ahead;
                scope.spawn(move || while ahead.wait_to_start() && starts.send(()).is_ok() {});
            }
            for sent in 0..1000 {
                started.recv().unwrap();
                let unsent = ahead.counts.lock().started - sent;
                assert!((1..=3).contains(&unsent), "{unsent}");
                ahead.count_sent();
            }
        });
    }

    #[test]
    fn closing_wakes_every_waiting_thread() {
        let ahead = ReadAhead::new(1);
        assert!(ahead.wait_to_start());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ahead.wait_to_start());
            drop(CloseOnDrop(&ahead));
            assert!(!waiting.join().unwrap());
        });
        assert_eq!(ahead.counts.lock().started, 1);
        assert!(!ahead.wait_for_completion(0));
    }

    #[test]
    fn a_thread_waits_until_its_batch_is_wanted_and_then_tries_once_more() {
        let ahead = ReadAhead::new(4);
        assert!(ahead.wait_to_start());
        ahead.set_consumer_busy(true);
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ahead.wait_for_completion(0));
            ahead.set_consumer_busy(false);
            // If a batch is wanted and no other batch is in progress, its thread does not wait again, even if it came late.
            let _ = waiting.join().unwrap();
        });
        assert!(!ahead.wait_for_completion(0));
    }

    #[test]
    fn a_wait_for_memory_ends_when_no_other_batch_is_in_progress() {
        let ahead = ReadAhead::new(4);
        assert!(ahead.wait_to_start());
        assert!(!ahead.wait_for_completion(0), "alone");
        assert!(ahead.wait_to_start());
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ahead.wait_for_completion(0));
            ahead.count_sent();
            ahead.count_completed();
            assert!(waiting.join().unwrap(), "the other batch is completed");
        });
        assert!(!ahead.wait_for_completion(1), "alone again");
        assert!(ahead.wait_for_completion(0), "completed before the wait");
    }
}
