//! Stream capture: work that is recorded in a graph instead of run, and the calls that are forbidden meanwhile.
//!
//! ```text
//!   stream ──begin──► capturing ──end──► graph ──instantiate──► runnable ──launch──► the work, each time
//!                         │ a forbidden call invalidates it; the end returns 901
//! ```
//!
//! While any thread captures in global mode, calls such as `cuEventQuery`, `cuMemHostAlloc` and
//! `cuMemFreeHost` fail on every thread and invalidate that capture, unless the calling thread has changed its mode.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::thread::{self, ThreadId};

use crate::call::{Out, Outcome, driver_call};
use crate::code::Code;
use crate::counts;
use crate::stream::{self, Op, lock_streams};

/// Modes, as the driver numbers them.
const GLOBAL: c_int = 0;
const RELAXED: c_int = 2;
/// States of a stream, as the driver numbers them.
const NOT_CAPTURING: c_int = 0;
const CAPTURING: c_int = 1;
const INVALIDATED: c_int = 2;

thread_local! {
    static MODE: Cell<c_int> = const { Cell::new(GLOBAL) };
}

struct Capture {
    origin: usize,
    mode: c_int,
    thread: ThreadId,
    is_invalid: bool,
    ops: Vec<Op>,
}

/// Running captures and graphs, by number.
#[derive(Default)]
pub(crate) struct Captures {
    numbered: u64,
    running: BTreeMap<u64, Capture>,
    /// The capture that each capturing stream belongs to.
    members: BTreeMap<usize, u64>,
    graphs: BTreeMap<u64, Vec<Op>>,
}

impl Captures {
    fn of(&mut self, stream: usize) -> Option<(u64, &mut Capture)> {
        let &number = self.members.get(&stream)?;
        self.running.get_mut(&number).map(|capture| (number, capture))
    }

    /// Records work if this stream captures; returns the number of the capture.
    pub(crate) fn record(&mut self, stream: usize, op: &Op) -> Result<Option<u64>, Code> {
        match self.of(stream) {
            None => Ok(None),
            Some((_, capture)) if capture.is_invalid => Err(Code::STREAM_CAPTURE_INVALIDATED),
            Some((number, capture)) => {
                capture.ops.push(op.clone());
                Ok(Some(number))
            }
        }
    }

    /// Adds a stream that waits for captured work to the capture.
    pub(crate) fn join(&mut self, stream: usize, number: u64) -> Outcome {
        match self.running.get(&number) {
            None => Err(Code::INVALID_VALUE),
            Some(_) if self.members.get(&stream).is_some_and(|&other| other != number) => Err(Code::INVALID_VALUE),
            Some(_) => {
                self.members.insert(stream, number);
                Ok(())
            }
        }
    }

    /// Returns the streams that take part in captures.
    pub(crate) fn members(&self) -> impl Iterator<Item = &usize> {
        self.members.keys()
    }

    /// Invalidates the capture of this stream, if any.
    pub(crate) fn invalidate(&mut self, stream: usize) {
        if let Some((_, capture)) = self.of(stream) {
            capture.is_invalid = true;
            counts::invalidated_capture();
        }
    }

    /// Ends the capture of a destroyed stream, without a graph.
    pub(crate) fn end_of(&mut self, stream: usize) {
        if let Some(number) = self.members.get(&stream).copied() {
            self.members.retain(|_, member| *member != number);
            self.running.remove(&number);
        }
    }

    fn number(&mut self) -> u64 {
        self.numbered += 1;
        // These numbers differ from the handles of other kinds.
        0x6000_0000 + self.numbered * 0x10
    }
}

/// Refuses a call that is forbidden during a capture, and invalidates the capture.
pub(crate) fn forbid_unsafe_call() -> Outcome {
    let mode = MODE.get();
    let here = thread::current().id();
    let mut streams = lock_streams();
    let hit = streams.captures.running.values_mut().find(|capture| {
        let own = capture.thread == here && capture.mode != RELAXED && mode != RELAXED;
        own || capture.mode == GLOBAL && mode == GLOBAL
    });
    let Some(capture) = hit else { return Ok(()) };
    capture.is_invalid = true;
    counts::invalidated_capture();
    Err(Code::STREAM_CAPTURE_UNSUPPORTED)
}

