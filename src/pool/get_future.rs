//! A request that a task awaits.
//!
//! ```text
//!   poll ─▶ attempt without driver calls ─┬─▶ a buffer, or an error
//!                                         └─▶ a place in the wait queue: each later poll checks its slot
//! ```
//!
//! The wait starts at the first poll. If the wait times out while a driver call runs, or while calls for other tasks delay the
//! request, the request fails or gets pageable memory. The next request gets the memory once the call returns.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use super::{Pool, Request, to_buf};
use crate::buffer::PinnedBuf;
use crate::engine::{BlockRequest, FirstAttempt, PartitionCore, PoolCore, WaitTicket};
use crate::error::Result;
use crate::quota::Claim;

/// The future of [`Pool::get_async`]: a buffer, or the error of [`Pool::get`].
///
/// The request begins when the future is first polled. Dropping the future before it is ready removes the request from the wait
/// queue. A buffer or memory that was already assigned to the request then goes to the next request. Until the wait times out,
/// the request keeps its place in the queue even if the future is not polled.
///
/// # Panics
///
/// If it is polled after completion.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct GetFuture {
    // Declared before `pool`, so it is dropped first: a request that leaves the queue may return a buffer to the pool.
    state: GetState,
    pool: Pool,
    request: Request,
    /// The request's claim in its partition, until a buffer takes the claim.
    claim: Option<Claim>,
}

#[derive(Debug, Default)]
enum GetState {
    #[default]
    New,
    /// The request waits for room in its partition.
    InPartition(WaitTicket<PartitionCore>),
    InPool(WaitTicket<PoolCore>),
    Completed,
}

impl GetFuture {
    pub(super) fn new(pool: Pool, request: Request) -> Self {
        Self { state: GetState::New, pool, request, claim: None }
    }

    /// In a forked child, forgets the request instead of removing it from the queue: threads that do not exist here may hold the
    /// locks of the queue.
    fn forget_if_forked(&mut self) {
        if !matches!(self.state, GetState::New) && self.pool.core().is_forked() {
            std::mem::forget((std::mem::take(&mut self.state), self.claim.take()));
        }
    }

    /// Begins the request. Returns a buffer if no wait is needed; otherwise the request has joined a wait queue.
    fn begin(&mut self) -> Result<Option<PinnedBuf>> {
        let Some(request) = self.pool.block_request(self.request)? else {
            return Ok(Some(PinnedBuf::default()));
        };
        let wait = self.pool.longest_wait(self.request);
        if let Some(partition) = &request.partition {
            match partition.begin_claim(&request, wait, Some(self.pool.handle.clone()))? {
                FirstAttempt::Served(claim) => self.claim = Some(claim),
                FirstAttempt::Waiting(ticket) => {
                    self.state = GetState::InPartition(ticket);
                    return Ok(None);
                }
            }
        }
        self.begin_in_pool(&request, wait)
    }

    fn begin_in_pool(&mut self, request: &BlockRequest, wait: Duration) -> Result<Option<PinnedBuf>> {
        let core = self.pool.core();
        match core.begin_get(request, wait, Some(self.pool.handle.clone()))? {
            FirstAttempt::Served(block) => {
                Ok(Some(to_buf(core, block, request, self.request.align, self.claim.take())))
            }
            FirstAttempt::Waiting(ticket) => {
                self.state = GetState::InPool(ticket);
                Ok(None)
            }
        }
    }

    fn advance(&mut self, context: &mut Context<'_>) -> Poll<Result<PinnedBuf>> {
        loop {
            let served = match &mut self.state {
                GetState::New => self.begin()?,
                GetState::Completed => unreachable!("`poll` checks it"),
                GetState::InPartition(ticket) => {
                    self.claim = Some(ready!(ticket.poll_served(context))?);
                    let (request, age) = (ticket.request().clone(), ticket.age());
                    self.begin_in_pool(&request, self.pool.longest_wait(self.request).saturating_sub(age))?
                }
                GetState::InPool(ticket) => {
                    let block = ready!(ticket.poll_served(context))?;
                    Some(to_buf(self.pool.core(), block, ticket.request(), self.request.align, self.claim.take()))
                }
            };
            if let Some(buf) = served {
                return Poll::Ready(Ok(buf));
            }
        }
    }
}

impl Future for GetFuture {
    type Output = Result<PinnedBuf>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        assert!(!matches!(self.state, GetState::Completed), "a `GetFuture` was polled after completion");
        let admitted = self.pool.core().check_open().inspect_err(|_| self.forget_if_forked());
        let served = if let Err(error) = admitted { Err(error) } else { ready!(self.advance(context)) };
        // Dropping the ticket removes the request from the queue if it still waits, which is possible after an error.
        self.state = GetState::Completed;
        self.claim = None;
        Poll::Ready(served)
    }
}

impl Drop for GetFuture {
    fn drop(&mut self) {
        self.forget_if_forked();
    }
}
