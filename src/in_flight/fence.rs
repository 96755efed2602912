//! Fences, which detect the end of a copy, and the fences of one buffer.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::thread::{self, ThreadId};

use smallvec::SmallVec;

use crate::error::{Error, Result};
use pinpool_os::sync::unmodeled::{Mutex, Ordering};
use pinpool_os::unwind::catch_panic;

/// Detects when work that was enqueued on a stream has completed: a copy, or a kernel that uses the buffer.
///
/// # Safety
///
/// Memory is reused when `is_complete` returns `Ok(true)`: that may happen only after the device has finished with every byte
/// that the work uses, permanently. The same holds for `wait` and `Ok`. The work of fences with
/// the same [`stream_id`](Fence::stream_id) must complete in the order in which it was enqueued.
#[allow(unsafe_code)]
pub unsafe trait Fence: Send + Sync + fmt::Debug {
    /// Returns whether the work has completed. Does not wait.
    ///
    /// # Errors
    ///
    /// [`Error::is_device_failed`](crate::Error::is_device_failed) if the device failed, so that the end of the work is unknown. The pool
    /// queries the fence again about ten times a second, and reuses the memory after `Ok(true)`. A fence that panics is not
    /// queried again, and its memory is never reused.
    fn is_complete(&self) -> Result<bool>;

    /// Waits until the work has completed.
    ///
    /// # Errors
    ///
    /// The errors of [`is_complete`](Fence::is_complete).
    fn wait(&self) -> Result<()>;

    /// Returns whether the work has completed, if a load can tell; `None` if only [`is_complete`](Fence::is_complete) can. Calls
    /// nothing and takes no lock. `Some(true)` promises what `Ok(true)` of `is_complete` promises.
    #[doc(hidden)]
    fn is_complete_by_load(&self) -> Option<bool> {
        None
    }

    /// Returns the stream's identity, which no other stream ever has; `None` if it is unknown. Must not wait: may be called under
    /// a lock. Statistics and log lines show its number.
    fn stream_id(&self) -> Option<StreamId> {
        None
    }
}

/// Identity of a stream, unique within the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamId {
    /// The origin of the number: 0 for [`unique`](StreamId::unique), otherwise the address of a driver context's state.
    family: usize,
    number: u64,
}

impl StreamId {
    /// Returns an identity for a new stream. For implementors of [`Fence`]: take one when the stream is created, keep
    /// it with the stream, and return it from the fences of all its copies.
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // Relaxed: the only requirement is that no number is assigned twice.
        Self { family: 0, number: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// Returns the identity of the stream with this `number`, which the driver assigns once in the process (`cuStreamGetId`). The
    /// `family` only groups streams by context: it is the address of an object of the context that lives as long as the process.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn from_driver(family: usize, number: u64) -> Self {
        Self { family, number }
    }

    pub(crate) fn number(self) -> u64 {
        self.number
    }
}

/// A fence that the pool, the buffer and the user's handle share.
pub(crate) type SharedFence = Arc<dyn Fence>;

/// The fences of one buffer. Most buffers have one fence, which needs no allocation.
pub(crate) type Fences = SmallVec<[SharedFence; 1]>;

/// The reason that a fence did not answer.
#[derive(Debug)]
pub(super) struct FenceFailure {
    pub(super) error: Error,
    /// Whether the fence panicked. It is then not queried again, because the panic hook of the process reports each panic.
    pub(super) is_final: bool,
}

/// Queries fences, which a user may have implemented, and returns whether all of them are complete. If one of them fails, its
/// failure outweighs the other answers (in-flight-I2). A panic counts as a failure, so that nothing but the memory is
/// lost.
pub(super) fn query(fences: &[SharedFence]) -> Result<bool, FenceFailure> {
    match catch_panic(|| fences.iter().try_fold(true, |all, fence| Ok(fence.is_complete()? && all))) {
        Some(answer) => answer.map_err(|error| FenceFailure { error, is_final: false }),
        None => Err(FenceFailure { error: Error::device_failed("the fence of a copy panicked"), is_final: true }),
    }
}

/// Queries a fence as [`query`] does, for callers that treat all failures alike.
pub(crate) fn is_complete(fence: &SharedFence) -> Result<bool> {
    query(std::slice::from_ref(fence)).map_err(|failure| failure.error)
}

