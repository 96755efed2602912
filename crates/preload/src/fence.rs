//! A fence after all work of every known context. The driver's free function would wait for the work of all contexts;
//! [`contexts`](crate::contexts) describes which contexts are known.
//!
//! ```text
//!   waiting ──no capture in progress──▶ recorded: an event in each known context ──all completed──▶ completed
//!      └── while a stream captures: tried again at each sweep of the pool
//! ```
//!
//! A record that comes later than the free covers more work than it must, never less. If the driver refuses an event, the next
//! sweep records it.

use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::Duration;

use pinpool::Error;
use pinpool::copy::{CopyStream, Fence, StreamId};

use crate::contexts::Context;
use crate::driver::{
    CU_STREAM_LEGACY, CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_CONTEXT, Code, Driver, EventHandle,
    is_refused_by_capture,
};
use crate::{captures, log, process};
use pinpool_os::sync::unmodeled::Mutex;

/// Time between two checks of work that cannot be waited for.
const PAUSE: Duration = Duration::from_millis(1);

/// A fence after all work that the known contexts had when the fence was created.
#[derive(Debug)]
pub(crate) struct KnownContextsFence {
    driver: &'static Driver,
    state: Mutex<FenceState>,
}

#[derive(Debug)]
enum FenceState {
    /// The contexts with work that no event covers yet.
    Waiting(Vec<Arc<Context>>),
    Recorded(Events),
}

/// Events in contexts.
type Events = Vec<(Arc<Context>, EventHandle)>;

/// The reason that no events were recorded.
enum NotRecorded {
    /// A stream captures.
    Capturing,
    /// A non-blocking stream captures, and no hook saw it begin. The driver lists no streams that could be queried first.
    UnseenCapture,
    Refused(Code),
}

impl KnownContextsFence {
    /// Creates a fence after the work of these contexts. Records its events now, unless a stream captures or the driver refuses.
    pub(crate) fn after(driver: &'static Driver, contexts: Vec<Arc<Context>>) -> Self {
        let mut state = FenceState::Waiting(contexts);
        // If the driver refuses, a later sweep records the events.
        let _refused = state.record(driver);
        Self { driver, state: Mutex::new(state) }
    }

    /// Returns whether the work is known to have completed.
    fn query(&self) -> Result<bool, Code> {
        // The lock is held during the queries, so that only one thread at a time queries the events of a buffer.
        let mut state = self.state.lock();
        state.record(self.driver)?;
        state.sweep(self.driver)
    }

    /// Waits until the work has completed. Returns `false` if a capture kept the events from being recorded.
    pub(crate) fn wait_unless_capturing(&self) -> Result<bool, Code> {
        // First, because this records the events if an earlier attempt was refused.
        while !self.query()? {
            let first = match &*self.state.lock() {
                FenceState::Waiting(_) => return Ok(false),
                FenceState::Recorded(events) => events.first().cloned(),
            };
            // Without an event, another thread has just seen the last one complete, as the next query tells.
            let Some((context, event)) = first else { continue };
            context
                .while_alive(|handle| {
                    let _entered = self.driver.enter(handle)?;
                    self.driver.wait_for_event(event)
                })
                .unwrap_or(Ok(()))?;
        }
        Ok(true)
    }

    fn unknown(&self, code: Code) -> Error {
        let name = self.driver.name(code);
        Error::device_failed(format!("the end of the work before a free is unknown: {name} (code {code})"))
            .with_code(code.into())
    }
}

impl FenceState {
    /// Records an event in each context if no capture is in progress. Otherwise changes nothing.
    fn record(&mut self, driver: &Driver) -> Result<(), Code> {
        let Self::Waiting(contexts) = self else { return Ok(()) };
        let mut stopped_serving_now = false;
        let recorded = captures::without_captures(|| {
            let recorded = record_events(driver, contexts);
            stopped_serving_now = matches!(recorded, Err(NotRecorded::UnseenCapture)) && process::stop_serving();
            recorded
        });
        // Logged only now, so that a blocked write does not block the begin of a capture.
        if stopped_serving_now {
            log::no_longer_served(process::UNSEEN_CAPTURE);
        }
        match recorded {
            Some(Ok(events)) => *self = Self::Recorded(events),
            Some(Err(NotRecorded::Refused(code))) => return Err(code),
            None | Some(Err(NotRecorded::Capturing | NotRecorded::UnseenCapture)) => {}
        }
        Ok(())
    }

