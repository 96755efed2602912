//! Streams: each has a queue of operations and a worker thread, which runs them in order.
//!
//! ```text
//!   enqueue ──► ops ──[ gate ]──► worker runs one ──► finished = its number ──► threads that wait check again
//! ```
//!
//! One lock guards all streams and their handles, the gates, the captures, and the loss of the device. Operations run outside the
//! lock. A destroyed stream first finishes its work, as a real stream does.
//!
//! Handles are reused as in a real driver: the handle of a destroyed stream is free immediately, even while its work runs.
//! Internally a stream has a unique number.
//!
//! | invariant | |
//! | --- | --- |
//! | `stream-I1` | the operations of a stream are numbered from 1; operation `n` is complete when `finished >= n`, or when the stream is removed |
//! | `stream-I2` | once the device is lost, nothing completes: queues are emptied, waits fail |

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard};
use std::thread::{self, ThreadId};

use crate::call::Outcome;
use crate::capture::Captures;
use crate::code::Code;
use crate::sync::{lock, wait};
use crate::{context, counts};

mod calls;

const NON_BLOCKING: u32 = 1;

/// The handles of the default streams.
pub(crate) const LEGACY: usize = 0;
const LEGACY_BY_NAME: usize = 1;
const PER_THREAD: usize = 2;

const FIRST_HANDLE: usize = 0x5000_0000;
const HANDLE_STEP: usize = 0x10;

/// The work of an operation, which a worker runs without a lock. It is shared, since a graph repeats it. An error is a sticky
/// device fault.
pub(crate) type Work = Arc<dyn Fn() -> Outcome + Send + Sync>;

/// One operation on a stream.
#[derive(Clone)]
pub(crate) enum Op {
    Run(Work),
    /// Shows that the operations before it are complete.
    Signal(Work),
    /// Later operations wait for other work.
    WaitFor(Ticket),
}

/// An operation that can be waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    stream: usize,
    number: u64,
}

/// Operations that were enqueued.
#[derive(Clone)]
pub(crate) enum Enqueued {
    /// Operations that will run: one operation of a stream, or the running work of a whole context.
    Live(Vec<Ticket>),
    /// The stream is capturing: the operation is recorded in that graph.
    Captured(u64),
}

#[derive(Default)]
struct Stream {
    context: usize,
    /// The flags of its creation; `None` for a default stream.
    created: Option<u32>,
    /// Wakes the worker.
    worker: Arc<Condvar>,
    ops: VecDeque<(u64, Op)>,
    enqueued: u64,
    finished: u64,
    running: bool,
    /// The running operation only signals the completion of earlier operations.
    signalling: bool,
    held: bool,
    closing: bool,
}

impl Stream {
    fn is_idle(&self) -> bool {
        self.ops.is_empty() && !self.running
    }

    fn is_blocking(&self) -> bool {
        self.created.is_none_or(|flags| flags & NON_BLOCKING == 0)
    }
}

/// All streams and their shared state.
#[derive(Default)]
pub(crate) struct Streams {
    by_number: BTreeMap<usize, Stream>,
    /// The default streams: the context, the thread (`None` for the legacy stream), and the number of each.
    defaults: Vec<(usize, Option<ThreadId>, usize)>,
    created: usize,
    /// The number of the stream that each handle represents.
    handles: BTreeMap<usize, usize>,
    hold_all: bool,
    lost: Option<Code>,
    pub(crate) captures: Captures,
}

static STREAMS: LazyLock<Mutex<Streams>> = LazyLock::new(Mutex::default);
/// Wakes callers that wait for completion.
static CALLERS: Condvar = Condvar::new();

/// Locks the streams.
pub(crate) fn lock_streams() -> MutexGuard<'static, Streams> {
    lock(&STREAMS)
}

impl Streams {
    fn is_complete(&self, ticket: Ticket) -> bool {
        self.by_number.get(&ticket.stream).is_none_or(|stream| stream.finished >= ticket.number)
    }

