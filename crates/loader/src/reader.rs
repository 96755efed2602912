//! Batches for one who takes them: an iterator over buffers that were filled ahead.
//!
//! Owns what is handed out and the state behind it. Starts no thread and never copies.

use std::ops::Range;
use std::task::Poll;
use std::time::Duration;

use super::failure::Failure;
use super::read::BatchSegment;
use super::reading::Reading;
use super::state::LoadState;
use super::summary::Ended;
use super::worker::FilledBatch;
use pinpool::PinnedBuf;

/// A batch in pinned memory. Its buffer goes back to the pool when it is dropped, or behind the copy that takes it.
#[derive(Debug)]
#[non_exhaustive]
pub struct LoadedBatch {
    /// Its place in the whole load, from 0.
    pub number: u64,
    /// Its epoch, from 0.
    pub epoch: u64,
    /// Its place in the epoch, from 0.
    pub in_epoch: u64,
    /// The bytes of all parts, one after the other, and no more; before them the arrays, if fields are decoded.
    pub buffer: PinnedBuf,
    /// Where the array of each of [`LoadOptions::decode`](super::LoadOptions::decode) lies, a row for each part.
    pub arrays: Vec<Range<usize>>,
    /// What was read, in order.
    pub parts: Vec<LoadedPart>,
    /// What could not be read. A sample that cannot be read fails in each epoch, and in each batch that has a part of it.
    pub failures: Vec<Failure>,
}

/// A sample in a batch, or a part of one that is longer than a batch may be.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadedPart {
    /// Index into [`Catalog::samples`](super::Catalog::samples).
    pub sample: usize,
    /// Its bytes in the batch; those of its [`kept_fields`](super::kept_fields), if fields are decoded.
    pub bytes: Range<usize>,
    /// First byte in the sample: 0 unless the sample began in an earlier batch.
    pub start: u64,
    /// XXH3 checksum of the bytes as they were read, with [`LoadOptions::verify`](super::LoadOptions::verify).
    pub checksum: Option<u64>,
}

/// The batches of a load, in order. Dropped, it ends the threads that read and puts back what they have read ahead.
///
/// In a child of `fork` it has no threads and hands out nothing.
#[derive(Debug)]
pub struct BatchReader {
    reading: Reading,
    is_strict: bool,
    /// Behind the batch that was handed out last.
    state: LoadState,
    ended: Option<Ended>,
}

impl BatchReader {
    pub(super) fn new(reading: Reading, is_strict: bool, state: LoadState) -> BatchReader {
        // Until the first call nobody waits for a batch.
        reading.ahead().set_wanted(false);
        BatchReader { reading, is_strict, state, ended: None }
    }

    /// The next batch, as [`next`](Iterator::next); pending if no batch is filled within `wait`, or a little longer while
    /// batches behind it are.
    pub fn next_within(&mut self, wait: Duration) -> Poll<Option<LoadedBatch>> {
        self.take(Some(wait), true)
    }

    /// The next batch if it is filled. Its workers learn of no one who waits, so that one who has no memory for it goes on to
    /// wait for buffers that were handed out.
    pub fn next_if_filled(&mut self) -> Poll<Option<LoadedBatch>> {
        self.take(Some(Duration::ZERO), false)
    }

    fn take(&mut self, wait: Option<Duration>, is_wanted: bool) -> Poll<Option<LoadedBatch>> {
        if self.ended.is_some() {
            return Poll::Ready(None);
        }
        if self.reading.is_stopped() {
            self.end(Ended::Stopped);
            return Poll::Ready(None);
        }
        if is_wanted {
            self.reading.ahead().set_wanted(true);
        }
        let Poll::Ready(next) = self.reading.next(wait) else { return Poll::Pending };
        let Some(FilledBatch { planned, contents, buffer }) = next else {
            self.end(if self.reading.is_stopped() { Ended::Stopped } else { Ended::Complete });
            return Poll::Ready(None);
        };
        self.reading.ahead().set_wanted(false);
        self.reading.ahead().sent();
        // From here on the buffer is its taker's: a worker that finds no memory waits for the next call, and then for
        // `PINPOOL_WAIT`.
        self.reading.ahead().completed();
        self.state =
            LoadState { epoch: planned.epoch, batch: planned.in_epoch + 1, number: planned.number + 1, ..self.state };
        if self.is_strict && !contents.skipped.is_empty() {
            self.end(Ended::Strict);
        }
        let mut buffer = buffer.unwrap_or_default();
        buffer.truncate(contents.len_bytes);
        Poll::Ready(Some(LoadedBatch {
            number: planned.number,
            epoch: planned.epoch,
            in_epoch: planned.in_epoch,
            buffer,
            arrays: contents.arrays,
            parts: contents.segments.into_iter().map(LoadedPart::of).collect(),
            failures: contents.skipped.into_iter().map(|skipped| skipped.failure).collect(),
        }))
    }

    fn end(&mut self, ended: Ended) {
        self.reading.end();
        self.ended.get_or_insert(ended);
    }

    /// Ends the load: when this returns its threads have ended and all that was read ahead is back in the pool. There is no
    /// further batch.
    pub fn stop(&mut self) {
        self.end(Ended::Stopped);
    }

    /// Where a later load goes on: behind the batch that was handed out last. Batches read ahead do not count.
    #[must_use]
    pub fn state(&self) -> LoadState {
        self.state
    }

    /// Why there is no further batch; `None` while there may be one.
    #[must_use]
    pub fn ended(&self) -> Option<&Ended> {
        self.ended.as_ref()
    }
}

impl Iterator for BatchReader {
    type Item = LoadedBatch;

    /// The next batch in order. Waits until it is filled; `None` at the end of the load, or once its
    /// [`StopFlag`](super::StopFlag) was raised.
    fn next(&mut self) -> Option<LoadedBatch> {
        match self.take(None, true) {
            Poll::Ready(batch) => batch,
            // Without a limit on the wait it is never pending.
            Poll::Pending => None,
        }
    }
}

impl LoadedPart {
    fn of(segment: BatchSegment) -> LoadedPart {
        let BatchSegment { sample, start, offset, len_bytes, checksum } = segment;
        LoadedPart { sample, bytes: offset..offset + len_bytes, start, checksum }
    }
}
