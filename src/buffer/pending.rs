//! A buffer that a device is writing to.

use super::PinnedBuf;
use crate::copy::Completion;
use crate::error::Result;

/// A copy from a device into a buffer, whose bytes nobody sees before they are there. Dropping it drops the buffer, which
/// returns to its pool when the copy is over.
#[derive(Debug)]
#[must_use = "the bytes are there after `wait`"]
pub struct PendingBuf {
    buf: PinnedBuf,
    copy: Completion,
}

impl PendingBuf {
    pub(crate) fn new(buf: PinnedBuf, copy: Completion) -> Self {
        Self { buf, copy }
    }

    /// Is the copy over? Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::is_device`](crate::Error::is_device) if the device failed, so that nobody will ever know.
    pub fn is_done(&self) -> Result<bool> {
        self.copy.is_done()
    }

    /// Waits until the copy is over and gives the buffer with its bytes.
    ///
    /// # Errors
    ///
    /// As [`is_done`](PendingBuf::is_done); the buffer is never used again then.
    pub fn wait(self) -> Result<PinnedBuf> {
        self.copy.wait()?;
        Ok(self.buf)
    }
}
