//! How one learns that a copy is over.

use std::fmt;
use std::sync::{Arc, OnceLock};

use super::Few;
use crate::error::Result;
use crate::sync::plain::Mutex;

/// Says when a copy that was enqueued on a stream is over.
///
/// # Safety
///
/// Memory is reused on the word of `is_done`: it may say `Ok(true)` only after the device has finished with every byte
/// of the copy, for good; and `wait` may return `Ok` only then. Fences of one [`stream_id`](Fence::stream_id) must come
/// true in the order in which their copies were enqueued.
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

    /// A number by which a reader of figures knows the stream. Another stream may have it after this one is gone, also
    /// while copies of this one still run: memory is never reused on the word of this.
    fn stream(&self) -> u64;

    /// Which stream it is, beyond doubt; `None` where nobody can say.
    fn stream_id(&self) -> Option<StreamId> {
        None
    }
}

/// One stream among all that the program ever makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamId {
    family: usize,
    number: u64,
}

impl StreamId {
    /// Stream `number` of a `family`, which never gives a number twice: the address of something that lives as long as the
    /// process.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn new(family: usize, number: u64) -> Self {
        Self { family, number }
    }
}

/// A fence that the pool, the buffer and the user's handle look at.
pub(crate) type SharedFence = Arc<dyn Fence>;

/// The copies that use one buffer and may still be running.
///
/// A *lent* use is one whose borrow of the buffer may not be over, so that its fence does not know yet what it stands for:
/// nobody asks it, and nobody lets go of it, but through `&mut`, which proves that the borrow is over. A buffer that was
/// never copied has no list at all, and pays one comparison.
///
/// Of the copies from it on one stream only the last is kept: when that is over, so are those before it. That holds for
/// copies that `&mut` put in a row, not for lent ones: two threads that borrow at once enqueue in either order.
#[derive(Debug, Default)]
pub(crate) struct CopyFences(OnceLock<Box<Mutex<Vec<Use>>>>);

#[derive(Debug, Clone)]
struct Use {
    fence: SharedFence,
    manner: Manner,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    Reads,
    Writes,
    Lent,
    /// A lent use whose borrow is over.
    Returned,
}

impl Use {
    /// False if nobody knows.
    fn is_on(&self, stream: Option<StreamId>) -> bool {
        stream.is_some() && self.fence.stream_id() == stream
    }
}

impl CopyFences {
    fn push(&self, fence: SharedFence, manner: Manner) {
        self.0.get_or_init(Box::default).lock().push(Use { fence, manner });
    }

    /// A copy from the buffer.
    pub(crate) fn record(&mut self, fence: SharedFence) {
        if let Some(earlier) = fence.stream_id().and_then(|stream| self.read_on(stream)) {
            *earlier = fence;
            return;
        }
        // A buffer that is copied from again and again does not gather what is long over.
        let _failures_stay = self.are_over();
        self.push(fence, Manner::Reads);
    }

    fn read_on(&mut self, stream: StreamId) -> Option<&mut SharedFence> {
        let uses = self.0.get_mut()?.get_mut();
        let is_it = |each: &&mut Use| each.manner == Manner::Reads && each.fence.stream_id() == Some(stream);
        uses.iter_mut().find(is_it).map(|each| &mut each.fence)
    }

    /// A copy into the buffer.
    pub(crate) fn record_write(&mut self, fence: SharedFence) {
        self.push(fence, Manner::Writes);
    }

    /// A copy from the buffer that somebody is about to enqueue.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // Only cudarc borrows so.
    pub(crate) fn lend(&self, fence: SharedFence) {
        self.push(fence, Manner::Lent);
    }

    /// Are all copies over? Forgets those that are.
    pub(crate) fn are_over(&mut self) -> Result<bool> {
        let Some(uses) = self.0.get_mut().map(|uses| uses.get_mut()) else { return Ok(true) };
        // A failed fence stays, so that the buffer can never pass for free.
        let mut first_failure = None;
        uses.retain_mut(|each| {
            if each.manner == Manner::Lent {
                each.manner = Manner::Returned;
            }
            match each.fence.is_done() {
                Ok(over) => !over,
                Err(error) => {
                    first_failure.get_or_insert(error);
                    true
                }
            }
        });
        match first_failure {
            Some(error) => Err(error),
            None => Ok(uses.is_empty()),
        }
    }

    /// Was any copy recorded?
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.0.get().is_some()
    }

    /// Waits until no copy but lent ones, which only read, uses the buffer. False if a copy into it failed: then nobody
    /// knows what is in the buffer, or still being written to it.
    pub(crate) fn wait(&self) -> bool {
        self.wait_for(|each| each.manner != Manner::Lent)
    }

    /// Waits for the copies into the buffer that do not come before all that `stream` does next: those of others, and all
    /// where nobody knows which stream that is. The answer is as that of [`wait`](CopyFences::wait).
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn wait_for_writes(&self, stream: Option<StreamId>) -> bool {
        self.wait_for(|each| each.manner == Manner::Writes && !each.is_on(stream))
    }

    /// Waits for every copy that is not on `stream`. The answer is as that of [`wait`](CopyFences::wait).
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn wait_for_others(&mut self, stream: Option<StreamId>) -> bool {
        let _failures_stay = self.are_over();
        self.wait_for(|each| !each.is_on(stream))
    }

    #[cold]
    fn wait_for(&self, concerns: impl Fn(&Use) -> bool) -> bool {
        let Some(uses) = self.0.get() else { return true };
        // The list is copied, not held: a wait under a lock would hold up other threads that look at the buffer.
        let uses: Vec<Use> = uses.lock().iter().filter(|each| concerns(each)).cloned().collect();
        let mut is_sound = true;
        // Every one is waited for, whatever became of those before.
        for each in &uses {
            is_sound &= each.fence.wait().is_ok() || each.manner != Manner::Writes;
        }
        is_sound
    }

    /// True if no copy was ever recorded, or all recorded ones were seen to be over. Costs no lock.
    #[inline]
    pub(crate) fn is_empty(&mut self) -> bool {
        self.0.get_mut().is_none_or(|uses| uses.get_mut().is_empty())
    }

    /// The fences of copies that may still be running.
    pub(crate) fn take(&mut self) -> Few<SharedFence> {
        let Some(uses) = self.0.take() else { return Few::NONE };
        uses.into_inner().into_iter().map(|each| each.fence).collect()
    }
}

