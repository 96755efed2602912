//! A fence for what somebody else's event stands for: he may record it again or destroy it.
//!
//! ```text
//!   his stream   ──work──[his event]──▶
//!   one of ours      └──waits──[mark]──▶   a stream for each event, so that a slow one holds back nobody
//! ```
//!
//! An event that is over needs no stream. One that fails when asked is refused, and so is one recorded in a capture: a
//! stream of ours that waited for it would become part of that graph.
#![allow(unsafe_code)] // Calls the driver.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaStream, result, sys};

use super::context::{Event, Home};
use super::event::Mark;
use super::said;
use crate::driver::RelaxedCapture;
use crate::error::{Error, Result};
use crate::in_flight::{Fence, SharedFence};

/// A fence for all work before the last record of `event`; `None` if that is over.
pub(crate) fn mark_behind(event: &CudaEvent) -> Result<Option<SharedFence>> {
    let home = Home::of(event.context());
    if home.is_over(Event(event.cu_event()))? {
        return Ok(None);
    }
    let failed = |call, error| Error::device(said(call, error));
    let _relaxed = RelaxedCapture::enter();
    let _current = home.enter().map_err(|error| failed("cuCtxSetCurrent", error))?;
    let stream = home.take_stream().map_err(|error| failed("cuStreamCreate", error))?;
    let mark = Mark::new(&stream, home).map_err(|error| failed("cuEventCreate", error))?;
    let wait = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
    // SAFETY: both are alive.
    unsafe { result::stream::wait_event(stream.cu_stream(), event.cu_event(), wait) }
        .map_err(|error| failed("cuStreamWaitEvent", error))?;
    let mark = mark.record(&stream, None).map_err(|error| failed("cuEventRecord", error))?;
    Ok(Some(Arc::new(Foreign { mark, stream: ManuallyDrop::new(stream), home })))
}

#[derive(Debug)]
struct Foreign {
    mark: Mark,
    /// Nothing else runs on it while this lives.
    stream: ManuallyDrop<Arc<CudaStream>>,
    home: &'static Home,
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // SAFETY: taken here, once.
        let stream = unsafe { ManuallyDrop::take(&mut self.stream) };
        self.home.put_stream(stream, self.mark.is_known_over());
    }
}

// SAFETY: the mark stands behind the wait, and the wait behind the work. Nothing is said of the stream's id.
unsafe impl Fence for Foreign {
    fn is_done(&self) -> Result<bool> {
        self.mark.is_done()
    }

    fn wait(&self) -> Result<()> {
        self.mark.wait()
    }

    fn stream(&self) -> u64 {
        self.mark.stream()
    }
}
