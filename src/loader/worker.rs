//! What each of the reading threads does: claim the next batch, get a buffer for it, fill it, hand it on.
//!
//! Owns the order in which buffers are got. Never sends anything and never counts.
//!
//! I1. Claims and buffers are taken together, in batch order, under the turn: whoever holds a buffer has every earlier
//! batch's buffer in front of it. The courier waits for batches in order, so a batch that it waits for is never one that
//! waits for memory itself, and a ceiling on the pool slows a run down but cannot bring it to a standstill.

use crossbeam::channel::Sender;

use super::Loader;
use super::failure::{Cause, Failure};
use super::plan::{Batches, Planned};
use super::read::{Filled, Loss, Reader};
use super::window::{CloseAtExit, Window};
use crate::sync::plain::Mutex;
use crate::{Error, PinnedBuf};

/// A batch on its way from a worker to the courier.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) planned: Planned,
    pub(super) filled: Filled,
    /// `None` when there is nothing to send: no memory, or no sample that could be read.
    pub(super) buffer: Option<PinnedBuf>,
}

/// What the workers of a run share.
#[derive(Debug)]
pub(super) struct Bench<'a> {
    pub(super) loader: &'a Loader<'a>,
    pub(super) window: &'a Window,
    /// Held by the one worker that is claiming a batch (I1).
    pub(super) turn: Mutex<Batches<'a>>,
}

impl Bench<'_> {
    /// Works until the plan is done or the window is closed.
    pub(super) fn work(&self, deliveries: &Sender<Delivery>) {
        let _close = CloseAtExit(self.window);
        let mut reader = Reader::new(self.loader.catalog, &self.loader.stop, self.loader.options.verify);
        while let Some((planned, buffer)) = self.claim() {
            let Some(delivery) = self.prepare(&mut reader, planned, buffer) else { return };
            if deliveries.send(delivery).is_err() {
                return;
            }
        }
    }

    fn claim(&self) -> Option<(Planned, Result<PinnedBuf, Error>)> {
        let mut batches = self.turn.lock();
        if self.loader.stop.is_requested() || !self.window.claim() {
            return None;
        }
        let planned = batches.next()?;
        let buffer = self.buffer(&planned);
        Some((planned, buffer))
    }

    /// A buffer for the batch. Where the pool is at its ceiling, buffers of earlier batches come back to it: there is an
    /// error only once all of them are back and it still does not fit.
    fn buffer(&self, planned: &Planned) -> Result<PinnedBuf, Error> {
        // Longer than an address: the pool refuses the longest length in its own words.
        let len = usize::try_from(planned.len_bytes).unwrap_or(usize::MAX);
        loop {
            let landings = self.window.landings();
            match self.loader.pool.get(len) {
                Err(error) if error.is_limit() || error.is_backend() => {
                    if !self.window.wait_past(landings) {
                        return Err(error);
                    }
                }
                other => return other,
            }
        }
    }

    /// `None`: stopped.
    fn prepare(&self, reader: &mut Reader<'_>, planned: Planned, buffer: Result<PinnedBuf, Error>) -> Option<Delivery> {
        let filled = buffer.and_then(|mut buffer| {
            let filled = reader.fill(&planned, buffer.as_mut_slice()?);
            Ok((filled, buffer))
        });
        match filled {
            Ok((filled, buffer)) => {
                let filled = filled?;
                let buffer = (filled.len_bytes > 0).then_some(buffer);
                Some(Delivery { planned, filled, buffer })
            }
            Err(error) => {
                let loss = self.loader.lost_batch(&planned, error);
                Some(Delivery { planned, filled: Filled { losses: vec![loss], ..Filled::default() }, buffer: None })
            }
        }
    }
}

impl Loader<'_> {
    /// A batch that is lost as a whole: one sentence for all of its files.
    pub(super) fn lost_batch(&self, planned: &Planned, cause: impl Into<Cause>) -> Loss {
        let first = planned.samples.first().map_or_else(String::new, |&sample| self.catalog.name(sample));
        let name = match planned.samples.len() {
            1 => first,
            many => format!("batch {} ({many} samples, the first {first})", planned.number),
        };
        let sources = planned.samples.iter().map(|&sample| self.catalog.samples[sample].source).collect();
        Loss { sources, failure: Failure::new(name, cause) }
    }
}
