//! Gets that wait for room: one line for threads and tasks, first come, first served.
//!
//! ```text
//!   line:  [first] ── handed a buffer by a put, or served by an attempt of its own ──▶ leaves, wakes the next
//!          [second] [third] ...                        timed out, cancelled, unwound ──▶ leaves, wakes the next
//! ```
//!
//! While a get waits,
//!
//! - a put hands its buffer to the first in line if it is of its class; else the buffer does not become idle: its memory
//!   becomes room, which the first in line takes;
//! - a buffer that was idle before the line formed may still serve a hit of its class, once: its put comes here;
//! - a get that finds nothing idle joins the line. It may pass the first only with memory *beside* it: all that passed the
//!   first and has not come back fits into what the ceiling leaves beside the first's request. So the first is
//!   served, at the latest, when all buffers that were held or idle when it became first have come back, whatever passes it;
//! - only the first in line attempts to find memory, so that small requests cannot overtake a large one without end.
//!
//! A hit and a put pay nothing while no get waits but one load: [`Waiters::has_waiters`].
//!
//! The order holds within one pool. A partition has a line of its own; its gets and those of its parent meet at the shared
//! ceiling without an order between them.
//!
//! Owns the line. Never acquires memory: that is the [`Server`]'s.
//!
//! - waiters-I1: no wake-up is lost. A put made after a get joined the line finds it, or that get's first attempt finds the
//!   buffer. For the exception see `has_waiters`; `patience` bounds each sleep.
//! - waiters-I2: a get that leaves the line, in whatever way, wakes the next, and what it was handed is passed on.
//! - waiters-I3: nothing is handed to a get that has left the line: both happen under the lock of the line.

mod turn;
mod waiter;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

pub(super) use self::turn::{Server, Turn};
use self::waiter::Waiter;
use crate::size_class::Class;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};
use crate::sync::process::AtomicU64;

/// A line of waiting gets, which puts hand items of type `T` to.
#[derive(Debug)]
pub(super) struct Waiters<T> {
    waiting: AtomicUsize,
    total: AtomicU64,
    line: Mutex<Line<T>>,
    /// Whether the pool was told that a get waits. Locked while it is told, so that it is told in order.
    attended: Mutex<bool>,
}

#[derive(Debug)]
struct Line<T> {
    gets: VecDeque<Arc<Waiter<T>>>,
    /// Gets that have ever joined.
    joined: u64,
    /// Bytes that passed the first in line and have not come back.
    beside_bytes: u64,
}

/// What a put is to do with its buffer.
#[derive(Debug)]
pub(super) enum Offer<T> {
    /// Nothing: the first in line has it.
    HandedOver,
    /// Make room of it: it is of another class than the first in line waits for.
    MakeRoom(T),
    /// Keep it: no get waits any more.
    Keep(T),
}

/// Whether a get that finds nothing idle may look for memory.
#[derive(Debug)]
pub(super) enum Pass {
    /// No get waits.
    Free,
    /// Beside the first in line, which has this number.
    Beside { number: u64 },
    /// Not before those that wait.
    Behind { waiting: u64, first_bytes: u64 },
}

/// Memory beside the first in line, in the units in which memory is held.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Beside {
    /// What the ceiling leaves beside the first's request.
    pub(super) room_bytes: u64,
    /// What the get that would pass needs of it.
    pub(super) needed_bytes: u64,
}

impl<T> Default for Waiters<T> {
    fn default() -> Self {
        let line = Line { gets: VecDeque::new(), joined: 0, beside_bytes: 0 };
        Self {
            waiting: AtomicUsize::new(0),
            total: AtomicU64::new(0),
            line: Mutex::new(line),
            attended: Mutex::new(false),
        }
    }
}

impl<T> Waiters<T> {
    #[inline]
    pub(super) fn has_waiters(&self) -> bool {
        // SeqCst, with the increment in `join`: a waiter that this load misses joined after it, so its first attempt sees
        // the put that came before this load. The put's own store may still be in a store buffer then, unless the put went
        // through a lock that the attempt takes too; the waiter's patience covers that rare case, which is cheaper than a
        // barrier in every put.
        self.waiting.load(Ordering::SeqCst) > 0
    }

    /// Gets that have ever joined the line.
    pub(super) fn total(&self) -> u64 {
        // Relaxed: a figure.
        self.total.load(Ordering::Relaxed)
    }

    /// Gets that wait now.
    pub(super) fn waiting(&self) -> u64 {
        // Relaxed: a figure.
        self.waiting.load(Ordering::Relaxed) as u64
    }

    /// Bytes that the waiting gets ask for, in their order.
    pub(super) fn waiting_bytes(&self) -> Vec<u64> {
        if !self.has_waiters() {
            return Vec::new();
        }
        self.line.lock().gets.iter().map(|waiter| waiter.class.bytes as u64).collect()
    }

    fn join(&self, class: Class, deadline: Instant, attend: impl FnOnce(bool)) -> Arc<Waiter<T>> {
        // SeqCst, before the first attempt: a later put sees this count, and looks at the line.
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut line = self.line.lock();
        line.joined += 1;
        let waiter = Arc::new(Waiter::new(line.joined, class, deadline));
        line.gets.push_back(waiter.clone());
        drop(line);
        self.attend(attend);
        // Relaxed: a figure. Counted after the waiter joined, so a reader that sees the count finds the line as long.
        self.total.fetch_add(1, Ordering::Relaxed);
        waiter
    }