/// Returns whether all fences are complete, if loads can tell. A single pending fence suffices for `Some(false)`.
pub(super) fn are_complete_by_load(fences: &[SharedFence]) -> Option<bool> {
    let mut all = Some(true);
    for fence in fences {
        match fence.is_complete_by_load() {
            Some(false) => return Some(false),
            Some(true) => {}
            None => all = None,
        }
    }
    all
}

/// Returns the identity of a fence's stream; `None` if it is unknown or the fence panics.
pub(super) fn stream_id_of(fence: &dyn Fence) -> Option<StreamId> {
    catch_panic(|| fence.stream_id()).flatten()
}

/// Drops one or several fences that are no longer needed. Ignores panics: the memory is safe without the fences.
pub(super) fn discard<F>(fence: F) {
    catch_panic(|| drop(fence)).unwrap_or_default();
}

/// The copies that use one buffer and may still be running. A buffer that was never copied has no list, so a check costs one
/// comparison.
///
/// - **copy-fences-I1**: a borrower may enqueue the copy of a *lent* access after the access is recorded here, so its fence may
///   not cover the copy yet. The fence is queried and dropped only through `&mut`, which proves that the borrow has ended.
/// - **copy-fences-I2**: reads on one stream that were recorded through `&mut` are ordered. Only the last of them is kept: when
///   it has completed, the earlier reads have completed, too. All lent reads are kept, since two threads that borrow at the same
///   time enqueue in either order.
/// - **copy-fences-I3**: a failed fence stays in the list until a later fence covers its work, so a buffer never counts as free
///   while the end of a copy is unknown.
#[derive(Debug, Default)]
pub(crate) struct CopyFences(OnceLock<Box<Mutex<Vec<Access>>>>);

/// The use of a buffer by one copy.
#[derive(Debug, Clone)]
struct Access {
    fence: SharedFence,
    kind: AccessKind,
}

/// The identity of a stream or event of other code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkId {
    pub(crate) handle: usize,
    /// For a default stream; 0 if none was current.
    pub(crate) context: usize,
    /// For a per-thread default stream and for a default stream without a context.
    pub(crate) thread: Option<ThreadId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AccessKind {
    Read,
    Write,
    /// A read by a borrower, who may not have enqueued the copy yet.
    Lent,
    /// A lent read after the end of the borrow.
    Returned,
    /// Work of this stream or event, for which the driver refused a fence. The work may write to the buffer.
    Unfenced(WorkId),
}

impl Access {
    /// Returns whether the access is on `stream`; `false` if either stream is unknown.
    fn is_on(&self, stream: Option<StreamId>) -> bool {
        stream.is_some() && stream_id_of(&*self.fence) == stream
    }

    fn is_write(&self) -> bool {
        matches!(self.kind, AccessKind::Write | AccessKind::Unfenced(_))
    }
}

impl CopyFences {
    fn push(&self, fence: SharedFence, kind: AccessKind) {
        self.0.get_or_init(Box::default).lock().push(Access { fence, kind });
    }

    /// Records a copy from the buffer.
    pub(crate) fn record_read(&mut self, fence: SharedFence) {
        if let Some(earlier) = stream_id_of(&*fence).and_then(|stream| self.read_on(stream)) {
            discard(std::mem::replace(earlier, fence));
            return;
        }
        self.forget_completed();
        self.push(fence, AccessKind::Read);
    }

    fn read_on(&mut self, stream: StreamId) -> Option<&mut SharedFence> {
        let accesses = self.0.get_mut()?.get_mut();
        let is_read = |access: &&mut Access| access.kind == AccessKind::Read && access.is_on(Some(stream));
        accesses.iter_mut().find(is_read).map(|access| &mut access.fence)
    }

    /// Records a copy into the buffer.
    pub(crate) fn record_write(&mut self, fence: SharedFence) {
        self.push(fence, AccessKind::Write);
    }

    /// Records work that has no fence, permanently if it has no `id`. The fence `failed` never completes.
    pub(crate) fn record_unfenced(&mut self, id: Option<WorkId>, failed: SharedFence) {
        self.push(failed, id.map_or(AccessKind::Write, AccessKind::Unfenced));
    }

    /// Forgets the unfenced work of this stream or event, because a later fence covers the work or the work has completed. Also
    /// forgets what this thread recorded with the same default handle when no context was current.
    pub(crate) fn forget_unfenced(&mut self, id: WorkId) {
        if let Some(accesses) = self.0.get_mut() {
            let forgotten =
                [id, WorkId { context: 0, thread: Some(thread::current().id()), ..id }].map(AccessKind::Unfenced);
            accesses.get_mut().retain(|access| !forgotten.contains(&access.kind));
        }
    }

