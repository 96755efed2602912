//! A get that a task awaits.
//!
//! ```text
//!   poll ─▶ look without calls ─┬─▶ a buffer, or an error
//!             ▲                 ├─▶ in line: woken by a put, by its deadline, or to look again
//!             │                 └─▶ a call of the source is needed: the thread of the pool looks with calls ─┐
//!             └────────────────── woken, with a buffer, an error, or the place in line ◀────────────────────┘
//! ```
//!
//! The place in line goes with the call and comes back with its result, so a get never has two. Its wait counts from its first
//! poll. When the wait is over while a driver call runs, or while the calls of other tasks delay it, the get fails, and the next
//! get has the memory once the call returns. A get with a wait of zero needs no room but may need a call: it waits for the call.

use std::future::Future;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::{Pool, Request, buffer};
use crate::buffer::PinnedBuf;
use crate::engine::{Begun, Block, Core, Ledger, Polled, SideCall, WaitingClaim, WaitingGet, Wanted};
use crate::error::Result;
use crate::maintenance_thread::Reminder;
use crate::quota::Claim;

/// The future of [`Pool::get_async`]: a buffer, or the error of [`Pool::get`].
///
/// Begins when it is first polled. Dropped before it is ready, it leaves the line, and a buffer that it was handed
/// meanwhile goes to the next get, as does memory that is being page-locked for it. While it waits it keeps its place also if it is
/// not polled, until its wait has passed.
///
/// Polled again after it was ready, it begins another get.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct GetFuture {
    // Before the pool: a get that leaves the line may put a buffer back.
    state: State,
    pool: Pool,
    request: Request,
    wait: Duration,
    /// When it gives up calls; `None` before it begins, and with a wait of zero.
    deadline: Option<Instant>,
    ledger: Option<Arc<Ledger>>,
    /// What its partition has claimed for it.
    claim: Option<Claim>,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    New,
    /// For room in its partition.
    Claims(WaitingClaim),
    Waits(WaitingGet),
    /// A thread of the pool makes calls.
    Calls(CallInProgress),
}

/// Calls for a get.
#[derive(Debug)]
struct CallInProgress {
    call: SideCall<Result<Step>>,
    wanted: Wanted,
    /// Wakes the task at the deadline.
    reminder: Option<Reminder>,
}

/// How far a get has come.
#[derive(Debug)]
enum Step {
    Served(PinnedBuf),
    Waits(WaitingGet),
}

impl GetFuture {
    pub(super) fn new(pool: Pool, request: Request, ledger: Option<Arc<Ledger>>) -> Self {
        let wait = pool.longest_wait(request);
        Self { state: State::New, pool, request, wait, deadline: None, ledger, claim: None }
    }

    /// In a child of `fork` the line stays as it was: its locks may be held by threads that do not exist here.
    fn forget_if_forked(&mut self) {
        if self.pool.core().is_forked() {
            std::mem::forget((std::mem::take(&mut self.state), self.claim.take()));
        }
    }

    /// Begins the get. Slow calls are made on a thread of the pool.
    fn begin(&mut self) -> Result<Option<PinnedBuf>> {
        let Some(wanted) = self.pool.wanted(self.request, self.ledger.as_ref())? else {
            return Ok(Some(PinnedBuf::empty()));
        };
        let now = Instant::now();
        self.deadline = now.checked_add(self.wait).filter(|_| !self.wait.is_zero());
        match &wanted.account {
            None => self.begin_with_claim(&wanted),
            Some(account) => match account.begin_claim(&wanted, self.wait)? {
                Ok(claim) => {
                    self.claim = Some(claim);
                    self.begin_with_claim(&wanted)
                }
                Err(waiting) => {
                    self.state = State::Claims(waiting);
                    Ok(None)
                }
            },
        }
    }

    /// Begins as a get of the pool, with what is left of the wait.
    fn begin_with_claim(&mut self, wanted: &Wanted) -> Result<Option<PinnedBuf>> {
        let (core, now) = (self.pool.core(), Instant::now());
        let wait = self.deadline.map_or(self.wait, |deadline| deadline.saturating_duration_since(now));
        self.state = match core.begin_get(wanted, wait, now)? {
            Some(Begun::Served(block)) => return Ok(Some(self.buffer(block, wanted))),
            Some(Begun::Waits(waiting)) => State::Waits(waiting),
            None => {
                let (wanted, of_call) = (wanted.clone(), wanted.clone());
                self.call(wanted, move |core| core.begin_get_with_calls(&of_call, wait, now))
            }
        };
        Ok(None)
    }

