//! How one learns that a copy is over.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;
use crate::sync::plain::Mutex;

/// Says when a copy that was enqueued on a stream is over.
///
/// # Safety
///
/// Memory is reused on the word of `is_done`: it may say `Ok(true)` only after the device has finished with every byte
/// of the copy, for good; and `wait` may return `Ok` only then. Fences of one [`stream`](Fence::stream) must come true
/// in the order in which their copies were enqueued.
#[allow(unsafe_code)]
pub unsafe trait Fence: Send + Sync + fmt::Debug {
    /// Is the copy over? Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::is_device`](crate::Error::is_device) if the device failed, so that nobody will ever know.
    fn is_done(&self) -> Result<bool>;

    /// Waits until the copy is over.
    ///
    /// # Errors
    ///
    /// As [`is_done`](Fence::is_done).
    fn wait(&self) -> Result<()>;

    /// A number for the stream, the same for all of its fences and for those of no other.
    fn stream(&self) -> u64;
}

/// A fence that the pool, the buffer and the user's handle look at.
pub(crate) type SharedFence = Arc<dyn Fence>;

/// The copies that borrowed one buffer and may still be running. Without any it is a null pointer: a buffer that was never
/// copied from pays one comparison.
#[derive(Debug, Default)]
pub(crate) struct Uses(Option<Box<Mutex<Vec<SharedFence>>>>);

impl Uses {
    pub(crate) fn record(&mut self, fence: SharedFence) {
        self.0.get_or_insert_default().get_mut().push(fence);
    }

    /// Are all recorded copies over? Forgets those that are.
    pub(crate) fn are_over(&self) -> Result<bool> {
        let Some(fences) = &self.0 else { return Ok(true) };
        let mut fences = fences.lock();
        // A failed fence stays, so that the buffer can never pass for free.
        let mut first_failure = None;
        fences.retain(|fence| match fence.is_done() {
            Ok(over) => !over,
            Err(error) => {
                first_failure.get_or_insert(error);
                true
            }
        });
        match first_failure {
            Some(error) => Err(error),
            None => Ok(fences.is_empty()),
        }
    }

    /// Was any copy ever recorded?
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.0.is_some()
    }

    /// Waits until every recorded copy is over.
    pub(crate) fn wait(&self) -> Result<()> {
        let Some(fences) = &self.0 else { return Ok(()) };
        // The list is copied, not held: a wait under a lock would hold up `are_over` on another thread.
        let fences = fences.lock().clone();
        fences.iter().try_for_each(|fence| fence.wait())?;
        self.are_over().map(drop)
    }

    /// True if no copy was ever recorded, or all recorded ones were seen to be over. Costs no lock.
    #[inline]
    pub(crate) fn is_empty(&mut self) -> bool {
        self.0.as_mut().is_none_or(|fences| fences.get_mut().is_empty())
    }

    /// The fences of copies that may still be running.
    pub(crate) fn take(&mut self) -> Vec<SharedFence> {
        self.0.take().map_or_else(Vec::new, |fences| fences.into_inner())
    }
}

/// A fence that does what a test says.
#[cfg(test)]
pub(crate) mod scripted {
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::Fence;
    use crate::error::{Error, Result};

    #[derive(Debug)]
    pub(crate) struct Scripted {
        stream: u64,
        state: AtomicU8,
    }

    impl Scripted {
        pub(crate) fn on(stream: u64) -> Self {
            Self { stream, state: AtomicU8::new(0) }
        }

        pub(crate) fn finish(&self) {
            self.state.store(1, Ordering::Release);
        }

        pub(crate) fn fail(&self) {
            self.state.store(2, Ordering::Release);
        }
    }

    // SAFETY: guards no memory: the tests' items are numbers.
    #[allow(unsafe_code)]
    unsafe impl Fence for Scripted {
        fn is_done(&self) -> Result<bool> {
            match self.state.load(Ordering::Acquire) {
                2 => Err(Error::device("the script says so")),
                state => Ok(state == 1),
            }
        }

        fn wait(&self) -> Result<()> {
            while !self.is_done()? {
                std::thread::yield_now();
            }
            Ok(())
        }

        fn stream(&self) -> u64 {
            self.stream
        }
    }
}

#[cfg(test)]
mod tests {
    use super::scripted::Scripted;
    use super::*;

    #[test]
    fn uses_are_over_when_the_last_one_is() {
        let mut uses = Uses::default();
        assert!(uses.is_empty());
        let fences = [Arc::new(Scripted::on(1)), Arc::new(Scripted::on(2))];
        fences.iter().for_each(|fence| uses.record(fence.clone()));
        fences[1].finish();
        assert!(!uses.are_over().unwrap());
        fences[0].finish();
        uses.wait().unwrap();
        assert!(uses.is_empty() && uses.are_over().unwrap());
    }

    #[test]
    fn a_failed_use_never_passes_for_over() {
        let mut uses = Uses::default();
        let fence = Arc::new(Scripted::on(1));
        uses.record(fence.clone());
        fence.fail();
        assert!(uses.are_over().is_err() && uses.wait().is_err());
        assert_eq!(uses.take().len(), 1);
    }
}