    fn open(&mut self, context: usize, created: Option<u32>) -> Result<usize, Code> {
        self.created += 1;
        let (handle, waiters) = (self.created, Arc::new(Condvar::new()));
        let stream = Stream { context, created, worker: Arc::clone(&waiters), ..Stream::default() };
        self.by_number.insert(handle, stream);
        let builder = thread::Builder::new().name(format!("stream {handle}"));
        builder.spawn(move || work(handle, &waiters)).map_err(|_| Code::OUT_OF_MEMORY)?;
        Ok(handle)
    }

    /// Assigns the first free handle to the stream with this number.
    fn assign_handle(&mut self, number: usize) -> usize {
        let mut handles = (FIRST_HANDLE..).step_by(HANDLE_STEP);
        let unused = handles.find(|handle| !self.handles.contains_key(handle)).unwrap_or(FIRST_HANDLE);
        self.handles.insert(unused, number);
        unused
    }

    fn default_stream(&mut self, context: usize, thread: Option<ThreadId>) -> Result<usize, Code> {
        if let Some(&(.., handle)) = self.defaults.iter().find(|known| (known.0, known.1) == (context, thread)) {
            return Ok(handle);
        }
        let handle = self.open(context, None)?;
        self.defaults.push((context, thread, handle));
        Ok(handle)
    }

    fn is_legacy(&self, handle: usize) -> bool {
        self.defaults.iter().any(|&(_, thread, known)| known == handle && thread.is_none())
    }

    /// Refuses the use of the legacy stream while a stream that is ordered with it captures.
    pub(crate) fn check_not_implicit(&self, handle: usize) -> Outcome {
        let is_implicit = self.is_legacy(handle) && !self.blocking_captures().is_empty();
        if is_implicit { Err(Code::STREAM_CAPTURE_IMPLICIT) } else { Ok(()) }
    }

    /// Returns the streams that capture and are ordered with the legacy stream.
    pub(crate) fn blocking_captures(&self) -> Vec<usize> {
        let is_blocking = |member: &usize| self.by_number.get(member).is_some_and(Stream::is_blocking);
        self.captures.members().copied().filter(is_blocking).collect()
    }

    fn last(&self, handle: usize) -> Ticket {
        Ticket { stream: handle, number: self.by_number.get(&handle).map_or(0, |stream| stream.enqueued) }
    }

    /// Returns the operations that this stream must wait for, since the legacy stream and the blocking streams are ordered
    /// with each other.
    fn implicit_dependencies(&self, handle: usize) -> Vec<Ticket> {
        let Some(stream) = self.by_number.get(&handle).filter(|stream| stream.is_blocking()) else { return Vec::new() };
        let legacy = self.is_legacy(handle);
        let others = self.by_number.iter().filter(|&(&other, candidate)| {
            candidate.context == stream.context
                && other != handle
                && candidate.is_blocking()
                && (legacy || self.is_legacy(other))
        });
        others.map(|(&other, _)| self.last(other)).filter(|&ticket| !self.is_complete(ticket)).collect()
    }

    fn push(&mut self, handle: usize, op: Op) -> Result<Ticket, Code> {
        let stream = self.by_number.get_mut(&handle).ok_or(Code::INVALID_HANDLE)?;
        stream.enqueued += 1;
        stream.ops.push_back((stream.enqueued, op));
        stream.worker.notify_all();
        Ok(Ticket { stream: handle, number: stream.enqueued })
    }

    /// Returns the worker's next operation, or `Ok(None)` if none may run yet. Returns `Err` if the worker must end: the
    /// stream is removed, or is closing and has no operations left.
    fn next(&mut self, handle: usize) -> Result<Option<(u64, Work)>, ()> {
        loop {
            let stream = self.by_number.get(&handle).ok_or(())?;
            let gated = stream.held || self.hold_all;
            let must_wait = match stream.ops.front() {
                None if stream.closing => return Err(()),
                None => return Ok(None),
                Some(&(_, Op::WaitFor(ticket))) => gated || !self.is_complete(ticket),
                Some(_) => gated,
            };
            if must_wait {
                return Ok(None);
            }
            let stream = self.by_number.get_mut(&handle).ok_or(())?;
            let Some((number, op)) = stream.ops.pop_front() else { return Ok(None) };
            stream.signalling = matches!(op, Op::Signal(_));
            if let Op::Run(work) | Op::Signal(work) = op {
                stream.running = true;
                return Ok(Some((number, work)));
            }
            stream.finished = number;
            self.wake_dependents();
        }
    }

