//! What is recorded of a pool, where it is.

use std::sync::Arc;
use std::time::Instant;

use super::{Block, Core, Wanted};
use pinpool_observe::record::{Event, Recorder, count_failed};

impl Core {
    #[inline]
    pub(in crate::engine) fn recorder(&self) -> Option<&Arc<Recorder>> {
        self.stock.recorder()
    }

    /// When a get that is no hit begins, if that is recorded.
    pub(super) fn recording_since(&self) -> Option<Instant> {
        self.recorder().map(|_| Instant::now())
    }

    /// A get was served: at once, or after it began to look for memory.
    #[inline]
    pub(crate) fn record_get(&self, block: &Block, wanted: &Wanted, begun: Option<Instant>) {
        if let Some((recorder, id)) = self.recorder().zip(block.recorded_id()) {
            let class_bytes = block.class_bytes() as u64;
            let (bytes, tag, took_ns) = (wanted.len as u64, tag(recorder, wanted), ns_since(begun));
            recorder.record(Event::Get { id, bytes, class_bytes, tag, took_ns });
        }
    }

    /// A request that was no hit ended: records it as [`record_get`](Self::record_get) does, or that it was refused.
    pub(super) fn record_outcome<E>(&self, outcome: &Result<Block, E>, wanted: &Wanted, begun: Option<Instant>) {
        if outcome.is_ok() {
            self.accounts.count_request(wanted.len, wanted.class.bytes);
        }
        match (outcome, self.recorder()) {
            (Ok(block), Some(_)) => self.record_get(block, wanted, begun),
            (Err(_), Some(recorder)) => {
                let (bytes, class_bytes, tag) = (wanted.len as u64, wanted.class.bytes as u64, tag(recorder, wanted));
                recorder.record(Event::Refused { bytes, class_bytes, tag, took_ns: ns_since(begun) });
            }
            (_, None) => {}
        }
    }

    /// The request that this thread records next was in the wait queue.
    pub(super) fn record_wait_event(&self) {
        if let Some(recorder) = self.recorder() {
            recorder.record(Event::Waited);
        }
    }

    /// A user is done with `block`.
    #[inline]
    pub(in crate::engine) fn record_put(&self, block: &Block, in_flight: bool) {
        self.stock.record_of(block, |id| Event::Put { id, in_flight });
    }

    /// The pool has ended: its file is complete.
    pub(super) fn end_recording(&self) {
        if let Some(recorder) = self.recorder()
            && let Some(recorded) = recorder.end()
        {
            if recorded.failure.is_some() {
                count_failed();
            }
            self.log.recorded(recorder.path(), &recorded);
        }
    }
}

/// The number of the tag that the buffer is wanted under; 0 of none.
fn tag(recorder: &Recorder, wanted: &Wanted) -> u32 {
    wanted.ledger.as_ref().map_or(0, |ledger| ledger.recorded_number(|name| recorder.name_tag(name)))
}

fn ns_since(begun: Option<Instant>) -> u64 {
    begun.map_or(0, |begun| u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(all(test, feature = "observe"))]
mod tests {
    use crate::{Backend, Pool};

    #[test]
    fn a_pool_that_records_is_never_at_hand() {
        let dir = tempfile::tempdir().unwrap();
        let pool =
            Pool::builder().without_env().backend(Backend::Heap).trace(dir.path().join("t.trace")).build().unwrap();
        for _ in 0..4 {
            drop(pool.get(4096).unwrap());
            assert!(pool.core().shard_at_hand().is_none() && !pool.core().has_short_path());
        }
        assert_eq!(pool.stats().requests.hits, 3);
    }
}
