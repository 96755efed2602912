//! Streams: a queue and a worker thread each, run strictly in order, later.
//!
//! ```text
//!   enqueue ──► ops ──[ gate ]──► worker runs one ──► finished = its number ──► everybody who waits looks again
//! ```
//!
//! Owns the board: all streams, the gates, the captures, and whether the device is lost. One lock serves it all, a bell
//! each wakes the workers and one more the callers who wait, so that an enqueue wakes nobody but its worker; work itself
//! runs outside. A stream somebody destroys first finishes its work, as the real one does.
//!
//! S1: numbers of a stream's work grow by one each; work `n` is over when `finished >= n`. A ticket for a stream that
//! is gone is over. S2: once the device is lost, nothing is ever over again: queues are emptied, waits fail.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, ThreadId};
use std::time::Instant;

use crate::bell::Bell;
use crate::call::{Out, Outcome, driver_call, lock};
use crate::capture::{self, Captures};
use crate::code::Code;
use crate::handles::{Handles, LEGACY, LEGACY_BY_NAME, PER_THREAD};
use crate::link::{self, Pace};
use crate::op::Op;
use crate::toll::{self, Work};
use crate::{context, ledger};

const NON_BLOCKING: u32 = 1;

/// A piece of work that somebody may wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    stream: usize,
    number: u64,
}

/// What became of something enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Enqueued {
    /// It will run.
    Live(Ticket),
    /// The stream is capturing: it went into that graph.
    Captured(u64),
}

struct Stream {
    context: usize,
    /// `None` for the two default streams, which nobody created.
    created: Option<(u32, c_int)>,
    /// Wakes the worker.
    bell: Arc<Bell>,
    ops: VecDeque<(u64, Instant, Op)>,
    pace: Pace,
    enqueued: u64,
    finished: u64,
    running: bool,
    /// What runs only says that what came before it is over.
    marking: bool,
    held: bool,
    /// How many pieces of work may pass the closed gate.
    passes: u64,
    closing: bool,
}

impl Stream {
    fn is_idle(&self) -> bool {
        self.ops.is_empty() && !self.running
    }

    fn is_blocking(&self) -> bool {
        self.created.is_none_or(|(flags, _)| flags & NON_BLOCKING == 0)
    }
}

/// All streams and what they share.
pub(crate) struct Board {
    streams: BTreeMap<usize, Stream>,
    /// The legacy stream of a context, and the one of a thread in it.
    defaults: Vec<(usize, Option<ThreadId>, usize)>,
    created: usize,
    handles: Handles,
    hold_all: bool,
    lost: Option<Code>,
    pub(crate) captures: Captures,
}

static BOARD: Mutex<Board> = Mutex::new(Board {
    streams: BTreeMap::new(),
    defaults: Vec::new(),
    created: 0,
    handles: Handles::new(),
    hold_all: false,
    lost: None,
    captures: Captures::new(),
});
/// Wakes the callers who wait for work to be over.
static BELL: Bell = Bell::new();

/// The board, locked.
pub(crate) fn board() -> MutexGuard<'static, Board> {
    lock(&BOARD)
}

impl Board {
    fn is_over(&self, ticket: Ticket) -> bool {
        self.streams.get(&ticket.stream).is_none_or(|stream| stream.finished >= ticket.number)
    }

