//! An event behind the work on a stream, as a fence.
//!
//! Invariant **D1**: a [`Mark`]'s event was recorded on the stream, behind the work, and nowhere else since.
#![allow(unsafe_code)] // Calls the driver.

use cudarc::driver::{CudaStream, DriverError, result, sys};

use super::home::{Event, Home};
use super::said;
use crate::driver::Relaxed;
use crate::error::{Error, Result};
use crate::in_flight::Fence;
use crate::sync::process::{AtomicBool, AtomicU64, Ordering};

/// Handles that name a stream by what the caller is, not by what it is.
const LEGACY_BY_NAME: usize = 1;
const PER_THREAD: usize = 2;
/// Numbers of per-thread streams, above every address.
const PER_THREAD_BIT: u64 = 1 << 63;

/// An event, its home's again when this is dropped.
#[derive(Debug)]
pub(super) struct Mark {
    event: Event,
    stream: u64,
    home: &'static Home,
    /// Somebody was told so: the driver need not be asked again.
    is_over: AtomicBool,
}

impl Mark {
    /// An event not yet recorded. The stream's context is current.
    pub(super) fn new(stream: &CudaStream, home: &'static Home) -> Result<Self, DriverError> {
        Ok(Self { event: home.take_event()?, stream: number(stream), home, is_over: AtomicBool::new(false) })
    }

    /// Puts it behind all work on the stream so far.
    pub(super) fn record(&self, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: both are alive, and of one context.
        unsafe { result::event::record(self.event.0, stream.cu_stream()) }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        self.home.put_event(self.event);
    }
}

// SAFETY: D1: the event is recorded again only when this mark is gone. Events of one stream come true in order. Neither
// an error nor "not ready" passes for done.
unsafe impl Fence for Mark {
    fn is_done(&self) -> Result<bool> {
        // Acquire, with the Release below: what the device did comes before what is done on this word.
        if self.is_over.load(Ordering::Acquire) {
            return Ok(true);
        }
        let _relaxed = Relaxed::enter();
        // SAFETY: the event lives as long as `self`.
        match unsafe { result::event::query(self.event.0) } {
            Ok(()) => {
                self.is_over.store(true, Ordering::Release);
                Ok(true)
            }
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(Error::device(said("cuEventQuery", error))),
        }
    }

    fn wait(&self) -> Result<()> {
        // Acquire and Release: as above.
        if self.is_over.load(Ordering::Acquire) {
            return Ok(());
        }
        let _relaxed = Relaxed::enter();
        // SAFETY: the event lives as long as `self`.
        unsafe { result::event::synchronize(self.event.0) }
            .map_err(|error| Error::device(said("cuEventSynchronize", error)))?;
        self.is_over.store(true, Ordering::Release);
        Ok(())
    }

    fn stream(&self) -> u64 {
        self.stream
    }
}

/// A number for the stream. A handle is an address, and so is a context's: both are above the sink's numbers, which count
/// from one. The driver keeps a destroyed stream until its work is over, so no handle recurs while a fence of it is open.
pub(super) fn number(stream: &CudaStream) -> u64 {
    std::thread_local! {
        static THREAD: u64 = {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            // Relaxed: only that no number is given twice matters.
            NEXT.fetch_add(1, Ordering::Relaxed)
        };
    }
    match stream.cu_stream().addr() {
        // One in each context.
        0 | LEGACY_BY_NAME => stream.context().cu_ctx().addr() as u64,
        // One in each context and thread.
        PER_THREAD => PER_THREAD_BIT | THREAD.with(|thread| thread << 8) | (stream.context().ordinal() as u64 & 0xFF),
        handle => handle as u64,
    }
}
