//! Events: positions in a stream that can be queried, waited for, or waited for by another stream.
//!
//! An event represents its last record; without one it counts as complete. Destroying an event never waits. A query needs
//! no context; waiting, elapsed times and destroying do (the manual lists "invalid context" among the answers of each).

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use crate::adversarial::{self, Deviation};
use crate::call::{Out, Outcome, driver_call};
use crate::code::Code;
use crate::op::Op;
use crate::stream::{self, Enqueued, Ticket};
use crate::sync::lock;
use crate::{capture, context, ledger};

const BLOCKING_SYNC: u32 = 1;
const DISABLE_TIMING: u32 = 2;

#[derive(Clone)]
struct Event {
    context: usize,
    timed: bool,
    last: Option<(Enqueued, Arc<OnceLock<Instant>>)>,
    /// In place of `last`: the work of a whole context.
    of_context: Vec<Ticket>,
}

struct Events {
    created: usize,
    live: BTreeMap<usize, Event>,
}

static EVENTS: Mutex<Events> = Mutex::new(Events { created: 0, live: BTreeMap::new() });

/// Events that were created and not destroyed.
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
        ledger::misused(format!("use of event {handle:#x}, which is not or no longer there"));
        if adversarial::is(Deviation::DeadEventAborts) {
            eprintln!("mock driver: use of event {handle:#x}, which is not or no longer there");
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
    let reached = Arc::new(OnceLock::new());
    let enqueued = stream::enqueue(stream, Op::RecordEvent(Arc::clone(&reached)))?;
    if let Some(event) = lock(&EVENTS).live.get_mut(&handle) {
        event.last = Some((enqueued, reached));
        event.of_context.clear();
    }
    Ok(())
}

/// The work before the record; none if the event was never recorded.
fn recorded(handle: usize) -> Result<Vec<Ticket>, Code> {
    let event = find(handle)?;
    match event.last {
        None => Ok(event.of_context),
        Some((Enqueued::Live(ticket), _)) => Ok(vec![ticket]),
        Some((Enqueued::Captured(_), _)) => Err(Code::CAPTURED_EVENT),
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
    events.live.insert(handle, Event { context, timed: flags & DISABLE_TIMING == 0, last: None, of_context: Vec::new() });
    out.put(handle)
}}

driver_call! { Enqueue fn cuEventRecord(handle: usize, stream: usize) {
    record(handle, stream)
}}

// Behind all work of a context. While one of its streams captures, it fails and invalidates that capture.
driver_call! { Enqueue fn cuCtxRecordEvent(context: usize, handle: usize) {
    if find(handle)?.context != context {
        return Err(Code::INVALID_HANDLE);
    }
    let tickets = stream::tickets_of(context)?;
    if let Some(event) = lock(&EVENTS).live.get_mut(&handle) {
        (event.last, event.of_context) = (None, tickets);
    }
    Ok(())
}}

// A green context has one default stream with its primary context here.
driver_call! { Enqueue fn cuGreenCtxRecordEvent(_green: usize, handle: usize) {
    record(handle, 0)
}}

// A query of an event that was never recorded needs no device, so it does not report a lost one.
driver_call! { Process fn cuEventQuery(handle: usize) {
    let recorded = recorded(handle)?;
    capture::forbid_unsafe_call()?;
    if recorded.is_empty() {
        return Ok(());
    }
    stream::check_alive()?;
    if recorded.into_iter().all(stream::is_over) { Ok(()) } else { Err(Code::NOT_READY) }
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

fn elapsed(out: Out<f32>, from: usize, to: usize) -> Outcome {
    context::current()?;
    let ends = [find(from)?, find(to)?].map(|event| event.last.filter(|_| event.timed));
    let [Some((_, from)), Some((_, to))] = ends else { return Err(Code::INVALID_HANDLE) };
    match (from.get(), to.get()) {
        (Some(from), Some(to)) => out.put(to.saturating_duration_since(*from).as_secs_f32() * 1e3),
        _ => Err(Code::NOT_READY),
    }
}

driver_call! { Device fn cuEventElapsedTime(out: Out<f32>, from: usize, to: usize) {
    elapsed(out, from, to)
}}

driver_call! { Device fn cuEventElapsedTime_v2(out: Out<f32>, from: usize, to: usize) {
    elapsed(out, from, to)
}}

driver_call! { Enqueue fn cuStreamWaitEvent(handle: usize, event: usize, _flags: c_int) {
    let stream = stream::resolve(handle)?;
    let event = find(event)?;
    match event.last {
        None => {
            if !event.of_context.is_empty() {
                capture::forbid_outside_work(stream)?;
            }
            event.of_context.into_iter().try_for_each(|ticket| stream::enqueue(stream, Op::WaitFor(ticket)).map(drop))
        }
        Some((Enqueued::Captured(number), _)) => stream::lock_streams().captures.join(stream, number),
        Some((Enqueued::Live(ticket), _)) => {
            capture::forbid_outside_work(stream)?;
            stream::enqueue(stream, Op::WaitFor(ticket)).map(drop)
        }
    }
}}
