//! An event behind the work on a stream, as a fence.
//!
//! Invariant **D1**: a [`Mark`]'s event was recorded on the stream, behind the work, and nowhere else since.
#![allow(unsafe_code)] // Calls the driver.

use cudarc::driver::{CudaStream, DriverError, result};

use super::context::{Event, Home};
use super::stream_id as names;
use crate::error::Result;
use crate::in_flight::{Fence, StreamId};
use crate::sync::process::{AtomicBool, Ordering};

/// An event, its home's again when this is dropped.
#[derive(Debug)]
pub(super) struct Mark {
    event: Event,
    stream: u64,
    stream_id: Option<StreamId>,
    home: &'static Home,
    /// Somebody was told so: the driver need not be asked again.
    is_over: AtomicBool,
}

impl Mark {
    /// An event not yet recorded. The stream's context is current.
    pub(super) fn new(stream: &CudaStream, home: &'static Home) -> Result<Self, DriverError> {
        let (stream, is_over) = (names::number(stream), AtomicBool::new(false));
        Ok(Self { event: home.take_event()?, stream, stream_id: None, home, is_over })
    }

    /// Puts it behind all work so far on the stream, which goes by this id if anybody wants to know.
    pub(super) fn record(mut self, stream: &CudaStream, id: Option<StreamId>) -> Result<Self, DriverError> {
        // SAFETY: both are alive, and of one context.
        unsafe { result::event::record(self.event.0, stream.cu_stream()) }?;
        self.stream_id = id;
        Ok(self)
    }

    /// Was somebody told that it is over?
    pub(super) fn is_known_over(&self) -> bool {
        // Acquire, with the Releases below: what the device did comes before what is done on this word.
        self.is_over.load(Ordering::Acquire)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.home.put_event(self.event);
    }
}

// SAFETY: D1: the event is recorded again only when this mark is gone. Events of one stream come true in order, and what
// goes by one id is one stream (`names`).
unsafe impl Fence for Mark {
    fn is_done(&self) -> Result<bool> {
        if self.is_known_over() {
            return Ok(true);
        }
        let is_over = self.home.is_over(self.event)?;
        if is_over {
            self.is_over.store(true, Ordering::Release);
        }
        Ok(is_over)
    }

    fn wait(&self) -> Result<()> {
        if self.is_known_over() {
            return Ok(());
        }
        self.home.wait_for(self.event)?;
        self.is_over.store(true, Ordering::Release);
        Ok(())
    }

    fn stream(&self) -> u64 {
        self.stream
    }

    fn stream_id(&self) -> Option<StreamId> {
        self.stream_id
    }
}