    fn open(&mut self, context: usize, created: Option<(u32, c_int)>) -> Result<usize, Code> {
        self.created += 1;
        let (handle, bell) = (self.created, Arc::new(Bell::new()));
        let stream = Stream {
            context,
            created,
            bell: Arc::clone(&bell),
            ops: VecDeque::new(),
            pace: Pace::default(),
            enqueued: 0,
            finished: 0,
            running: false,
            marking: false,
            held: false,
            passes: 0,
            closing: false,
        };
        self.streams.insert(handle, stream);
        let worker = thread::Builder::new().name(format!("stream {handle}"));
        worker.spawn(move || work(handle, &bell)).map_err(|_| Code::OUT_OF_MEMORY)?;
        Ok(handle)
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

    /// The legacy stream may not be touched while a stream that takes turns with it captures.
    pub(crate) fn check_not_implicit(&self, handle: usize) -> Outcome {
        let blocking = |member: &usize| self.streams.get(member).is_some_and(Stream::is_blocking);
        if self.is_legacy(handle) && self.captures.members().any(blocking) {
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
        Ok(())
    }

    fn last(&self, handle: usize) -> Ticket {
        Ticket { stream: handle, number: self.streams.get(&handle).map_or(0, |stream| stream.enqueued) }
    }

    /// Work that this stream has to wait for by the rule of the legacy stream: it and the blocking ones take turns.
    fn turns(&self, handle: usize) -> Vec<Ticket> {
        let Some(stream) = self.streams.get(&handle).filter(|stream| stream.is_blocking()) else { return Vec::new() };
        let legacy = self.is_legacy(handle);
        let others = self.streams.iter().filter(|&(&other, beside)| {
            beside.context == stream.context
                && other != handle
                && beside.is_blocking()
                && (legacy || self.is_legacy(other))
        });
        others.map(|(&other, _)| self.last(other)).filter(|&ticket| !self.is_over(ticket)).collect()
    }

    fn push(&mut self, handle: usize, op: Op) -> Result<Ticket, Code> {
        let stream = self.streams.get_mut(&handle).ok_or(Code::INVALID_HANDLE)?;
        stream.enqueued += 1;
        stream.ops.push_back((stream.enqueued, Instant::now(), op));
        stream.bell.ring();
        Ok(Ticket { stream: handle, number: stream.enqueued })
    }

    /// The worker's next piece of work and when it begins; `Ok(None)` when there is none yet, `Err` when there never
    /// will be.
    fn next(&mut self, handle: usize) -> Result<Option<(u64, Instant, Op)>, ()> {
        loop {
            let stream = self.streams.get(&handle).ok_or(())?;
            let gated = (stream.held || self.hold_all) && stream.passes == 0;
            let stands = match stream.ops.front() {
                None if stream.closing => return Err(()),
                None => return Ok(None),
                Some(&(.., Op::WaitFor(ticket))) => gated || !self.is_over(ticket),
                Some(_) => gated,
            };
            let stream = self.streams.get_mut(&handle).ok_or(())?;
            if stands {
                stream.pace.delay();
                return Ok(None);
            }
            let Some((number, enqueued, op)) = stream.ops.pop_front() else { return Ok(None) };
            stream.passes = stream.passes.saturating_sub(1);
            if !matches!(op, Op::WaitFor(_)) {
                stream.running = true;
                stream.marking = matches!(op, Op::Stamp(_) | Op::WriteValue { .. });
                return Ok(Some((number, stream.pace.begin(enqueued, Instant::now()), op)));
            }
            stream.finished = number;
            self.tell_of_an_end();
        }
    }

    fn finish(&mut self, handle: usize, number: u64, ended: Result<Instant, Code>) {
        if let Err(code) = ended {
            self.lose(code);
        }
        let lost = self.lost.is_some();
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.running = false;
            if !lost {
                stream.finished = number;
            }
            ended.into_iter().for_each(|ended| stream.pace.end(ended));
        }
        self.tell_of_an_end();
    }

    fn lose(&mut self, code: Code) {
        self.lost.get_or_insert(code);
        self.streams.values_mut().for_each(|stream| stream.ops.clear());
        BELL.ring();
        self.ring_all();
    }

    /// Wakes who may wait for it: callers, and streams whose turn comes after another's.
    fn tell_of_an_end(&self) {
        BELL.ring();
        let waits = |stream: &&Stream| matches!(stream.ops.front(), Some((.., Op::WaitFor(_))));
        self.streams.values().filter(waits).for_each(|stream| stream.bell.ring());
    }

    /// Wakes every worker: gates may have opened, or queues are empty.
    fn ring_all(&self) {
        self.streams.values().for_each(|stream| stream.bell.ring());
    }
}

fn work(handle: usize, bell: &Bell) {
    link::sleep_exactly();
    let mut board = board();
    loop {
        match board.next(handle) {
            Ok(Some((number, begins, op))) => {
                drop(board);
                let ended = op.run(begins);
                board = self::board();
                board.finish(handle, number, ended);
            }
            Ok(None) => board = bell.wait(board),
            Err(()) => {
                board.streams.remove(&handle);
                board.tell_of_an_end();
                return;
            }
        }
    }
}

/// Waits until the board answers; fails as soon as the device is lost (S2).
fn wait_until(mut answered: impl FnMut(&Board) -> bool) -> Outcome {
    let mut board = board();
    loop {
        match board.lost {
            Some(code) => return Err(code),
            None if answered(&board) => return Ok(()),
            None => board = BELL.wait(board),
        }
    }
}

/// Fails with what the device was lost to.
pub(crate) fn check_alive() -> Outcome {
    board().lost.map_or(Ok(()), Err)
}

/// The stream a caller means.
pub(crate) fn resolve(handle: usize) -> Result<usize, Code> {
    let context = context::current();
    let mut board = board();
    match handle {
        LEGACY | LEGACY_BY_NAME => board.default_stream(context?, None),
        PER_THREAD => board.default_stream(context?, Some(thread::current().id())),
        _ => board.handles.number(handle).ok_or_else(|| {
            drop(board);
            ledger::misused(format!("use of stream {handle:#x}, which is not or no longer there"));
            Code::INVALID_HANDLE
        }),
    }
}

/// Appends work, or hands it to the capture of a capturing stream.
pub(crate) fn enqueue(stream: usize, op: Op) -> Result<Enqueued, Code> {
    let mut board = board();
    if let Some(graph) = board.captures.record(stream, &op)? {
        return Ok(Enqueued::Captured(graph));
    }
    board.check_not_implicit(stream)?;
    for ticket in board.turns(stream) {
        board.push(stream, Op::WaitFor(ticket))?;
    }
    board.push(stream, op).map(Enqueued::Live)
}

/// The context a stream was made in.
pub(crate) fn context_of(stream: usize) -> Result<usize, Code> {
    board().streams.get(&stream).map(|stream| stream.context).ok_or(Code::INVALID_HANDLE)
}

/// Whether this work is over.
pub(crate) fn is_over(ticket: Ticket) -> bool {
    board().is_over(ticket)
}

/// Waits for this work.
pub(crate) fn wait_for_ticket(ticket: Ticket) -> Outcome {
    wait_until(|board| board.is_over(ticket))
}

/// Waits for all that was enqueued so far.
pub(crate) fn wait_for(stream: usize) -> Outcome {
    let last = board().last(stream);
    wait_for_ticket(last)
}

/// Waits until nothing is enqueued, on one context or on all.
pub(crate) fn wait_for_idle(context: Option<usize>) -> Outcome {
    wait_until(|board| {
        board.streams.values().all(|stream| context.is_some_and(|wanted| wanted != stream.context) || stream.is_idle())
    })
}

/// Pieces of work enqueued and not over. A mark that somebody may have seen already is none.
pub(crate) fn in_flight() -> u64 {
    let of = |stream: &Stream| stream.ops.len() as u64 + u64::from(stream.running && !stream.marking);
    board().streams.values().map(of).sum()
}

/// Streams that somebody created and did not destroy.
pub(crate) fn live() -> u64 {
    board().streams.values().filter(|stream| stream.created.is_some() && !stream.closing).count() as u64
}

/// Closes or opens the gate of one stream, by its handle or its number; 0 is the gate of all. Its number.
pub(crate) fn hold(stream: usize, held: bool) -> usize {
    let mut board = board();
    let number = board.handles.number(stream).unwrap_or(stream);
    if number == LEGACY {
        board.hold_all = held;
    } else if let Some(stream) = board.streams.get_mut(&number) {
        (stream.held, stream.passes) = (held, 0);
    }
    board.ring_all();
    number
}

/// Lets so many pieces of work through the closed gate.
pub(crate) fn let_pass(handle: usize, count: u64) {
    if let Some(stream) = board().streams.get_mut(&handle) {
        stream.passes += count;
        stream.bell.ring();
    }
}

/// From now on every call of kind `Device` or `Enqueue` fails with this.
pub(crate) fn lose(code: Code) {
    board().lose(code);
}

/// Opens every gate, forgets captures, heals the device and lets all work run out.
pub(crate) fn reset() {
    let mut board = board();
    board.hold_all = false;
    board.captures = Captures::new();
    for stream in board.streams.values_mut() {
        (stream.held, stream.passes) = (false, 0);
    }
    board.ring_all();
    while board.streams.values().any(|stream| !stream.is_idle()) {
        board = BELL.wait(board);
    }
    board.lost = None;
    // What a lost device left behind is over for those who still hold a ticket for it.
    board.streams.values_mut().for_each(|stream| stream.finished = stream.enqueued);
    board.tell_of_an_end();
}

fn create(out: Out<usize>, flags: u32, priority: c_int) -> Outcome {
    let context = context::current()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut board = board();
    let number = board.open(context, Some((flags, priority)))?;
    out.put(board.handles.give(number))
}

driver_call! { Device fn cuStreamCreate(out: Out<usize>, flags: u32) {
    create(out, flags, 0)
}}

driver_call! { Device fn cuStreamCreateWithPriority(out: Out<usize>, flags: u32, priority: c_int) {
    create(out, flags, priority)
}}

driver_call! { Device fn cuStreamDestroy_v2(handle: usize) {
    let number = resolve(handle)?;
    let mut board = board();
    board.captures.spoil(number);
    match board.streams.get_mut(&number) {
        Some(stream) if stream.created.is_some() => {
            stream.closing = true;
            stream.bell.ring();
            board.handles.take_back(number);
            Ok(())
        }
        _ => Err(Code::INVALID_HANDLE),
    }
}}

driver_call! { Device fn cuStreamSynchronize(handle: usize) {
    let stream = resolve(handle)?;
    capture::forbid_waiting(stream)?;
    wait_for(stream)
}}

driver_call! { Device fn cuStreamQuery(handle: usize) {
    let stream = resolve(handle)?;
    capture::forbid_waiting(stream)?;
    let _toll = toll::charge(Work::StreamQuery);
    let board = board();
    if board.is_over(board.last(stream)) { Ok(()) } else { Err(Code::NOT_READY) }
}}

driver_call! { Device fn cuStreamGetCtx(handle: usize, out: Out<usize>) {
    out.put(context_of(resolve(handle)?)?)
}}

driver_call! { Device fn cuStreamGetFlags(handle: usize, out: Out<u32>) {
    let stream = resolve(handle)?;
    out.put(board().streams.get(&stream).and_then(|stream| stream.created).map_or(0, |(flags, _)| flags))
}}

driver_call! { Device fn cuStreamGetPriority(handle: usize, out: Out<c_int>) {
    let stream = resolve(handle)?;
    out.put(board().streams.get(&stream).and_then(|stream| stream.created).map_or(0, |(_, priority)| priority))
}}