    fn buffer(&self, block: Block, wanted: &Wanted) -> PinnedBuf {
        buffer(self.pool.core(), block, wanted, self.request.align)
    }

    /// Has a thread of the pool make `call`. With the pool, which cannot end during the call.
    fn call(&self, wanted: Wanted, call: impl FnOnce(&Arc<Core>) -> Result<Begun> + Send + 'static) -> State {
        let (pool, align, of_call) = (self.pool.clone(), self.request.align, wanted.clone());
        let call = move || {
            Ok(match call(pool.core())? {
                Begun::Served(block) => Step::Served(buffer(pool.core(), block, &of_call, align)),
                Begun::Waits(waiting) => Step::Waits(waiting),
            })
        };
        State::Calls(CallInProgress { call: self.pool.core().aside(call), wanted, reminder: None })
    }

    fn advance(&mut self, context: &mut Context<'_>) -> Poll<Result<PinnedBuf>> {
        loop {
            match std::mem::take(&mut self.state) {
                State::New => match self.begin() {
                    Ok(None) => {}
                    Ok(Some(buf)) => return Poll::Ready(Ok(buf)),
                    Err(error) => return Poll::Ready(Err(error)),
                },
                State::Claims(mut waiting) => {
                    let account = self.pool.account().cloned();
                    match account.and_then(|account| account.poll_claim(&mut waiting, context)) {
                        None => {
                            self.state = State::Claims(waiting);
                            return Poll::Pending;
                        }
                        Some(claimed) => {
                            let wanted = waiting.into_wanted();
                            self.claim = Some(claimed?);
                            if let Some(buf) = self.begin_with_claim(&wanted)? {
                                return Poll::Ready(Ok(buf));
                            }
                        }
                    }
                }
                State::Waits(mut waiting) => match self.pool.core().poll_get(&mut waiting, context) {
                    Polled::Over(served) => {
                        let wanted = waiting.into_wanted();
                        return Poll::Ready(served.map(|block| self.buffer(block, &wanted)));
                    }
                    Polled::Pending => {
                        self.state = State::Waits(waiting);
                        return Poll::Pending;
                    }
                    Polled::NeedsCall => {
                        self.state = self.call(waiting.wanted().clone(), |core| core.call_for(waiting));
                    }
                },
                State::Calls(mut calls) => match calls.call.poll(context) {
                    Poll::Pending if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) => {
                        let served = self.pool.core().give_up_call(&calls.wanted, self.wait);
                        return Poll::Ready(served.map(|block| self.buffer(block, &calls.wanted)));
                    }
                    Poll::Pending => {
                        if let Some(deadline) = self.deadline {
                            calls.reminder = self.pool.core().remind(deadline, context.waker());
                        }
                        self.state = State::Calls(calls);
                        return Poll::Pending;
                    }
                    Poll::Ready(Some(Ok(Step::Waits(waiting)))) => self.state = State::Waits(waiting),
                    Poll::Ready(Some(Ok(Step::Served(buf)))) => return Poll::Ready(Ok(buf)),
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(error)),
                    // As on a thread: users' code is caught before, so an error of the pool itself.
                    Poll::Ready(None) => resume_unwind(Box::new("a get panicked on the thread of its pool")),
                },
            }
        }
    }
}

impl Future for GetFuture {
    type Output = Result<PinnedBuf>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Err(error) = self.pool.check_open() {
            self.forget_if_forked();
            // Leaves the line.
            self.state = State::New;
            self.claim = None;
            return Poll::Ready(Err(error));
        }
        let Poll::Ready(mut served) = self.advance(context) else { return Poll::Pending };
        let claim = self.claim.take();
        if let Some(account) = self.pool.account() {
            match (&mut served, claim) {
                (Ok(buf), Some(claim)) => buf.charge(account, claim),
                (Ok(_), None) => {}
                (Err(_), _) => account.count_failed(),
            }
        }
        Poll::Ready(served)
    }
}

impl Drop for GetFuture {
    fn drop(&mut self) {
        self.forget_if_forked();
    }
}
