//! The reading threads: take the next batch, get a buffer, fill it, pass it on.
//!
//! Owns the order in which buffers are got. Never copies to the destination and never counts.
//!
//! - **worker-I1**: a batch is started and gets its buffer under one lock, so buffers are got in batch order. [`Transfer`]
//!   sends batches in that order, so the batch that it waits for has its buffer already: a ceiling of the pool slows a run
//!   down but cannot block it.
//! - **worker-I2**: a worker looks at the end of the load after each chunk that it reads and every [`LOOK_EVERY`] while it
//!   waits for a buffer.
//!
//! [`Transfer`]: super::transfer::Transfer

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use pinpool_os::sync::plain::Mutex;

use super::batches::{Batches, PlannedBatch};
use super::decoders::Decoders;
use super::open_files::OpenFiles;
use super::read::{BatchContents, SampleReader};
use super::read_ahead::{CloseOnDrop, ReadAhead};
use super::read_decoded;
use super::run::Loader;
use pinpool::{Error, PinnedBuf};

/// Longest time between two looks at whether the load was ended.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A batch on its way from a worker to the copying thread.
#[derive(Debug)]
pub(super) struct FilledBatch {
    pub(super) planned: PlannedBatch,
    pub(super) contents: BatchContents,
    /// `None` if there is nothing to send: no memory, or no bytes that could be read.
    pub(super) buffer: Option<PinnedBuf>,
}

/// What the workers of a run share.
#[derive(Debug)]
pub(super) struct Workers {
    pub(super) loader: Loader,
    pub(super) ahead: ReadAhead,
    pub(super) files: OpenFiles,
    pub(super) decoders: Decoders,
    /// Locked while a batch is started and gets its buffer (worker-I1).
    pub(super) batches: Mutex<Batches>,
}

impl Workers {
    /// Reads batches until the plan is done or the read-ahead is closed.
    pub(super) fn work(&self, filled: &Sender<FilledBatch>) {
        let _close = CloseOnDrop(&self.ahead);
        let Loader { catalog, options, stop, .. } = &self.loader;
        let mut reader = SampleReader::new(catalog, stop, &self.files, options.verify);
        while let Some((planned, buffer)) = self.start_batch() {
            let Some(batch) = self.fill(&mut reader, planned, buffer) else { return };
            if filled.send(batch).is_err() {
                return;
            }
        }
    }

    fn start_batch(&self) -> Option<(PlannedBatch, Result<PinnedBuf, Error>)> {
        let mut batches = self.batches.lock();
        if self.loader.stop.is_raised() || !self.ahead.start() {
            return None;
        }
        let planned = batches.next()?;
        let buffer = self.get_buffer(&planned)?;
        Some((planned, buffer))
    }

    fn is_ended(&self) -> bool {
        self.loader.stop.is_raised() || self.ahead.is_closed()
    }

    /// A buffer for the batch. At the pool's ceiling, waits for buffers of earlier batches to come back; an error means that
    /// all of them are back, or with the one who takes the batches and waits for this one, and it still does not fit. `None`
    /// if the load was ended meanwhile.
    fn get_buffer(&self, planned: &PlannedBatch) -> Option<Result<PinnedBuf, Error>> {
        // The pool refuses a length beyond the address space with an error of its own.
        let decode = &self.loader.options.decode;
        let len = match decode.is_empty() {
            true => usize::try_from(planned.len_bytes).unwrap_or(usize::MAX),
            false => read_decoded::batch_bytes(decode, planned, &self.loader.catalog),
        };
        loop {
            let completions = self.ahead.completions();
            match self.get_unless_ended(len)? {
                Err(error) if error.is_limit() || error.is_backend() => {
                    if !self.ahead.wait_for_completion(completions) {
                        return Some(Err(error));
                    }
                }
                other => return Some(other),
            }
        }
    }

    /// `Pool::get`, which may wait for a long time, left early at the end of the load (worker-I2).
    fn get_unless_ended(&self, len: usize) -> Option<Result<PinnedBuf, Error>> {
        let mut get = pin!(self.loader.pool.get_async(len));
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        loop {
            if let Poll::Ready(buffer) = get.as_mut().poll(&mut Context::from_waker(&waker)) {
                return Some(buffer);
            }
            if self.is_ended() {
                return None;
            }
            thread::park_timeout(LOOK_EVERY);
        }
    }

    /// `None` if the run was stopped.
    fn fill(
        &self,
        reader: &mut SampleReader<'_>,
        planned: PlannedBatch,
        buffer: Result<PinnedBuf, Error>,
    ) -> Option<FilledBatch> {
        // Ends them in all cases (turn-I1).
        let mut turns = self.decoders.turns(&planned.turns);
        let filled = buffer.and_then(|mut buffer| {
            let (decode, bytes) = (&self.loader.options.decode, buffer.as_mut_slice()?);
            let contents = match decode.is_empty() {
                true => reader.fill(&planned, &mut turns, bytes),
                false => read_decoded::fill(decode, reader, &planned, &mut turns, bytes),
            };
            reader.leave_file(&mut turns);
            Ok((contents, buffer))
        });
        match filled {
            Ok((contents, buffer)) => {
                let contents = contents?;
                let buffer = (contents.len_bytes > 0).then_some(buffer);
                Some(FilledBatch { planned, contents, buffer })
            }
            Err(error) => {
                let skipped = vec![planned.skipped(&self.loader.catalog, &Arc::new(error))];
                Some(FilledBatch { planned, contents: BatchContents { skipped, ..Default::default() }, buffer: None })
            }
        }
    }
}

/// Unparks a worker that waits for a buffer.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