    fn finish(&mut self, handle: usize, number: u64, ended: Outcome) {
        if let Err(code) = ended {
            self.lose(code);
        }
        let lost = self.lost.is_some();
        if let Some(stream) = self.by_number.get_mut(&handle) {
            stream.running = false;
            if !lost {
                stream.finished = number;
            }
        }
        self.wake_dependents();
    }

    /// Loses the device: drops all queued operations, and every later call of kind `Device` or `Enqueue` fails with this code.
    pub(crate) fn lose(&mut self, code: Code) {
        self.lost.get_or_insert(code);
        self.by_number.values_mut().for_each(|stream| stream.ops.clear());
        CALLERS.notify_all();
        self.wake_all_workers();
    }

    /// Wakes the threads that may wait for a completion: callers, and workers of streams that wait for others.
    fn wake_dependents(&self) {
        CALLERS.notify_all();
        let waits = |stream: &&Stream| matches!(stream.ops.front(), Some((_, Op::WaitFor(_))));
        self.by_number.values().filter(waits).for_each(|stream| stream.worker.notify_all());
    }

    /// Wakes every worker: gates may be open, or queues empty.
    fn wake_all_workers(&self) {
        self.by_number.values().for_each(|stream| stream.worker.notify_all());
    }
}

fn work(handle: usize, waiters: &Condvar) {
    let mut streams = lock_streams();
    loop {
        match streams.next(handle) {
            Ok(Some((number, work))) => {
                drop(streams);
                let ended = work();
                streams = lock_streams();
                streams.finish(handle, number, ended);
            }
            Ok(None) => streams = wait(waiters, streams),
            Err(()) => {
                streams.by_number.remove(&handle);
                streams.wake_dependents();
                return;
            }
        }
    }
}

/// Waits until `condition` holds; fails as soon as the device is lost (`stream-I2`).
fn wait_until(mut condition: impl FnMut(&Streams) -> bool) -> Outcome {
    let mut streams = lock_streams();
    loop {
        match streams.lost {
            Some(code) => return Err(code),
            None if condition(&streams) => return Ok(()),
            None => streams = wait(&CALLERS, streams),
        }
    }
}

/// Fails with the code of a lost device.
pub(crate) fn check_alive() -> Outcome {
    lock_streams().lost.map_or(Ok(()), Err)
}

/// Returns the number of the stream behind a caller's handle.
pub(crate) fn resolve(handle: usize) -> Result<usize, Code> {
    let context = context::current();
    let mut streams = lock_streams();
    match handle {
        LEGACY | LEGACY_BY_NAME => streams.default_stream(context?, None),
        PER_THREAD => streams.default_stream(context?, Some(thread::current().id())),
        _ => streams.handles.get(&handle).copied().ok_or_else(|| {
            drop(streams);
            counts::misused(format!("use of stream {handle:#x}, which does not exist or is destroyed"));
            Code::INVALID_HANDLE
        }),
    }
}

/// Appends an operation, or records it if the stream captures.
pub(crate) fn enqueue(stream: usize, op: Op) -> Result<Enqueued, Code> {
    let mut streams = lock_streams();
    if let Some(graph) = streams.captures.record(stream, &op)? {
        return Ok(Enqueued::Captured(graph));
    }
    streams.check_not_implicit(stream)?;
    for ticket in streams.implicit_dependencies(stream) {
        streams.push(stream, Op::WaitFor(ticket))?;
    }
    streams.push(stream, op).map(|ticket| Enqueued::Live(vec![ticket]))
}

/// Returns the context of a stream.
pub(crate) fn context_of(stream: usize) -> Result<usize, Code> {
    lock_streams().by_number.get(&stream).map(|stream| stream.context).ok_or(Code::INVALID_HANDLE)
}

