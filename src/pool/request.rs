//! A request with its options.

use std::time::Duration;

use crate::size_class::UNSPECIFIED_ALIGN;

/// A request for a buffer: its length, and optionally its alignment and its longest wait.
///
/// ```
/// # use std::time::Duration;
/// use pinpool::Request;
/// # let pool = pinpool::Pool::builder().without_env().backend(pinpool::Backend::Heap).build()?;
/// let buf = pool.get_with(Request::new(1 << 20).align(1 << 16).timeout(Duration::from_secs(1)))?;
/// assert!(buf.as_ptr().addr().is_multiple_of(1 << 16));
/// # Ok::<(), pinpool::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct Request {
    pub(super) len: usize,
    pub(super) align: usize,
    pub(super) timeout: Option<Duration>,
}

impl Request {
    /// Returns a request for `len` bytes that waits at most `PINPOOL_WAIT`.
    pub fn new(len: usize) -> Self {
        Self { len, align: UNSPECIFIED_ALIGN, timeout: None }
    }

    /// Sets the alignment, a power of two of at most 1 GiB. Every buffer is at least page-aligned.
    pub fn align(self, align: usize) -> Self {
        Self { align, ..self }
    }

    /// Sets the longest wait, in place of `PINPOOL_WAIT`. With zero the request does not wait for room; with `None` it waits forever.
    ///
    /// The timeout limits how long a thread waits for room. Even with a shorter timeout, a thread may wait 100 ms for
    /// other threads' driver calls. Its own driver calls are not interrupted: if the driver hangs, so does the thread.
    /// [`Pool::get_async`](crate::Pool::get_async) makes its driver calls on another thread and meets its deadline,
    /// unless the timeout is zero.
    pub fn timeout(self, timeout: impl Into<Option<Duration>>) -> Self {
        Self { timeout: Some(timeout.into().unwrap_or(Duration::MAX)), ..self }
    }
}

impl From<usize> for Request {
    fn from(len: usize) -> Self {
        Self::new(len)
    }
}
