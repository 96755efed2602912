//! Copies behind which the driver refused to put a fence: each is over when a later fence of its stream is.
//!
//! ```text
//!   stream   ──copy 1── record refused ──copy 2──[fence 2]──▶     the fence of copy 1 is fence 2
//! ```
//!
//! - **later-I1**: a fence stands for an earlier copy only if it was put on the same stream, by its [id](super::stream::id),
//!   after that copy was noted here, so after the copy was enqueued.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use crate::error::{Error, Result};
use crate::in_flight::{Fence, SharedFence, StreamId};
use pinpool_os::sync::plain::Mutex;
use pinpool_os::sync::process::{AtomicBool, AtomicU64, Ordering};

type Place = OnceLock<SharedFence>;

/// Waits until all work of the context so far is over.
pub(super) type Idle = Box<dyn Fn() -> Result<()> + Send + Sync>;

/// The copies of one context that wait for a later fence.
#[derive(Debug, Default)]
pub(super) struct LaterFences {
    /// The number of the last copy that was noted; 0 while none waits.
    noted: AtomicU64,
    copies: Mutex<Noted>,
}

#[derive(Debug, Default)]
struct Noted {
    last_number: u64,
    waiting: Vec<Waiting>,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    stream: StreamId,
    /// Gone with the last user of the copy's fence.
    place: Weak<Place>,
}

impl LaterFences {
    /// A fence for a copy that was enqueued on `stream` before this call. `why` there is no other. Who waits for it before there
    /// is one waits for `idle`.
    pub(super) fn expect(&self, stream: StreamId, stream_number: u64, why: String, idle: Idle) -> LaterFence {
        let later = Arc::new(Place::new());
        let mut copies = self.copies.lock();
        copies.last_number += 1;
        let waiting = Waiting { number: copies.last_number, stream, place: Arc::downgrade(&later) };
        copies.waiting.push(waiting);
        self.publish(&mut copies);
        LaterFence { later, stream, stream_number, why, idle, is_over: AtomicBool::new(false) }
    }

    /// The number of the last copy that was noted; 0 if none waits. Call before a fence is put on a stream.
    pub(super) fn noted(&self) -> u64 {
        self.noted.load(Ordering::Acquire)
    }

    /// `fence` was put on `stream` after [`noted`](Self::noted) said `noted`.
    pub(super) fn note(&self, noted: u64, stream: StreamId, fence: &SharedFence) {
        let mut copies = self.copies.lock();
        for each in copies.waiting.extract_if(.., |each| each.number <= noted && each.stream == stream) {
            // One that is set already has the same meaning.
            let _set = each.place.upgrade().map(|place| place.set(fence.clone()));
        }
        self.publish(&mut copies);
    }

    fn publish(&self, copies: &mut Noted) {
        copies.waiting.retain(|each| each.place.strong_count() > 0);
        let noted = if copies.waiting.is_empty() { 0 } else { copies.last_number };
        // Release, with the Acquire in `noted`: the copies were enqueued before (later-I1).
        self.noted.store(noted, Ordering::Release);
    }
}

/// The fence of a copy that has none of its own. A question fails until a later one of its stream is there.
pub(super) struct LaterFence {
    later: Arc<Place>,
    stream: StreamId,
    stream_number: u64,
    why: String,
    idle: Idle,
    /// A wait for the whole context has ended.
    is_over: AtomicBool,
}

impl fmt::Debug for LaterFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaterFence").field("stream", &self.stream).field("later", &self.later).finish_non_exhaustive()
    }
}

impl LaterFence {
    fn found(&self) -> Result<&SharedFence> {
        self.later.get().ok_or_else(|| Error::device(self.why.clone()))
    }
}

// SAFETY: the later fence stands behind the copy on the same stream (later-I1); without one, all work of the context is over.
#[allow(unsafe_code)]
unsafe impl Fence for LaterFence {
    fn is_done(&self) -> Result<bool> {
        // Acquire, with the Release in `wait`.
        if self.is_over.load(Ordering::Acquire) { Ok(true) } else { self.found()?.is_done() }
    }

    fn wait(&self) -> Result<()> {
        if let Some(fence) = self.later.get() {
            return fence.wait();
        }
        // The copy may still read or write, so an error in its place would let the host touch its bytes.
        (self.idle)()?;
        self.is_over.store(true, Ordering::Release);
        Ok(())
    }

    fn stream(&self) -> u64 {
        self.stream_number
    }

    fn stream_id(&self) -> Option<StreamId> {
        Some(self.stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::in_flight::ScriptedFence;

    #[test]
    fn a_copy_without_a_fence_ends_with_one_that_was_put_on_its_stream_later() {
        let (later, [this, other]) = (LaterFences::default(), [1, 2].map(|number| StreamId::of_driver(0, number)));
        let before = later.noted();
        let fence = later.expect(this, 1, "refused".to_owned(), Box::new(|| Ok(())));
        let ended = Arc::new(ScriptedFence::on(1));
        ended.finish();
        let ended: SharedFence = ended;
        later.note(before, this, &ended);
        later.note(later.noted(), other, &ended);
        assert!(fence.is_done().unwrap_err().to_string().contains("refused"), "before the copy, or of another stream");
        later.note(later.noted(), this, &ended);
        assert!(fence.is_done().unwrap());
    }

    #[test]
    fn who_waits_for_a_copy_without_a_fence_waits_for_all_work_of_the_context() {
        let (later, this) = (LaterFences::default(), StreamId::of_driver(0, 1));
        let refusing = later.expect(this, 1, "refused".to_owned(), Box::new(|| Err(Error::device("lost"))));
        assert!(refusing.wait().is_err() && refusing.is_done().is_err());
        let waited = Arc::new(AtomicU64::new(0));
        let counted = waited.clone();
        let idle = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let fence = later.expect(this, 1, "refused".to_owned(), Box::new(idle));
        assert!(fence.is_done().is_err());
        fence.wait().unwrap();
        assert_eq!((fence.is_done().unwrap(), waited.load(Ordering::Relaxed)), (true, 1));
    }
}
