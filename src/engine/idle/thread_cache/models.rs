//! Models of the cache: loom runs every interleaving, up to a few preemptions. Each thread passes its own slot, so the
//! models need no thread-local state.

use super::*;
use loom::sync::Arc;
use loom::thread;
use pinpool_os::sync::atomic::{AtomicUsize, Ordering};

/// A value that loom watches: concurrent use is reported as a race.
type Watched = loom::cell::UnsafeCell<u32>;

fn model(check: impl Fn() + Sync + Send + 'static) {
    model_within(3, check);
}

fn model_within(preemptions: usize, check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(check);
}

fn entry(owner: u16) -> Box<Entry<Watched>> {
    Entry::new_at(owner, 0, 10, Watched::new(u32::from(owner)))
}

fn used(entry: Box<Entry<Watched>>) -> Box<Entry<Watched>> {
    entry.with_mut(|_| ());
    entry
}

fn put(cache: &ThreadCache<Watched>, at: u16, entry: Box<Entry<Watched>>) -> Put<Watched> {
    cache.put_at(at, used(entry))
}

/// How many buffers a put returns.
fn returned(put: Put<Watched>) -> usize {
    let victim = put.victim.map(used).is_some();
    usize::from(victim) + usize::from(put.handed_back.map(used).is_some())
}

fn drained(cache: &ThreadCache<Watched>) -> usize {
    let mut count = 0;
    cache.drain_all(|entry| {
        used(entry);
        count += 1;
    });
    count
}

#[test]
fn loom_the_owner_or_a_stealing_thread_takes_each_buffer() {
    model(|| {
        let cache = Arc::new(ThreadCache::new(1, 4, 2));
        assert_eq!(returned(put(&cache, 0, entry(0))), 0);
        let stealer = cache.clone();
        let stolen = thread::spawn(move || stealer.take_at(1, 0).map(used).is_some());
        let own = cache.take_at(0, 0).map(used);
        let kept = own.is_some();
        own.into_iter().for_each(|entry| assert_eq!(returned(put(&cache, 0, entry)), 0));
        assert!(stolen.join().unwrap() || kept);
        assert_eq!(cache.validate(), Ok(()));
    });
}

/// A buffer that was idle before a take began is found while a third thread searches its shard. Fails if the bit is cleared
/// before the search in such a way that no other bit tells of the shard.
#[test]
fn loom_a_remote_put_that_has_ended_is_found_although_a_third_thread_searches() {
    model(|| {
        let cache = Arc::new(ThreadCache::new(1, 8, 4));
        (0..2).for_each(|_| assert_eq!(returned(put(&cache, 0, entry(0))), 0));
        let away = [(); 2].map(|()| cache.take_at(0, 0).unwrap());
        let stealer = cache.clone();
        let stealing = thread::spawn(move || stealer.take_at(3, 0).map(used).is_some());
        away.into_iter().for_each(|entry| assert_eq!(returned(put(&cache, 1, entry)), 0));
        assert!(cache.take_at(2, 0).map(used).is_some(), "two are idle, and one other thread takes one");
        let left = usize::from(!stealing.join().unwrap());
        assert_eq!((cache.idle_count(), cache.validate()), (left, Ok(())));
    });
}

#[test]
fn loom_a_remote_put_is_found_although_a_steal_clears_the_occupancy_bit() {
    model(|| {
        let cache = Arc::new(ThreadCache::new(1, 4, 2));
        assert_eq!(returned(put(&cache, 0, entry(0))), 0);
        let away = cache.take_at(0, 0).unwrap();
        let (putter, stealer) = (cache.clone(), cache.clone());
        let putting = thread::spawn(move || assert_eq!(returned(put(&putter, 1, away)), 0));
        let stolen = stealer.take_at(1, 0).map(used).is_some();
        putting.join().unwrap();
        assert_eq!(cache.validate(), Ok(()), "the occupancy bit must be set");
        assert_eq!(cache.take_at(1, 0).is_some(), !stolen);
    });
}

#[test]
fn loom_a_remote_put_while_the_owner_takes() {
    model(|| {
        let cache = Arc::new(ThreadCache::new(1, 8, 2));
        let putter = cache.clone();
        let putting = thread::spawn(move || assert_eq!(returned(put(&putter, 1, entry(0))), 0));
        assert_eq!(returned(put(&cache, 0, entry(0))), 0);
        let taken = cache.take_at(0, 0).map(used).is_some();
        assert!(taken, "the owner takes its own buffer");
        putting.join().unwrap();
        assert_eq!((cache.idle_count(), cache.validate()), (1, Ok(())));
    });
}

#[test]
fn loom_two_puts_and_one_permit() {
    model(|| {
        let cache = Arc::new(ThreadCache::new(1, 1, 2));
        let other = cache.clone();
        let other_thread = thread::spawn(move || returned(put(&other, 1, entry(1))));
        let this_thread = returned(put(&cache, 0, entry(0)));
        assert_eq!(this_thread + other_thread.join().unwrap(), 1);
        assert_eq!((cache.idle_count(), cache.validate()), (1, Ok(())));
    });
}

