//! Models of the cache: loom runs every interleaving, up to a few preemptions. Each thread passes its own slot, so the
//! models need no thread-local state.

#![allow(unsafe_code)] // Fast puts.

use super::*;
use loom::sync::Arc;
use loom::thread;
use pinpool_os::sync::atomic::{AtomicUsize, Ordering};

/// A value that loom watches: concurrent use is reported as a race.
type Watched = loom::cell::UnsafeCell<u32>;

fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

fn entry(home: u16) -> Box<Entry<Watched>> {
    Entry::new_at(home, 0, 10, Watched::new(u32::from(home)))
}

fn used(entry: Box<Entry<Watched>>) -> Box<Entry<Watched>> {
    entry.with_mut(|_| ());
    entry
}

/// Puts `entry`; returns whether the cache keeps it.
fn put(cache: &ThreadCache<Watched>, at: u16, entry: Box<Entry<Watched>>) -> bool {
    cache.put(at, used(entry)).map_err(used).is_ok()
}

/// Puts `entry` on the fast path of shard 0. Fails with it if the shard does not keep it.
fn put_fast(cache: &ThreadCache<Watched>, entry: Box<Entry<Watched>>) -> Result<(), Box<Entry<Watched>>> {
    // SAFETY: in these models every such entry was taken by the first shard.
    unsafe { cache.shards[0].put_fast(used(entry)) }.map_err(used)
}

fn idle(cache: &ThreadCache<Watched>) -> u64 {
    assert_eq!(cache.validate(), Ok(()));
    cache.counts().idle
}

fn drained(cache: &ThreadCache<Watched>) -> usize {
    let mut count = 0;
    cache.drain(u64::MAX, |entry| {
        used(entry);
        count += 1;
    });
    count
}

#[test]
fn loom_the_home_shard_or_a_stealing_thread_takes_each_buffer() {
    model(|| {
        let cache = Arc::new(ThreadCache::new(1, 4, 2));
        assert!(put(&cache, 0, entry(0)));
        let stealer = cache.clone();
        let stolen = thread::spawn(move || stealer.take(1, 0).map(used).is_some());
        let own = cache.take(0, 0).map(used);
        let kept = own.is_some();
        own.into_iter().for_each(|entry| assert!(put(&cache, 0, entry)));
        assert!(stolen.join().unwrap() || kept);
        assert_eq!(cache.validate(), Ok(()));
    });
}

/// A buffer that was idle before a take began is found while a third thread searches its shard. Fails if clearing the
/// bit before the search leaves no other bit for the shard.
#[test]
fn loom_a_remote_put_that_has_ended_is_found_although_a_third_thread_searches() {
    model(|| {
        let cache = Arc::new(ThreadCache::new(1, 8, 4));
        (0..2).for_each(|_| assert!(put(&cache, 0, entry(0))));
        let away = [(); 2].map(|()| cache.take(0, 0).unwrap());
        let stealer = cache.clone();
        let stealing = thread::spawn(move || stealer.take(3, 0).map(used).is_some());
        away.into_iter().for_each(|entry| assert!(put(&cache, 1, entry)));
        assert!(cache.take(2, 0).map(used).is_some(), "two are idle, and one other thread takes one");
        let left = u64::from(!stealing.join().unwrap());
        assert_eq!(idle(&cache), left);
    });
}

#[test]
fn loom_a_remote_put_is_found_although_a_steal_clears_the_occupancy_bit() {
    model(|| {
        let cache = Arc::new(ThreadCache::new(1, 4, 2));
        assert!(put(&cache, 0, entry(0)));
        let away = cache.take(0, 0).unwrap();
        let (putter, stealer) = (cache.clone(), cache.clone());
        let putting = thread::spawn(move || assert!(put(&putter, 1, away)));
        let stolen = stealer.take(1, 0).map(used).is_some();
        putting.join().unwrap();
        assert_eq!(cache.validate(), Ok(()), "the occupancy bit must be set");
        assert_eq!(cache.take(1, 0).is_some(), !stolen);
    });
}

#[test]
fn loom_a_remote_put_while_the_home_shard_takes() {
    model(|| {
        let cache = Arc::new(ThreadCache::new(1, 8, 2));
        let putter = cache.clone();
        let putting = thread::spawn(move || assert!(put(&putter, 1, entry(0))));
        assert!(put(&cache, 0, entry(0)));
        assert!(cache.take(0, 0).map(used).is_some(), "the home thread takes its own buffer");
        putting.join().unwrap();
        assert_eq!(idle(&cache), 1);
    });
}

