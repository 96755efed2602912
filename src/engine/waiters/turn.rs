//! The turn of one get in the line: the same for a thread that waits and for a task.

use std::sync::Arc;
use std::task::Context;
use std::time::{Duration, Instant};

use super::Waiters;
use super::waiter::Waiter;
use crate::engine::memory::{SlowCalls, Stop};
use crate::size_class::Class;

/// What the line asks of its pool.
pub(in crate::engine) trait Server {
    /// What is handed to a waiting get.
    type Item;
    /// Why there is none.
    type Refusal;

    fn waiters(&self) -> &Waiters<Self::Item>;

    /// From now on, or no longer, each put is to look at the line. Called under the line's lock, so it calls nothing of the
    /// line, nor of a user.
    fn attend(&self, is_waiting: bool);

    /// Puts back what is ready to be put back and nobody has put yet.
    fn sweep(&self);

    /// Serves the first in line, which was refused before, if it can with such `calls`.
    fn serve(
        self: &Arc<Self>,
        class: Class,
        refused: &Self::Refusal,
        calls: SlowCalls,
    ) -> Result<Self::Item, Stop<Self::Refusal>>;

    /// A get took what it was handed.
    fn note_taken(&self) {}

    /// A get that joined the line has left it after this time.
    fn note_waited(&self, _took: Duration) {}

    /// A get that was handed `item` has gone.
    fn take_back(&self, item: Self::Item);

    /// Longest sleep of the first in line, which joined or was last woken at `since`, for memory whose return wakes nobody.
    fn patience(&self, since: Instant) -> Duration;

    /// Whether the first in line, refused for this reason, waits in vain.
    fn is_hopeless(&self, _refusal: &Self::Refusal) -> bool {
        false
    }
}

/// Shortest time that an attempt may wait for driver calls of other threads, however soon the next look is due.
const CALL_PATIENCE: Duration = Duration::from_micros(500);

/// What one look of a get in line finds.
#[derive(Debug, PartialEq)]
pub(in crate::engine) enum Look<T> {
    /// It has been served; `None` if its deadline has passed or there is no hope.
    Over(Option<T>),
    Pending,
    /// It is to look again with [calls](Turn::call).
    NeedsCall,
}

/// A place in the line. Its drop leaves the line, also while its thread unwinds, and passes on what it was handed.
#[derive(Debug)]
pub(in crate::engine) struct Turn<S: Server> {
    server: Arc<S>,
    waiter: Arc<Waiter<S::Item>>,
    begun: Instant,
}

impl<S: Server> Turn<S> {
    /// Joins the line behind all others.
    pub(in crate::engine) fn join(server: &Arc<S>, class: Class, deadline: Instant) -> Self {
        let waiter = server.waiters().join(class, deadline, |is_waiting| server.attend(is_waiting));
        Self { server: server.clone(), waiter, begun: Instant::now() }
    }

    /// Waits until it is served, its deadline has passed or there is no hope; `refusal` becomes that of the last attempt.
    pub(in crate::engine) fn wait(self, refusal: &mut S::Refusal) -> Option<S::Item> {
        loop {
            if let Look::Over(served) = self.attempt(refusal, |until| SlowCalls::Until(until, until)) {
                return served;
            }
            if self.is_over(Instant::now(), refusal) {
                return self.taken(self.leave());
            }
            self.waiter.sleep(self.next_look());
        }
    }

    /// Does for a task what [`wait`](Self::wait) does for a thread, without calls and without sleeping.
    pub(in crate::engine) fn poll(&self, context: &mut Context<'_>, refusal: &mut S::Refusal) -> Look<S::Item> {
        // Before the attempt: what comes after it wakes this task.
        self.waiter.register(context.waker());
        self.look(refusal, |_| SlowCalls::None)
    }

    /// Looks once more, with calls.
    pub(in crate::engine) fn call(&self, refusal: &mut S::Refusal) -> Look<S::Item> {
        self.look(refusal, |until| SlowCalls::After(until, until))
    }

    fn look(&self, refusal: &mut S::Refusal, calls: fn(Instant) -> SlowCalls) -> Look<S::Item> {
        match self.attempt(refusal, calls) {
            Look::Pending if self.is_over(Instant::now(), refusal) => Look::Over(self.taken(self.leave())),
            looked => looked,
        }
    }

    fn is_over(&self, now: Instant, refusal: &S::Refusal) -> bool {
        now >= self.waiter.deadline || self.server.is_hopeless(refusal)
    }

    /// When it is to look again without having been woken.
    pub(in crate::engine) fn next_look(&self) -> Instant {
        self.server.waiters().next_look(&self.waiter, Instant::now() + self.patience())
    }

    fn patience(&self) -> Duration {
        self.server.patience(self.waiter.since())
    }

    /// How long an attempt may wait for driver calls of other threads.
    pub(in crate::engine) fn call_patience(&self) -> Duration {
        self.patience().max(CALL_PATIENCE)
    }

    fn attempt(&self, refusal: &mut S::Refusal, calls: fn(Instant) -> SlowCalls) -> Look<S::Item> {
        let is_first = || self.server.waiters().is_first(&self.waiter, |is_waiting| self.server.attend(is_waiting));
        if is_first() {
            // What it puts back is handed to the first in line, which may be this get.
            self.server.sweep();
        }
        if let Some(item) = self.taken(self.waiter.take_handed()) {
            return Look::Over(Some(item));
        }
        if !is_first() {
            // Another thread may have handed something over since.
            return self.taken(self.waiter.take_handed()).map_or(Look::Pending, |item| Look::Over(Some(item)));
        }
        // Short, so that it finds soon what it is handed meanwhile.
        let until = self.waiter.deadline.min(Instant::now() + self.call_patience());
        match self.server.serve(self.waiter.class, refusal, calls(until)) {
            Ok(item) => Look::Over(Some(item)),
            Err(Stop::NeedsCall) => Look::NeedsCall,
            Err(Stop::Refused(later)) => {
                *refusal = later;
                Look::Pending
            }
        }
    }

    fn taken(&self, handed: Option<S::Item>) -> Option<S::Item> {
        handed.inspect(|_| self.server.note_taken())
    }

    /// Leaves the line. Returns what it was handed.
    fn leave(&self) -> Option<S::Item> {
        self.server.waiters().leave(&self.waiter, |is_waiting| self.server.attend(is_waiting))
    }
}

impl<S: Server> Drop for Turn<S> {
    fn drop(&mut self) {
        if let Some(item) = self.leave() {
            self.server.take_back(item);
        }
        self.server.note_waited(self.begun.elapsed());
    }
}
