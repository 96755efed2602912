//! Events: positions in a stream that can be queried, waited for, or waited for by another stream.
//!
//! An event represents its last record; without a record it counts as complete. Destroying an event never waits. Waiting, timing and
//! destroying need a current context; a query does not.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, LazyLock, Mutex};

use crate::adversarial::{self, Deviation};
use crate::call::{Out, Outcome, driver_call};
use crate::code::Code;
use crate::stream::{self, Enqueued, Op, Ticket};
use crate::sync::lock;
use crate::{capture, context, counts};

const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;

#[derive(Clone)]
struct Event {
    context: usize,
    is_timed: bool,
    /// The work that the event follows; `None` if the event was never recorded.
    record: Option<Enqueued>,
}

#[derive(Default)]
struct Events {
    created: usize,
    live: BTreeMap<usize, Event>,
}

static EVENTS: LazyLock<Mutex<Events>> = LazyLock::new(Mutex::default);

/// Returns the number of live events.
pub(crate) fn live() -> u64 {
    lock(&EVENTS).live.len() as u64
}

/// Destroys all events of a context.
pub(crate) fn forget_of(context: usize) {
    lock(&EVENTS).live.retain(|_, event| event.context != context);
}

fn find(handle: usize) -> Result<Event, Code> {
    let found = lock(&EVENTS).live.get(&handle).cloned();
    found.ok_or_else(|| {
        counts::misused(format!("use of event {handle:#x}, which does not exist"));
        if adversarial::is_on(Deviation::DeadEventAborts) {
            eprintln!("mock driver: use of event {handle:#x}, which does not exist");
            std::process::abort();
        }
        Code::INVALID_HANDLE
    })
}

fn record(handle: usize, stream: usize) -> Outcome {
    let event = find(handle)?;
    let stream = stream::resolve(stream)?;
    if stream::context_of(stream)? != event.context {
        return Err(Code::INVALID_HANDLE);
    }
    set_record(handle, stream::enqueue(stream, Op::Signal(Arc::new(|| Ok(()))))?);
    Ok(())
}

fn set_record(handle: usize, record: Enqueued) {
    if let Some(event) = lock(&EVENTS).live.get_mut(&handle) {
        event.record = Some(record);
    }
}

/// Returns the work before the event's record: none if the event was never recorded.
fn recorded(handle: usize) -> Result<Vec<Ticket>, Code> {
    match find(handle)?.record {
        None => Ok(Vec::new()),
        Some(Enqueued::Live(tickets)) => Ok(tickets),
        Some(Enqueued::Captured(_)) => Err(Code::CAPTURED_EVENT),
    }
}

driver_call! { Device fn cuEventCreate(out: Out<usize>, flags: u32) {
    let context = context::current()?;
    if flags & !(BLOCKING_SYNC | DISABLE_TIMING) != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut events = lock(&EVENTS);
    events.created += 1;
    let handle = 0x7000_0000 + events.created * 0x10;
    events.live.insert(handle, Event { context, is_timed: flags & DISABLE_TIMING == 0, record: None });
    out.put(handle)
}}

driver_call! { Enqueue fn cuEventRecord(handle: usize, stream: usize) {
    record(handle, stream)
}}

// Records all work of a context. While a stream of the context captures, it fails and invalidates that capture.
driver_call! { Enqueue fn cuCtxRecordEvent(context: usize, handle: usize) {
    if find(handle)?.context != context {
        return Err(Code::INVALID_HANDLE);
    }
    set_record(handle, Enqueued::Live(stream::tickets_of(context)?));
    Ok(())
}}

// A query of an event that was never recorded needs no device, so it does not report a lost one.
driver_call! { Process fn cuEventQuery(handle: usize) {
    let recorded = recorded(handle)?;
    capture::forbid_unsafe_call()?;
    if recorded.is_empty() {
        return Ok(());
    }
    stream::check_alive()?;
    if recorded.into_iter().all(stream::is_complete) { Ok(()) } else { Err(Code::NOT_READY) }
}}

driver_call! { Device fn cuEventSynchronize(handle: usize) {
    context::current()?;
    let recorded = recorded(handle)?;
    capture::forbid_unsafe_call()?;
    recorded.into_iter().try_for_each(stream::wait_for_ticket)
}}

driver_call! { Device fn cuEventDestroy_v2(handle: usize) {
    context::current()?;
    find(handle)?;
    lock(&EVENTS).live.remove(&handle);
    Ok(())
}}

// The time itself is always 0.
driver_call! { Device fn cuEventElapsedTime(out: Out<f32>, from: usize, to: usize) {
    context::current()?;
    let events = [find(from)?, find(to)?];
    if events.iter().any(|event| !event.is_timed || event.record.is_none()) {
        return Err(Code::INVALID_HANDLE);
    }
    let is_complete = |event: &Event| matches!(&event.record, Some(Enqueued::Live(work)) if work.iter().copied().all(stream::is_complete));
    if events.iter().all(is_complete) { out.put(0.0) } else { Err(Code::NOT_READY) }
}}

driver_call! { Enqueue fn cuStreamWaitEvent(handle: usize, event: usize, _flags: c_int) {
    let stream = stream::resolve(handle)?;
    match find(event)?.record {
        Some(Enqueued::Captured(graph)) => stream::lock_streams().captures.join(stream, graph),
        Some(Enqueued::Live(work)) if !work.is_empty() => {
            // Captured work may not wait for work outside the graph.
            capture::forbid_naming(stream).map_err(|_| Code::STREAM_CAPTURE_ISOLATION)?;
            work.into_iter().try_for_each(|ticket| stream::enqueue(stream, Op::WaitFor(ticket)).map(drop))
        }
        _ => Ok(()),
    }
}}