#[test]
fn loom_two_threads_over_the_limit_evict_once_each() {
    model(|| {
        let cache = Arc::new(ThreadCache::new(1, 1, 2));
        assert!(put(&cache, 0, entry(0)));
        let other = cache.clone();
        let evicting = thread::spawn(move || {
            assert!(put(&other, 1, entry(1)));
            usize::from(other.evict_over_limit().map(used).is_some())
        });
        let mut evicted = usize::from(cache.evict_over_limit().map(used).is_some());
        evicted += evicting.join().unwrap();
        evicted += std::iter::from_fn(|| cache.evict_over_limit()).map(used).count();
        assert_eq!(idle(&cache) + evicted as u64, 2);
        assert!(idle(&cache) <= 1);
    });
}

#[test]
fn loom_a_return_that_races_with_seal_leaves_no_buffer_behind() {
    for home in 0..2 {
        model(move || {
            let cache = Arc::new(ThreadCache::new(1, 4, 2));
            let putter = cache.clone();
            let putting = thread::spawn(move || usize::from(put(&putter, 0, entry(home))));
            cache.seal();
            let found = drained(&cache);
            assert_eq!((putting.join().unwrap(), idle(&cache)), (found, 0));
        });
    }
}

/// A cache in which shard 0 handed out the returned buffer: its class is marked there.
fn given_out() -> (Arc<ThreadCache<Watched>>, Box<Entry<Watched>>) {
    let cache = Arc::new(ThreadCache::new(1, 4, 2));
    assert!(put(&cache, 0, entry(0)));
    let away = cache.take(0, 0).unwrap();
    (cache, used(away))
}

/// Fails if the fast put does not check the mark of the class.
#[test]
fn loom_a_fast_put_is_found_although_a_steal_clears_the_mark() {
    model(|| {
        let (cache, away) = given_out();
        let putter = cache.clone();
        let putting = thread::spawn(move || {
            let unkept = put_fast(&putter, away).err();
            unkept.into_iter().for_each(|entry| assert!(put(&putter, 0, entry)));
        });
        let stolen = cache.take(1, 0).map(used).is_some();
        putting.join().unwrap();
        assert_eq!(cache.validate(), Ok(()), "the occupancy bit must be set");
        assert_eq!(cache.take(1, 0).is_some(), !stolen);
    });
}

/// Holds even if the fast path reads the flag before it has the lock: the search removed the class's mark, so the fast put
/// fails. With that change, the models of the lock and of the seal fail instead.
#[test]
fn loom_a_waiting_request_finds_a_fast_put_or_the_fast_put_fails() {
    model(|| {
        let (cache, away) = given_out();
        let putter = cache.clone();
        let putting = thread::spawn(move || put_fast(&putter, away).is_ok());
        cache.set_slow_path(true);
        let found = cache.take(1, 0).map(used).is_some();
        assert_eq!((putting.join().unwrap(), idle(&cache)), (found, 0));
    });
}

/// Fails if `set_slow_path` does not collect the remote list.
#[test]
fn loom_a_waiting_request_finds_a_remote_return_or_the_return_sees_it() {
    model(|| {
        let (cache, away) = given_out();
        // The count of waiting requests: a return reads it after its buffer is idle.
        let waiting = Arc::new(AtomicUsize::new(0));
        let (putter, seen) = (cache.clone(), waiting.clone());
        let putting = thread::spawn(move || {
            assert!(put(&putter, 1, away));
            seen.load(Ordering::SeqCst) > 0
        });
        waiting.fetch_add(1, Ordering::SeqCst);
        cache.set_slow_path(true);
        let found = cache.take(0, 0).map(used).is_some();
        assert!(putting.join().unwrap() || found);
        assert_eq!((cache.take(0, 0).is_some(), cache.validate()), (!found, Ok(())));
    });
}

/// Fails if the end of a wait clears the flag of a sealed shard.
#[test]
fn loom_a_fast_put_that_races_with_seal_leaves_no_buffer_behind() {
    model(|| {
        let (cache, away) = given_out();
        let putter = cache.clone();
        let putting = thread::spawn(move || put_fast(&putter, away).is_ok());
        cache.seal();
        // The end of a wait does not open the fast path of a sealed cache.
        cache.set_slow_path(false);
        let found = drained(&cache) == 1;
        assert_eq!((putting.join().unwrap(), idle(&cache)), (found, 0));
    });
}
