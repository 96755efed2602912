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
//! The order holds within one pool, whichever partition a get is of. At the limit of a partition gets wait in a line of the
//! partition for their claim, and join the line of the pool after that.
//!
//! Owns the line. Never acquires memory: that is the [`Server`]'s.
//!
//! - waiters-I1: no wake-up is lost. A put made after a get joined the line finds it, or that get's first attempt finds the
//!   buffer. For the exception see `has_waiters`; `patience` bounds each sleep. The end of a copy wakes nobody, so the begin
//!   of a copy wakes the head of the queue, which looks at short intervals while copies are in flight.
//! - waiters-I2: a get that leaves the line, in whatever way, wakes the next, and what it was handed is passed on.
//! - waiters-I3: nothing is handed to a get that has left the line: both happen under the lock of the line.
//! - waiters-I4: the pool attends to the line exactly while a get is in it: each change of the line is a [`Waiters::change`],
//!   which tells the pool under the lock of the line.

mod turn;
mod waiter;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(super) use self::turn::{Look, Server, Turn};
use self::waiter::Waiter;
use crate::size_class::Class;
use pinpool_os::sync::Mutex;
use pinpool_os::sync::atomic::{AtomicUsize, Ordering};
use pinpool_os::sync::process::AtomicU64;

/// Longest wait for room.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(1 << 30);

/// When a request that begins now has waited for `wait`.
pub(super) fn deadline(wait: Duration) -> Instant {
    Instant::now() + wait.min(WAIT_MAX)
}

/// A line of waiting gets, which puts hand items of type `T` to.
#[derive(Debug)]
pub(super) struct Waiters<T> {
    /// Gets in the line. Written under its lock.
    waiting: AtomicUsize,
    total: AtomicU64,
    line: Mutex<Line<T>>,
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
        Self { waiting: AtomicUsize::new(0), total: AtomicU64::new(0), line: Mutex::new(line) }
    }
}

impl<T> Waiters<T> {
    #[inline]
    pub(super) fn has_waiters(&self) -> bool {
        // SeqCst, with the store in `change`: a waiter that this load misses joined after it, so its first attempt sees
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

    /// How long those that wait have waited so far, in sum.
    pub(super) fn waiting_for(&self, now: Instant) -> Duration {
        self.line.lock().gets.iter().map(|waiter| now.saturating_duration_since(waiter.begun)).sum()
    }

    /// Changes who is in the line. Tells the pool by `attend` if the line has become empty or is empty no more, and wakes the
    /// get that is first now in place of another.
    fn change<R>(&self, attend: impl FnOnce(bool), change: impl FnOnce(&mut Line<T>) -> R) -> R {
        let mut line = self.line.lock();
        let first_before = line.first_number();
        let result = change(&mut line);
        // SeqCst: a put that comes after the first attempt of a get that has joined sees it.
        self.waiting.store(line.gets.len(), Ordering::SeqCst);
        let first = line.first_number();
        if first.is_some() != first_before.is_some() {
            attend(first.is_some());
        }
        let mut next = None;
        if first != first_before {
            // What passed the one that left counts as held when the next became first.
            line.beside_bytes = 0;
            next = line.gets.front().filter(|_| first_before.is_some()).cloned();
        }
        drop(line);
        next.iter().for_each(|next| next.wake());
        result
    }

    fn join(&self, class: Class, deadline: Instant, attend: impl FnOnce(bool)) -> Arc<Waiter<T>> {
        let waiter = self.change(attend, |line| {
            line.joined += 1;
            let waiter = Arc::new(Waiter::new(line.joined, class, deadline));
            line.gets.push_back(waiter.clone());
            waiter
        });
        // Relaxed: a figure. Counted after the waiter joined, so a reader that sees the count finds the line as long.
        self.total.fetch_add(1, Ordering::Relaxed);
        waiter
    }

    /// Whether `waiter` is the first in line. Late tasks before it leave the line.
    fn is_first(&self, waiter: &Arc<Waiter<T>>, attend: impl FnOnce(bool)) -> bool {
        self.change(attend, |line| {
            line.remove_late();
            line.is_first(waiter)
        })
    }

    /// When the get behind `waiter` is to look again by itself: the first soon, since room may come unannounced, and the
    /// others when the first is late.
    fn next_look(&self, waiter: &Arc<Waiter<T>>, soon: Instant) -> Instant {
        let line = self.line.lock();
        let first = line.gets.front().filter(|_| !line.is_first(waiter)).map(|first| first.deadline);
        // A late thread is about to leave.
        first.filter(|&late| late > Instant::now()).unwrap_or(soon).min(waiter.deadline)
    }

    /// Takes `waiter` out of the line. Returns what it was handed.
    fn leave(&self, waiter: &Arc<Waiter<T>>, attend: impl FnOnce(bool)) -> Option<T> {
        self.change(attend, |line| {
            line.gets.retain(|other| !Arc::ptr_eq(other, waiter));
            waiter.take_handed()
        })
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
        let mut handed = None;
        let offer = self.change(attend, |line| {
            line.end_pass(passed, beside_bytes);
            line.remove_late();
            match line.gets.front() {
                None => Offer::Keep(item),
                Some(first) if first.class != class => Offer::MakeRoom(item),
                Some(first) => {
                    first.hand(item);
                    handed = line.gets.pop_front();
                    Offer::HandedOver
                }
            }
        });
        handed.iter().for_each(|first| first.wake());
        offer
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

    /// Lets all that wait look again.
    pub(super) fn wake_all(&self) {
        let gets: Vec<_> = self.line.lock().gets.iter().cloned().collect();
        gets.iter().for_each(|get| get.wake());
    }

    /// Lets the first in line look again.
    pub(super) fn wake_first(&self) {
        let first = self.line.lock().gets.front().cloned();
        first.iter().for_each(|first| first.wake());
    }
}

impl<T> Line<T> {
    fn is_first(&self, waiter: &Arc<Waiter<T>>) -> bool {
        self.gets.front().is_some_and(|first| Arc::ptr_eq(first, waiter))
    }

    /// The number of the first in line.
    fn first_number(&self) -> Option<u64> {
        self.gets.front().map(|first| first.number)
    }

    /// Takes tasks that are late off the front: one that is polled no more must not hold up the others.
    fn remove_late(&mut self) {
        while self.gets.front().is_some_and(|first| first.is_task() && Instant::now() >= first.deadline) {
            self.gets.pop_front();
        }
    }

    fn end_pass(&mut self, number: u64, bytes: u64) {
        if self.first_number() == Some(number) {
            self.beside_bytes = self.beside_bytes.saturating_sub(bytes);
        }
    }
}

#[cfg(all(test, pinpool_loom))]
mod models;

#[cfg(all(test, not(pinpool_loom)))]
mod tests;