    /// Records a copy from the buffer that a borrower is about to enqueue.
    #[cfg(any(feature = "cuda", test))] // Only cudarc borrows buffers in this way.
    pub(crate) fn lend(&self, fence: SharedFence) {
        self.push(fence, AccessKind::Lent);
    }

    /// Forgets completed copies, so that the list of a buffer that is copied repeatedly stays short. Failed copies stay.
    pub(crate) fn forget_completed(&mut self) {
        let is_pending = |access: &Access| access.fence.is_complete_by_load() == Some(false);
        if !self.0.get_mut().is_some_and(|accesses| accesses.get_mut().iter().all(is_pending)) {
            let _failures_stay = self.remove_completed();
        }
    }

    /// Returns whether all copies have completed. Forgets completed copies.
    pub(crate) fn remove_completed(&mut self) -> Result<bool> {
        let Some(accesses) = self.0.get_mut().map(|accesses| accesses.get_mut()) else { return Ok(true) };
        let mut first_failure = None;
        let completed = accesses.extract_if(.., |access| {
            if access.kind == AccessKind::Lent {
                access.kind = AccessKind::Returned;
            }
            is_complete(&access.fence).unwrap_or_else(|error| {
                first_failure.get_or_insert(error);
                false
            })
        });
        completed.for_each(|access| discard(access.fence));
        first_failure.map_or(Ok(accesses.is_empty()), Err)
    }

    /// Returns whether a copy was ever recorded.
    #[inline]
    pub(crate) fn was_used(&self) -> bool {
        self.0.get().is_some()
    }

    /// Waits until no copy uses the buffer. Fails if it is unknown whether a copy has completed.
    pub(crate) fn wait_for_all(&mut self) -> Result<()> {
        let waited = self.wait_for(|_| true);
        if self.remove_completed()? { Ok(()) } else { waited }
    }

    /// Waits for the copies into the buffer that are not ordered before the next work of `stream`: copies on other streams, or
    /// all copies if `stream` is unknown. Fails if such a copy failed, because the bytes are then unknown and may still be
    /// written to. A failure of a copy that only reads the buffer does not prevent reading its bytes.
    pub(crate) fn wait_for_writes(&self, stream: Option<StreamId>) -> Result<()> {
        self.wait_for(|access| access.is_write() && !access.is_on(stream))
    }

    /// Returns whether all copies into the buffer have completed. Fails under the same condition.
    pub(crate) fn are_writes_complete(&self) -> Result<bool> {
        let writes = self.cloned_accesses(Access::is_write);
        writes.iter().try_fold(true, |all, access| Ok(is_complete(&access.fence)? && all))
    }

    /// Waits for every copy that is not on `stream`. Fails if such a copy failed.
    #[cfg(any(feature = "cuda", test))]
    pub(crate) fn wait_for_others(&mut self, stream: Option<StreamId>) -> Result<()> {
        let _failures_stay = self.remove_completed();
        self.wait_for(|access| !access.is_on(stream))
    }

    #[cold]
    fn wait_for(&self, is_relevant: impl Fn(&Access) -> bool) -> Result<()> {
        let mut outcome = Ok(());
        // Waits for every copy, even after another copy failed.
        for access in self.cloned_accesses(is_relevant) {
            let waited = access.fence.wait();
            if outcome.is_ok() {
                outcome = waited;
            }
        }
        outcome
    }

    /// Clones the accesses that are relevant to the caller: a wait under the lock of the list would delay other threads that
    /// check the buffer.
    fn cloned_accesses(&self, is_relevant: impl Fn(&Access) -> bool) -> Vec<Access> {
        let accesses = self.0.get().map(|accesses| accesses.lock());
        accesses.iter().flat_map(|accesses| accesses.iter()).filter(|access| is_relevant(access)).cloned().collect()
    }

    /// Returns whether no copy was ever recorded, or all recorded copies were found to have completed. Takes no lock.
    #[inline]
    pub(crate) fn is_empty(&mut self) -> bool {
        self.0.get_mut().is_none_or(|accesses| accesses.get_mut().is_empty())
    }

    /// Removes and returns the fences of copies that may still be running.
    pub(crate) fn take(&mut self) -> Fences {
        let Some(accesses) = self.0.take() else { return Fences::new() };
        accesses.into_inner().into_iter().map(|access| access.fence).collect()
    }
}

