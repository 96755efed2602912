//! Handles for a copy in flight: query its end, wait for it, or await it in a task.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Weak;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::in_flight::{SharedFence, is_complete};
use crate::maintenance_thread::{MaintenanceThread, Reminder};

// The first and the longest pause between two queries in `wait_timeout`.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(1);

/// A handle to a copy in flight, to query or wait for its end. Dropping the handle has no effect on the copy, and the pool keeps
/// the buffer until the copy completes.
///
/// In a task `completion.await` waits without blocking the thread, on any runtime:
///
/// ```
/// # use pinpool_testing::{SinkMemory, SinkStream};
/// # let pool = pinpool::Pool::builder().backend(pinpool::Backend::Heap).build()?;
/// # let (stream, mut device) = (SinkStream::new()?, SinkMemory::new(8));
/// let completion = pool.get(8)?.copy_to(&stream, &mut device)?;
/// let task = async {
///     completion.await?;
///     Ok::<_, pinpool::Error>("the device has the bytes")
/// };
/// # drop(task);
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Completion {
    /// `None` for a copy of zero bytes.
    fence: Option<SharedFence>,
    /// The pool of the buffer, if the copy took the buffer.
    listener: Option<Weak<dyn CopyEndListener>>,
}

/// Notified when a user has waited for the end of a copy.
pub(crate) trait CopyEndListener: Send + Sync {
    fn on_copy_ended(&self);
}

/// The future of an awaited [`Completion`] or [`PendingBuf`](crate::PendingBuf). Resolves to the result of its `wait`. Unlike after
/// [`Completion::wait`], the buffer may still count as in flight until the pool detects the end.
///
/// The task is woken by the process's maintenance thread, which is started if there is none. The thread queries the copy every
/// 0.04 to 0.1 ms at first, and less often once the copy has been running for a while. If the system refuses a thread, the task is woken
/// immediately and polls repeatedly.
///
/// # Panics
///
/// If it is polled after completion.
#[derive(Debug)]
#[must_use = "a future does nothing unless it is polled"]
pub struct CompletionFuture<T = ()> {
    /// The copy and the result; `None` once the future has completed.
    pending: Option<(Completion, T)>,
    reminder: Option<Reminder>,
}

impl Completion {
    pub(crate) fn tracked(fence: SharedFence, listener: Option<Weak<dyn CopyEndListener>>) -> Self {
        Self { fence: Some(fence), listener }
    }

    /// Returns the completion of a copy of zero bytes.
    pub(crate) fn completed() -> Self {
        Self { fence: None, listener: None }
    }

    /// Notifies the listener, so that the buffer of a completed copy becomes idle immediately.
    fn notify_listener(&self) {
        if let Some(listener) = self.listener.as_ref().and_then(Weak::upgrade) {
            listener.on_copy_ended();
        }
    }

    /// Returns whether the copy has completed. Does not wait. A buffer that moved into the copy may still count as in flight until
    /// [`wait`](Self::wait), or until the pool queries the copy.
    ///
    /// # Errors
    ///
    /// [`Error::is_device_failed`](crate::Error::is_device_failed) if the device failed, so that the end of the copy is unknown.
    pub fn is_complete(&self) -> Result<bool> {
        self.fence.as_ref().map_or(Ok(true), |fence| fence.is_complete())
    }

    /// Waits until the copy has completed. A buffer that moved into the copy is then back in its pool, unless another copy
    /// uses it or another thread is checking its stream at that moment.
    ///
    /// # Errors
    ///
    /// The errors of [`is_complete`](Completion::is_complete).
    pub fn wait(&self) -> Result<()> {
        self.fence.as_ref().map_or(Ok(()), |fence| fence.wait())?;
        self.notify_listener();
        Ok(())
    }

    /// Waits up to `timeout` for the copy, and returns whether it has completed. Polls, at first every 20 us and later every 1 ms.
    ///
    /// # Errors
    ///
    /// The errors of [`is_complete`](Completion::is_complete).
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        let begun = Instant::now();
        let mut pause = FIRST_PAUSE;
        while !self.is_complete()? {
            let left = timeout.saturating_sub(begun.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            // Neither a fence nor a driver event has a wait with a timeout.
            thread::sleep(pause.min(left));
            pause = (pause * 2).min(PAUSE_MAX);
        }
        self.notify_listener();
        Ok(true)
    }
}

/// `Completion` is not a `Future` itself: most copies are never awaited, and dropping an unused future causes a warning.
impl IntoFuture for Completion {
    type Output = Result<()>;
    type IntoFuture = CompletionFuture;

    fn into_future(self) -> CompletionFuture {
        CompletionFuture::new(self, ())
    }
}

impl<T> CompletionFuture<T> {
    /// Returns a future that resolves to `value` when the copy completes.
    pub(crate) fn new(copy: Completion, value: T) -> Self {
        Self { pending: Some((copy, value)), reminder: None }
    }

    /// Wakes `waker` when the copy completes.
    fn remind(&mut self, fence: SharedFence, waker: &Waker) {
        // Dropped first, because the reminder of the last poll may have another waker.
        self.reminder = None;
        // A failure also ends the wait. The next poll returns it.
        let condition = Box::new(move || !matches!(is_complete(&fence), Ok(false)));
        self.reminder = MaintenanceThread::of_process().remind(None, Some(condition), waker).ok();
        if self.reminder.is_none() {
            waker.wake_by_ref();
        }
    }
}

impl<T: Unpin> Future for CompletionFuture<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        let (copy, value) = self.pending.take().expect("a `CompletionFuture` was polled after completion");
        let outcome = copy.is_complete();
        if let (Ok(false), Some(fence)) = (&outcome, copy.fence.clone()) {
            self.pending = Some((copy, value));
            self.remind(fence, context.waker());
            return Poll::Pending;
        }
        Poll::Ready(outcome.map(|_| value))
    }
}
