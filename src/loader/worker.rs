//! The reading threads: take the next batch, get a buffer, fill it, pass it on.
//!
//! Owns the order in which buffers are got. Never copies to the destination and never counts.
//!
//! - **worker-I1**: a batch is started and gets its buffer under one lock, so buffers are got in batch order. [`Transfer`]
//!   sends batches in that order, so the batch that it waits for has its buffer already: a ceiling of the pool slows a run
//!   down but cannot block it.
//!
//! [`Transfer`]: super::transfer::Transfer

use std::sync::Arc;
use std::sync::mpsc::Sender;

use parking_lot::Mutex;

use super::batches::{Batches, PlannedBatch};
use super::open_files::OpenFiles;
use super::read::{BatchContents, SampleReader};
use super::read_ahead::{CloseOnDrop, ReadAhead};
use super::run::Loader;
use crate::{Error, PinnedBuf};

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
pub(super) struct Workers<'a> {
    pub(super) loader: &'a Loader<'a>,
    pub(super) ahead: &'a ReadAhead,
    pub(super) files: OpenFiles,
    /// Locked while a batch is started and gets its buffer (worker-I1).
    pub(super) batches: Mutex<Batches<'a>>,
}

impl Workers<'_> {
    /// Reads batches until the plan is done or the read-ahead is closed.
    pub(super) fn work(&self, filled: &Sender<FilledBatch>) {
        let _close = CloseOnDrop(self.ahead);
        let Loader { catalog, options, stop, .. } = self.loader;
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
        let buffer = self.get_buffer(&planned);
        Some((planned, buffer))
    }

    /// A buffer for the batch. At the pool's ceiling, waits for buffers of earlier batches to come back; an error means that
    /// all of them are back and the batch still does not fit.
    fn get_buffer(&self, planned: &PlannedBatch) -> Result<PinnedBuf, Error> {
        // The pool refuses a length beyond the address space with an error of its own.
        let len = usize::try_from(planned.len_bytes).unwrap_or(usize::MAX);
        loop {
            let completions = self.ahead.completions();
            match self.loader.pool.get(len) {
                Err(error) if error.is_limit() || error.is_backend() => {
                    if !self.ahead.wait_for_completion(completions) {
                        return Err(error);
                    }
                }
                other => return other,
            }
        }
    }

    /// `None` if the run was stopped.
    fn fill(
        &self,
        reader: &mut SampleReader<'_>,
        planned: PlannedBatch,
        buffer: Result<PinnedBuf, Error>,
    ) -> Option<FilledBatch> {
        let filled = buffer.and_then(|mut buffer| {
            let contents = reader.fill(&planned, buffer.as_mut_slice()?);
            Ok((contents, buffer))
        });
        match filled {
            Ok((contents, buffer)) => {
                let contents = contents?;
                let buffer = (contents.len_bytes > 0).then_some(buffer);
                Some(FilledBatch { planned, contents, buffer })
            }
            Err(error) => {
                let skipped = vec![planned.skipped(self.loader.catalog, &Arc::new(error))];
                Some(FilledBatch { planned, contents: BatchContents { skipped, ..Default::default() }, buffer: None })
            }
        }
    }
}