    /// Removes the completed events. Returns whether no event is left.
    fn sweep(&mut self, driver: &Driver) -> Result<bool, Code> {
        let Self::Recorded(events) = self else { return Ok(false) };
        let _relaxed = driver.relax();
        let mut refused = Ok(());
        // After a panic too, an event that was not seen complete stays: without it the work would count as complete.
        events.retain(|(context, event)| match context.while_alive(|_| driver.is_complete(*event)) {
            None => false,
            Some(Ok(true)) => {
                context.put_event(*event);
                false
            }
            Some(Ok(false)) => true,
            // Some captures forbid the query even in relaxed mode, so it is repeated later.
            Some(Err(code)) => {
                refused = if is_refused_by_capture(code) { refused } else { refused.and(Err(code)) };
                true
            }
        });
        refused.map(|()| events.is_empty())
    }
}

/// Records an event in each context.
fn record_events(driver: &Driver, contexts: &[Arc<Context>]) -> Result<Events, NotRecorded> {
    let mut events = Events::with_capacity(contexts.len());
    for context in contexts {
        let event = context.while_alive(|handle| {
            let _entered = driver.enter(handle)?;
            if driver.is_captured(CU_STREAM_LEGACY) {
                return Ok(None);
            }
            let event = context.take_event(driver)?;
            let recorded = driver.record_context_event(handle, event);
            recorded.inspect_err(|_| context.put_event(event)).map(|()| Some(event))
        });
        let why = match event {
            // The context is gone, and its work with it; or a function that no hook saw has just ended it.
            None | Some(Err(CUDA_ERROR_CONTEXT_IS_DESTROYED | CUDA_ERROR_INVALID_CONTEXT)) => continue,
            Some(Ok(Some(event))) => {
                events.push((context.clone(), event));
                continue;
            }
            Some(Ok(None)) => NotRecorded::Capturing,
            Some(Err(code)) if is_refused_by_capture(code) => NotRecorded::UnseenCapture,
            Some(Err(code)) => NotRecorded::Refused(code),
        };
        // The events are kept for all contexts or for none: the events of some contexts would cover too little work.
        events.into_iter().for_each(|(context, event)| context.put_event(event));
        return Err(why);
    }
    Ok(events)
}

// SAFETY: `is_complete` returns true only once all work before the free has completed: in each context an event after that
// work has completed, or the context is gone. All fences have one stream ID, since a later fence covers all work that an
// earlier fence covers. A fence that waits for a capture covers later work, too.
unsafe impl Fence for KnownContextsFence {
    fn stream_id(&self) -> Option<StreamId> {
        static ALL: LazyLock<StreamId> = LazyLock::new(StreamId::unique);
        Some(*ALL)
    }

    fn is_complete(&self) -> pinpool::Result<bool> {
        self.query().map_err(|code| self.unknown(code))
    }

    fn wait(&self) -> pinpool::Result<()> {
        while !self.wait_unless_capturing().map_err(|code| self.unknown(code))? {
            if process::has_stopped_serving() && matches!(*self.state.lock(), FenceState::Waiting(_)) {
                return Err(Error::device_failed("the process is no longer served, so no event is recorded"));
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }
}

/// A stream that provides the fence after which a buffer is released.
#[derive(Debug)]
pub(crate) struct FenceStream(pub(crate) Arc<KnownContextsFence>);

// SAFETY: the free makes the fence, which covers all work before it.
unsafe impl CopyStream for FenceStream {
    fn record_fence(&self) -> pinpool::Result<Arc<dyn Fence>> {
        Ok(self.0.clone())
    }
}