/// Refuses to wait for captured work.
pub(crate) fn forbid_waiting(stream: usize) -> Outcome {
    forbid_naming(stream)?;
    forbid_unsafe_call()
}

/// Refuses to query the legacy stream while a stream ordered with it captures, and invalidates that capture.
pub(crate) fn forbid_implicit(stream: usize) -> Outcome {
    let mut streams = lock_streams();
    let refused = streams.check_not_implicit(stream);
    if refused.is_err() {
        for member in streams.blocking_captures() {
            streams.captures.invalidate(member);
        }
    }
    refused
}

/// Refuses a call that names a capturing stream, and invalidates the capture.
pub(crate) fn forbid_naming(stream: usize) -> Outcome {
    let mut streams = lock_streams();
    if streams.captures.of(stream).is_some() {
        streams.captures.invalidate(stream);
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    Ok(())
}

driver_call! { Device fn cuStreamBeginCapture_v2(handle: usize, mode: c_int) {
    if handle <= 1 {
        return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
    }
    let origin = stream::resolve(handle)?;
    let mut streams = lock_streams();
    if !(GLOBAL..=RELAXED).contains(&mode) || streams.captures.of(origin).is_some() {
        return Err(Code::INVALID_VALUE);
    }
    let number = streams.captures.number();
    let capture = Capture { origin, mode, thread: thread::current().id(), is_invalid: false, ops: Vec::new() };
    streams.captures.running.insert(number, capture);
    streams.captures.members.insert(origin, number);
    Ok(())
}}

driver_call! { Device fn cuStreamEndCapture(handle: usize, out: Out<u64>) {
    let stream = stream::resolve(handle)?;
    let mut streams = lock_streams();
    let found = streams.captures.of(stream).filter(|(_, capture)| capture.origin == stream);
    let (number, capture) = found.ok_or(Code::STREAM_CAPTURE_UNMATCHED)?;
    if capture.mode != RELAXED && capture.thread != thread::current().id() {
        return Err(Code::STREAM_CAPTURE_WRONG_THREAD);
    }
    streams.captures.members.retain(|_, member| *member != number);
    let capture = streams.captures.running.remove(&number).ok_or(Code::STREAM_CAPTURE_UNMATCHED)?;
    if capture.is_invalid {
        out.put(0)?;
        return Err(Code::STREAM_CAPTURE_INVALIDATED);
    }
    streams.captures.graphs.insert(number, capture.ops);
    out.put(number)
}}

driver_call! { Device fn cuStreamIsCapturing(handle: usize, out: Out<c_int>) {
    let stream = stream::resolve(handle)?;
    let mut streams = lock_streams();
    streams.check_not_implicit(stream)?;
    out.put(match streams.captures.of(stream) {
        None => NOT_CAPTURING,
        Some((_, capture)) => if capture.is_invalid { INVALIDATED } else { CAPTURING },
    })
}}

driver_call! { Process fn cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) {
    mode.swap(|wanted| {
        if (GLOBAL..=RELAXED).contains(&wanted) { Ok(MODE.replace(wanted)) } else { Err(Code::INVALID_VALUE) }
    })
}}

driver_call! { Device fn cuGraphInstantiateWithFlags(out: Out<u64>, graph: u64, _flags: u64) {
    let mut streams = lock_streams();
    let ops = streams.captures.graphs.get(&graph).cloned().ok_or(Code::INVALID_HANDLE)?;
    let number = streams.captures.number();
    streams.captures.graphs.insert(number, ops);
    out.put(number)
}}

driver_call! { Enqueue fn cuGraphLaunch(graph: u64, handle: usize) {
    let stream = stream::resolve(handle)?;
    let ops = lock_streams().captures.graphs.get(&graph).cloned().ok_or(Code::INVALID_HANDLE)?;
    ops.into_iter().try_for_each(|op| stream::enqueue(stream, op).map(drop))
}}

driver_call! { Device fn cuGraphDestroy(graph: u64) {
    lock_streams().captures.graphs.remove(&graph).map(drop).ok_or(Code::INVALID_HANDLE)
}}