/// A fence that a test controls.
#[cfg(test)]
pub(crate) mod scripted {
    use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

    use super::{Fence, StreamId};
    use crate::error::{Error, Result};

    #[derive(Debug)]
    pub(crate) struct ScriptedFence {
        stream: u64,
        state: AtomicU8,
        queries: AtomicU32,
    }

    impl ScriptedFence {
        pub(crate) fn on(stream: u64) -> Self {
            Self { stream, state: AtomicU8::new(0), queries: AtomicU32::new(0) }
        }

        pub(crate) fn queries(&self) -> u32 {
            self.queries.load(Ordering::Relaxed)
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
    unsafe impl Fence for ScriptedFence {
        fn is_complete(&self) -> Result<bool> {
            self.queries.fetch_add(1, Ordering::Relaxed);
            match self.state.load(Ordering::Acquire) {
                2 => Err(Error::device_failed("the test failed it")),
                state => Ok(state == 1),
            }
        }

        fn wait(&self) -> Result<()> {
            while !self.is_complete()? {
                std::thread::yield_now();
            }
            Ok(())
        }

        /// Returns `None` for stream 0, which has an unknown identity.
        fn stream_id(&self) -> Option<StreamId> {
            (self.stream != 0).then_some(StreamId::from_driver(0, self.stream))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::scripted::ScriptedFence;
    use super::*;

    /// Returns the copies of a buffer that was copied from on these streams, one after the other, and their fences.
    fn recorded<const N: usize>(streams: [u64; N]) -> (CopyFences, [Arc<ScriptedFence>; N]) {
        let (mut copies, fences) = (CopyFences::default(), streams.map(|stream| Arc::new(ScriptedFence::on(stream))));
        fences.iter().for_each(|fence| copies.record_read(fence.clone()));
        (copies, fences)
    }

    #[test]
    fn copies_are_complete_when_the_last_one_is() {
        assert!(CopyFences::default().is_empty());
        let (mut copies, fences) = recorded([1, 2]);
        fences[1].finish();
        assert!(!copies.remove_completed().unwrap());
        fences[0].finish();
        assert!(copies.wait_for_all().is_ok());
        assert!(copies.remove_completed().unwrap() && copies.is_empty());
    }

    #[test]
    fn a_failed_copy_into_the_buffer_fails_every_wait_for_its_bytes() {
        let (mut copies, [read]) = recorded([1]);
        let write = Arc::new(ScriptedFence::on(2));
        copies.record_write(write.clone());
        read.finish();
        write.fail();
        assert!(copies.wait_for_writes(None).is_err());
        assert!(copies.wait_for_writes(Some(StreamId::from_driver(0, 1))).is_err());
        let of_its_own_stream = copies.wait_for_writes(Some(StreamId::from_driver(0, 2)));
        assert!(of_its_own_stream.is_ok(), "later work of the same stream does not wait");
    }

    #[test]
    fn the_last_copy_of_a_stream_replaces_those_before_it_without_a_query() {
        let (mut copies, fences) = recorded([1, 2, 1, 2, 1]);
        // The first copy on the second stream queries the copy on the first stream.
        assert_eq!(fences.iter().map(|fence| fence.queries()).collect::<Vec<_>>(), [1, 0, 0, 0, 0]);
        fences[..4].iter().for_each(|fence| fence.finish());
        assert!(!copies.remove_completed().unwrap());
        let kept: Vec<_> = copies.take().into_iter().map(|fence| fence.stream_id()).collect();
        assert_eq!(kept, [Some(StreamId::from_driver(0, 1))]);
    }

    #[test]
    fn a_copy_of_an_unknown_stream_replaces_no_other_and_is_waited_for() {
        let (mut copies, fences) = recorded([0, 0]);
        fences[1].finish();
        assert!(!copies.remove_completed().unwrap());
        fences[0].fail();
        copies.record_write(fences[0].clone());
        assert!(copies.wait_for_others(None).is_err(), "the wait includes it, and it failed");
    }

    #[test]
    fn a_later_copy_of_the_stream_does_not_replace_a_lent_one() {
        let mut copies = CopyFences::default();
        let (lent, later) = (Arc::new(ScriptedFence::on(1)), Arc::new(ScriptedFence::on(1)));
        copies.lend(lent.clone());
        copies.record_read(later.clone());
        later.finish();
        assert!(!copies.remove_completed().unwrap());
        lent.finish();
        assert!(copies.remove_completed().unwrap());
    }
}