/// Returns tickets for the running work of a context, one for each stream. Fails while a stream captures, and invalidates that capture.
pub(crate) fn tickets_of(context: usize) -> Result<Vec<Ticket>, Code> {
    let mut streams = lock_streams();
    let of_context = |number: &usize| streams.by_number.get(number).is_some_and(|stream| stream.context == context);
    let capturing: Vec<usize> = streams.captures.members().copied().filter(of_context).collect();
    if capturing.is_empty() {
        let last = streams.by_number.keys().copied().filter(of_context).map(|number| streams.last(number));
        return Ok(last.filter(|&ticket| !streams.is_complete(ticket)).collect());
    }
    capturing.into_iter().for_each(|number| streams.captures.invalidate(number));
    Err(Code::STREAM_CAPTURE_UNSUPPORTED)
}

/// Returns whether this operation is complete.
pub(crate) fn is_complete(ticket: Ticket) -> bool {
    lock_streams().is_complete(ticket)
}

/// Waits for this operation.
pub(crate) fn wait_for_ticket(ticket: Ticket) -> Outcome {
    wait_until(|streams| streams.is_complete(ticket))
}

/// Waits for all operations enqueued so far.
pub(crate) fn wait_for(stream: usize) -> Outcome {
    let last = lock_streams().last(stream);
    wait_for_ticket(last)
}

/// Waits until no operation is enqueued or running, on one context or on all.
pub(crate) fn wait_for_idle(context: Option<usize>) -> Outcome {
    wait_until(|streams| {
        streams
            .by_number
            .values()
            .all(|stream| context.is_some_and(|wanted| wanted != stream.context) || stream.is_idle())
    })
}

/// Returns the number of operations in flight. A running signal does not count, since the host may see it already.
pub(crate) fn in_flight() -> u64 {
    let of = |stream: &Stream| stream.ops.len() as u64 + u64::from(stream.running && !stream.signalling);
    lock_streams().by_number.values().map(of).sum()
}

/// Returns the number of live streams that the program has created.
pub(crate) fn live() -> u64 {
    lock_streams().by_number.values().filter(|stream| stream.created.is_some() && !stream.closing).count() as u64
}

/// Destroys all streams of a context: after their work, or with `ends_work` together with their work.
pub(crate) fn close_of(context: usize, ends_work: bool) {
    let mut guard = lock_streams();
    let streams = &mut *guard;
    streams.defaults.retain(|&(of, ..)| of != context);
    for (&number, stream) in streams.by_number.iter_mut().filter(|(_, stream)| stream.context == context) {
        // The stream loses its context, since the next context may get the same handle.
        (stream.closing, stream.created, stream.context) = (true, None, 0);
        streams.handles.retain(|_, known| *known != number);
        streams.captures.end_of(number);
        if ends_work {
            stream.ops.clear();
        }
        stream.worker.notify_all();
    }
    // A running operation may use memory that is freed with the context.
    while ends_work && guard.by_number.values().any(|stream| stream.closing && stream.running) {
        guard = wait(&CALLERS, guard);
    }
}

/// Closes or opens the gate of one stream, by its handle or its number; 0 means all streams. Returns its number.
pub(crate) fn hold(stream: usize, held: bool) -> usize {
    let mut streams = lock_streams();
    let number = streams.handles.get(&stream).copied().unwrap_or(stream);
    if number == LEGACY {
        streams.hold_all = held;
    } else if let Some(stream) = streams.by_number.get_mut(&number) {
        stream.held = held;
    }
    streams.wake_all_workers();
    number
}

/// Opens every gate, drops captures, repairs the device and waits for all work.
pub(crate) fn reset() {
    let mut streams = lock_streams();
    streams.hold_all = false;
    streams.captures = Captures::default();
    streams.by_number.values_mut().for_each(|stream| stream.held = false);
    streams.wake_all_workers();
    while streams.by_number.values().any(|stream| !stream.is_idle()) {
        streams = wait(&CALLERS, streams);
    }
    streams.lost = None;
    // Callers may still have tickets for work that the lost device did not finish.
    streams.by_number.values_mut().for_each(|stream| stream.finished = stream.enqueued);
    streams.wake_dependents();
}
