//! A get that a task awaits.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use super::Pool;
use crate::buffer::PinnedBuf;
use crate::engine::{Begun, Ledger, WaitingGet};
use crate::error::Result;
use crate::size_class::DEFAULT_ALIGN;

/// The future of [`Pool::get_async`]: a buffer, or the error of [`Pool::get`].
///
/// Begins when it is first polled. Dropped before it is ready, it leaves the line, and a buffer that it was handed
/// meanwhile goes to the next get. While it waits it keeps its place also if it is not polled, until its wait has passed.
///
/// Polled again after it was ready, it begins another get.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct GetFuture {
    // Before the pool: a get that leaves the line may put a buffer back.
    waiting: Option<WaitingGet>,
    pool: Pool,
    len: usize,
    wait: Duration,
    ledger: Option<Arc<Ledger>>,
}

impl GetFuture {
    pub(super) fn new(pool: Pool, len: usize, wait: Duration, ledger: Option<Arc<Ledger>>) -> Self {
        Self { waiting: None, pool, len, wait, ledger }
    }

    /// In a child of `fork` the line stays as it was: its locks may be held by threads that do not exist here.
    fn forget_if_forked(&mut self) {
        if self.pool.core().is_forked() {
            std::mem::forget(self.waiting.take());
        }
    }

    fn begin(&self) -> Result<Result<PinnedBuf, WaitingGet>> {
        let wanted = self.pool.wanted(self.len, DEFAULT_ALIGN, self.ledger.as_ref())?;
        let Some(wanted) = wanted else { return Ok(Ok(PinnedBuf::empty())) };
        Ok(match self.pool.core().begin_get(&wanted, self.wait)? {
            Begun::Served(block) => Ok(self.pool.buffer(block, &wanted, DEFAULT_ALIGN)),
            Begun::Waits(waiting) => Err(waiting),
        })
    }
}

impl Future for GetFuture {
    type Output = Result<PinnedBuf>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let get = &mut *self;
        if let Err(error) = get.pool.core().check_process() {
            get.forget_if_forked();
            return Poll::Ready(Err(error));
        }
        let waiting = match &mut get.waiting {
            Some(waiting) => waiting,
            None => match get.begin() {
                Ok(Ok(buf)) => return Poll::Ready(Ok(buf)),
                Ok(Err(waiting)) => get.waiting.insert(waiting),
                Err(error) => return Poll::Ready(Err(error)),
            },
        };
        let Poll::Ready(served) = get.pool.core().poll_get(waiting, context) else { return Poll::Pending };
        let wanted = get.waiting.take().map(WaitingGet::into_wanted);
        Poll::Ready(served.map(|block| match wanted {
            Some(wanted) => get.pool.buffer(block, &wanted, DEFAULT_ALIGN),
            None => PinnedBuf::over(block, get.len, DEFAULT_ALIGN),
        }))
    }
}

impl Drop for GetFuture {
    fn drop(&mut self) {
        self.forget_if_forked();
    }
}
