//! Records of requests and returns: events, holders, and call stacks of some requests (`call_stacks`).
//!
//! A pool that records or samples takes the slow paths, so hits of other pools do not pay for it.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::{Block, BlockRequest, PoolCore};
use crate::engine::meter::nanos;
use pinpool_observe::record::{Event, FAILED_RECORDINGS, Name, Recorder};
use pinpool_os::call_stack::CallStack;

impl PoolCore {
    #[inline]
    pub(crate) fn recorder(&self) -> Option<&Arc<dyn Recorder>> {
        self.recorder.as_ref()
    }

    pub(super) fn record(&self, event: Event) {
        if let Some(recorder) = &self.recorder {
            recorder.record(event);
        }
    }

    /// Records an event of `block`, if the pool records and the block has an id.
    pub(super) fn record_of(&self, block: &Block, event: impl FnOnce(u64) -> Event) {
        if let Some((recorder, id)) = self.recorder.as_ref().zip(block.memory().recorded_id()) {
            recorder.record(event(id));
        }
    }

    pub(super) fn record_new(&self, block: &Block) {
        let (address, from_source) = (block.memory().start().addr().get() as u64, block.memory().is_from_source());
        let class_bytes = block.class_bytes() as u64;
        self.record_of(block, |id| Event::New { id, address, class_bytes, from_source });
    }

    /// Records a request that was served: immediately by an idle block, or by a miss that began at `begun`.
    #[inline]
    pub(super) fn record_get(&self, block: &Block, request: &BlockRequest, begun: Option<Instant>) {
        if let Some((recorder, id)) = self.recorder().zip(block.memory().recorded_id()) {
            let class_bytes = block.class_bytes() as u64;
            let (bytes, tag, took_ns) = (request.len as u64, tag(recorder, request), ns_since(begun));
            recorder.record(Event::Get { id, bytes, class_bytes, tag, took_ns });
        }
    }

    /// Records the end of a request that was not a hit: as [`record_get`](Self::record_get) does, or as refused. Counts the
    /// request if it was served.
    pub(super) fn record_outcome<E>(&self, outcome: &Result<Block, E>, request: &BlockRequest, begun: Option<Instant>) {
        if outcome.is_ok() {
            self.counters.count_request(request.len, request.class.bytes);
        }
        match (outcome, self.recorder()) {
            (Ok(block), Some(_)) => self.record_get(block, request, begun),
            (Err(_), Some(recorder)) => {
                let (bytes, class_bytes, tag) =
                    (request.len as u64, request.class.bytes as u64, tag(recorder, request));
                recorder.record(Event::Refused { bytes, class_bytes, tag, took_ns: ns_since(begun) });
            }
            (_, None) => {}
        }
    }

    /// Records that a user returns `block`.
    #[inline]
    pub(in crate::engine) fn record_put(&self, block: &Block, in_flight: bool) {
        self.record_of(block, |id| Event::Put { id, in_flight });
    }

    /// Logs the failure of the recording, unless it `is_logged`. The end of the pool logs the final counts.
    pub(super) fn report_recording(&self, is_logged: &mut bool) {
        if let Some(recorder) = self.recorder().filter(|it| !*is_logged && it.recorded().failure.is_some()) {
            *is_logged = true;
            self.log.recorded(recorder.path(), &recorder.recorded());
        }
    }

    /// Completes the recording, since the pool has ended, and logs the result.
    pub(super) fn end_recording(&self) {
        if let Some(recorder) = self.recorder()
            && let Some(recorded) = recorder.end()
        {
            if recorded.failure.is_some() {
                FAILED_RECORDINGS.fetch_add(1, Ordering::Relaxed);
            }
            self.log.recorded(recorder.path(), &recorded);
        }
    }

    /// Records the holder of `block` under its tag, and its call stack if this request is sampled.
    pub(crate) fn record_holder(&self, block: &mut Block, request: &BlockRequest) {
        let sampled = is_sampled(self.config.code_only.call_stacks);
        let tag = request.tag.as_ref().or_else(|| sampled.then_some(&self.holders.untagged));
        let Some(tag) = tag else { return };
        let stack = sampled.then(|| Arc::new(CallStack::here()));
        if let Some((recorder, id)) = self.recorder().zip(block.memory().recorded_id())
            && let Some(stack) = &stack
        {
            recorder.record(Event::Sampled { id, stack: recorder.number(Name::Stack(stack.clone())) });
        }
        let held_bytes = block.memory().held_bytes();
        block.set_tag_row(tag.hold(request.len as u64, held_bytes, self.time.coarse_us(), stack));
    }
}

/// Returns the number of the request's tag in the recording, or 0 without a tag.
fn tag(recorder: &Arc<dyn Recorder>, request: &BlockRequest) -> u32 {
    request.tag.as_ref().map_or(0, |tag| tag.recorded_number(|name| recorder.number(Name::Tag(name.into()))))
}

fn ns_since(begun: Option<Instant>) -> u64 {
    begun.map_or(0, |begun| nanos(begun.elapsed()))
}

/// Returns whether a request is sampled: one in `every`, at random. A counter could always select the same request in a loop.
fn is_sampled(every: u64) -> bool {
    thread_local! {
        static RANDOM: Cell<u64> = const { Cell::new(0) };
    }
    if every == 0 {
        return false;
    }
    let before = RANDOM.get();
    // Zero is the initial state of a thread, and xorshift never leaves it.
    let mut random = if before == 0 { RandomState::new().hash_one(0) | 1 } else { before };
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    RANDOM.set(random);
    (u128::from(random) * u128::from(every)) >> 64 == 0
}

#[cfg(test)]
mod tests {
    use super::is_sampled;

    #[cfg(feature = "observe")]
    #[test]
    fn a_pool_that_records_never_has_an_entry() {
        use crate::{Backend, Pool};
        let dir = tempfile::tempdir().unwrap();
        let pool =
            Pool::builder().without_env().backend(Backend::Heap).trace(dir.path().join("t.trace")).build().unwrap();
        for _ in 0..4 {
            drop(pool.get(4096).unwrap());
            assert!(pool.core().thread_shard().is_none() && !pool.core().has_fast_path());
        }
        assert_eq!(pool.stats().requests.hits, 3);
    }

    #[test]
    fn one_request_in_n_is_sampled() {
        let drawn = |every| (0..100_000).filter(|_| is_sampled(every)).count();
        assert_eq!((drawn(0), drawn(1)), (0, 100_000));
        assert!((800..1_200).contains(&drawn(100)));
    }
}