    /// Whether `waiter` is the first in line. Late tasks before it leave the line.
    fn is_first(&self, waiter: &Arc<Waiter<T>>) -> bool {
        let mut line = self.line.lock();
        let next = self.remove_late(&mut line);
        let is_first = line.is_first(waiter);
        drop(line);
        next.iter().filter(|_| !is_first).for_each(|next| next.wake());
        is_first
    }

    /// When the get behind `waiter` is to look again by itself: the first soon, since room may come unannounced, and the
    /// others when the first is late.
    fn next_look(&self, waiter: &Arc<Waiter<T>>, soon: Instant) -> Instant {
        let line = self.line.lock();
        let at = line.gets.front().filter(|_| !line.is_first(waiter)).map_or(soon, |first| first.deadline);
        at.min(waiter.deadline)
    }

    /// Takes tasks that are late off the front of the line: one that is polled no more must not hold up the others. Returns
    /// the get that is first now, if any left.
    fn remove_late(&self, line: &mut Line<T>) -> Option<Arc<Waiter<T>>> {
        let mut removed = 0;
        while line.gets.front().is_some_and(|first| first.is_task() && Instant::now() >= first.deadline) {
            line.gets.pop_front();
            removed += 1;
        }
        // SeqCst, like the increment.
        self.waiting.fetch_sub(removed, Ordering::SeqCst);
        if removed > 0 { line.note_left(0) } else { None }
    }

    /// Takes `waiter` out of the line. Returns what it was handed.
    fn leave(&self, waiter: &Arc<Waiter<T>>, attend: impl FnOnce(bool)) -> Option<T> {
        let mut line = self.line.lock();
        let place = line.gets.iter().position(|other| Arc::ptr_eq(other, waiter));
        let next = place.and_then(|place| {
            line.gets.remove(place);
            line.note_left(place)
        });
        let handed = waiter.take_handed();
        drop(line);
        if place.is_some() {
            // SeqCst, like the increment.
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            self.attend(attend);
        }
        next.iter().for_each(|next| next.wake());
        handed
    }

    /// Offers what a put brings to the first in line. `passed` is the number of the get that it passed as `beside_bytes`,
    /// if any.
    pub(super) fn offer(
        &self,
        item: T,
        class: Class,
        (passed, beside_bytes): (u64, u64),
        attend: impl FnOnce(bool),
    ) -> Offer<T> {
        let mut line = self.line.lock();
        line.end_pass(passed, beside_bytes);
        self.remove_late(&mut line);
        let Some(first) = line.gets.front() else {
            drop(line);
            self.attend(attend);
            return Offer::Keep(item);
        };
        if first.class != class {
            return Offer::MakeRoom(item);
        }
        first.hand(item);
        let first = line.gets.pop_front();
        let next = line.note_left(0);
        drop(line);
        // SeqCst, like the increment.
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        self.attend(attend);
        first.iter().chain(&next).for_each(|waiter| waiter.wake());
        Offer::HandedOver
    }

    /// Whether a get may look for memory while others wait. `beside` is called with the class of the first in line.
    pub(super) fn pass(&self, beside: impl FnOnce(Class) -> Beside) -> Pass {
        if !self.has_waiters() {
            return Pass::Free;
        }
        let mut line = self.line.lock();
        let Some(first) = line.gets.front() else { return Pass::Free };
        let (number, first_bytes) = (first.number, first.class.bytes as u64);
        let Beside { room_bytes, needed_bytes } = beside(first.class);
        match line.beside_bytes.checked_add(needed_bytes).filter(|&sum| needed_bytes > 0 && sum <= room_bytes) {
            Some(sum) => {
                line.beside_bytes = sum;
                Pass::Beside { number }
            }
            None => Pass::Behind { waiting: line.gets.len() as u64, first_bytes },
        }
    }

    /// A get that passed as `beside_bytes` found no memory after all.
    pub(super) fn end_pass(&self, number: u64, beside_bytes: u64) {
        self.line.lock().end_pass(number, beside_bytes);
    }

    /// Lets the first in line look again.
    pub(super) fn wake_first(&self) {
        let first = self.line.lock().gets.front().cloned();
        first.iter().for_each(|first| first.wake());
    }

    /// Tells the pool whether a get waits, if that has changed.
    fn attend(&self, attend: impl FnOnce(bool)) {
        let mut attended = self.attended.lock();
        // SeqCst, like the changes. After a change by another thread that thread comes here too.
        let is_waiting = self.waiting.load(Ordering::SeqCst) > 0;
        if *attended != is_waiting {
            *attended = is_waiting;
            attend(is_waiting);
        }
    }
}

impl<T> Line<T> {
    fn is_first(&self, waiter: &Arc<Waiter<T>>) -> bool {
        self.gets.front().is_some_and(|first| Arc::ptr_eq(first, waiter))
    }

    /// The get at `place` has left. Returns the one that is first now, if it was not before.
    fn note_left(&mut self, place: usize) -> Option<Arc<Waiter<T>>> {
        if place > 0 {
            return None;
        }
        // What passed the one that left counts as held when the next became first.
        self.beside_bytes = 0;
        self.gets.front().cloned()
    }

    fn end_pass(&mut self, number: u64, bytes: u64) {
        if self.gets.front().is_some_and(|first| first.number == number) {
            self.beside_bytes = self.beside_bytes.saturating_sub(bytes);
        }
    }
}

#[cfg(all(test, loom))]
mod models;

#[cfg(all(test, not(loom)))]
mod tests;