#[test]
fn loom_a_put_while_the_limit_is_lowered() {
    // The search for permits has many steps.
    model_within(2, || {
        let cache = Arc::new(ThreadCache::new(1, 2, 2));
        assert_eq!(returned(put(&cache, 0, entry(0))), 0);
        let other = cache.clone();
        let other_thread = thread::spawn(move || returned(put(&other, 1, entry(1))));
        let mut evicted = 0;
        cache.set_limit(1, |_| evicted += 1);
        assert_eq!(evicted + other_thread.join().unwrap(), 1);
        assert_eq!((cache.idle_count(), cache.validate()), (1, Ok(())));
    });
}

#[test]
fn loom_a_put_that_races_with_seal_leaves_no_buffer_behind() {
    for owner in 0..2 {
        model(move || {
            let cache = Arc::new(ThreadCache::new(1, 4, 2));
            let putter = cache.clone();
            let putting = thread::spawn(move || returned(put(&putter, 0, entry(owner))));
            cache.seal();
            let found = drained(&cache);
            assert_eq!(found + putting.join().unwrap(), 1);
            assert_eq!((cache.idle_count(), cache.validate()), (0, Ok(())));
        });
    }
}

/// A cache whose shard 0 gave out the buffer that is returned: its class is marked there and a permit is spare.
fn given_out() -> (Arc<ThreadCache<Watched>>, Box<Entry<Watched>>) {
    let cache = Arc::new(ThreadCache::new(1, 4, 2));
    assert_eq!(returned(put(&cache, 0, entry(0))), 0);
    let away = cache.take_at(0, 0).unwrap();
    (cache, used(away))
}

/// Fails if the short put does not look whether the class is marked.
#[test]
fn loom_a_short_put_is_found_although_a_steal_clears_the_mark() {
    model(|| {
        let (cache, away) = given_out();
        let putter = cache.clone();
        let putting = thread::spawn(move || {
            let unkept = putter.shards[0].put_at_once(used(away)).err();
            unkept.into_iter().for_each(|entry| assert_eq!(returned(put(&putter, 0, entry)), 0));
        });
        let stolen = cache.take_at(1, 0).map(used).is_some();
        putting.join().unwrap();
        assert_eq!(cache.validate(), Ok(()), "the occupancy bit must be set");
        assert_eq!(cache.take_at(1, 0).is_some(), !stolen);
    });
}

/// Holds even if the short path looks at the attention before it has the lock: the search took the class's mark away, so
/// the put is not short. The model of the lock and the one of the seal fail then.
#[test]
fn loom_a_get_that_waits_finds_a_short_put_or_the_put_is_not_short() {
    model(|| {
        let (cache, away) = given_out();
        let putter = cache.clone();
        let putting = thread::spawn(move || putter.shards[0].put_at_once(used(away)).map_err(used).is_err());
        cache.set_attention(true);
        let found = cache.take_at(1, 0).map(used).is_some();
        assert_eq!(found, !putting.join().unwrap());
        assert_eq!(cache.validate(), Ok(()));
    });
}

/// Fails if `set_attention` does not collect the remote free list.
#[test]
fn loom_a_get_that_waits_finds_a_remote_put_or_the_put_sees_it() {
    model(|| {
        let (cache, away) = given_out();
        // The count of the line: a put looks at it after its buffer is idle.
        let waiting = Arc::new(AtomicUsize::new(0));
        let (putter, seen) = (cache.clone(), waiting.clone());
        let putting = thread::spawn(move || {
            assert_eq!(returned(put(&putter, 1, away)), 0);
            seen.load(Ordering::SeqCst) > 0
        });
        waiting.fetch_add(1, Ordering::SeqCst);
        cache.set_attention(true);
        let found = cache.take_at(0, 0).map(used).is_some();
        assert!(putting.join().unwrap() || found);
        assert_eq!((cache.take_at(0, 0).is_some(), cache.validate()), (!found, Ok(())));
    });
}

/// Fails if the end of a wait takes the attention of a sealed shard away.
#[test]
fn loom_a_short_put_that_races_with_seal_leaves_no_buffer_behind() {
    model(|| {
        let (cache, away) = given_out();
        let putter = cache.clone();
        let putting = thread::spawn(move || putter.shards[0].put_at_once(used(away)).map_err(used).is_err());
        cache.seal();
        // The end of a wait opens no short path of a sealed cache.
        cache.set_attention(false);
        let found = drained(&cache);
        assert_eq!(found + usize::from(putting.join().unwrap()), 1);
        assert_eq!((cache.idle_count(), cache.validate()), (0, Ok(())));
    });
}