/// A fence that does what a test says.
#[cfg(test)]
pub(crate) mod scripted {
    use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

    use super::{Fence, StreamId};
    use crate::error::{Error, Result};

    #[derive(Debug)]
    pub(crate) struct Scripted {
        stream: u64,
        state: AtomicU8,
        asked: AtomicU32,
    }

    impl Scripted {
        pub(crate) fn on(stream: u64) -> Self {
            Self { stream, state: AtomicU8::new(0), asked: AtomicU32::new(0) }
        }

        pub(crate) fn asked(&self) -> u32 {
            self.asked.load(Ordering::Relaxed)
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
            self.asked.fetch_add(1, Ordering::Relaxed);
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

        /// Nobody knows which stream 0 is.
        fn stream_id(&self) -> Option<StreamId> {
            (self.stream != 0).then_some(StreamId::new(0, self.stream))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::scripted::Scripted;
    use super::*;

    #[test]
    fn uses_are_over_when_the_last_one_is() {
        let mut uses = CopyFences::default();
        assert!(uses.is_empty());
        let fences = [Arc::new(Scripted::on(1)), Arc::new(Scripted::on(2))];
        fences.iter().for_each(|fence| uses.record(fence.clone()));
        fences[1].finish();
        assert!(!uses.are_over().unwrap());
        fences[0].finish();
        assert!(uses.wait());
        assert!(uses.are_over().unwrap() && uses.is_empty());
    }

    #[test]
    fn a_failed_use_never_passes_for_over() {
        let mut uses = CopyFences::default();
        let fence = Arc::new(Scripted::on(1));
        uses.record(fence.clone());
        fence.fail();
        assert!(uses.are_over().is_err());
        assert!(uses.wait(), "the device only reads: the bytes are sound");
        assert!(uses.take().only().is_some());
    }

    #[test]
    fn a_failed_copy_into_the_buffer_spoils_it() {
        let mut uses = CopyFences::default();
        let (read, write) = (Arc::new(Scripted::on(1)), Arc::new(Scripted::on(2)));
        uses.record(read.clone());
        uses.record_write(write.clone());
        read.finish();
        write.fail();
        assert!(!uses.wait() && !uses.wait_for_writes(Some(StreamId::new(0, 1))));
        assert!(
            uses.wait_for_writes(Some(StreamId::new(0, 2))),
            "what comes behind it on its stream is not its reader"
        );
    }

    #[test]
    fn of_the_copies_on_one_stream_the_last_is_kept_and_nobody_is_asked() {
        let mut uses = CopyFences::default();
        let fences: Vec<_> = [1, 2, 1, 2, 1].map(|stream| Arc::new(Scripted::on(stream))).into();
        fences.iter().for_each(|fence| uses.record(fence.clone()));
        // The second stream's first copy finds one of another stream, and asks whether that is over.
        assert_eq!(fences.iter().map(|fence| fence.asked()).collect::<Vec<_>>(), [1, 0, 0, 0, 0]);
        fences[..4].iter().for_each(|fence| fence.finish());
        assert!(!uses.are_over().unwrap());
        let kept: Vec<_> = uses.take().into_iter().map(|fence| fence.stream()).collect();
        assert_eq!(kept, [1]);
    }

    #[test]
    fn a_copy_whose_stream_nobody_knows_takes_no_others_place_and_is_waited_for() {
        let mut uses = CopyFences::default();
        let fences = [Arc::new(Scripted::on(0)), Arc::new(Scripted::on(0))];
        fences.iter().for_each(|fence| uses.record(fence.clone()));
        fences[1].finish();
        assert!(!uses.are_over().unwrap());
        fences[0].fail();
        uses.record_write(fences[0].clone());
        assert!(!uses.wait_for_others(None), "it is asked, and failed");
    }

    #[test]
    fn what_was_lent_is_nobody_elses_to_speak_for() {
        let mut uses = CopyFences::default();
        let (lent, later) = (Arc::new(Scripted::on(1)), Arc::new(Scripted::on(1)));
        uses.lend(lent.clone());
        uses.record(later.clone());
        later.finish();
        assert!(!uses.are_over().unwrap());
        lent.finish();
        assert!(uses.are_over().unwrap());
    }

    #[test]
    fn a_lent_use_is_asked_only_when_its_borrow_is_over() {
        let mut uses = CopyFences::default();
        let fence = Arc::new(Scripted::on(1));
        uses.lend(fence.clone());
        assert!(uses.wait(), "waits for nobody who only reads");
        assert!(!uses.are_over().unwrap());
        fence.finish();
        assert!(uses.are_over().unwrap());
    }
}
