//! Models of what threads can do to each other here: loom runs every interleaving, up to a few preemptions.
//!
//! Each thread stands on a seat of its own choosing, so the models need no thread-local state.

use super::*;
use loom::sync::Arc;
use loom::thread;

/// A value that loom watches: using it while another thread may is reported as a race.
type Watched = loom::cell::UnsafeCell<u32>;

fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

fn entry(home: u32) -> Box<Entry<Watched>> {
    Entry::new_at(home, 0, 10, Watched::new(home))
}

fn used(entry: Box<Entry<Watched>>) -> Box<Entry<Watched>> {
    entry.with_mut(|_| ());
    entry
}

/// Each thread of a model has seats of its own.
#[allow(unsafe_code)]
fn seat(number: u32) -> ThreadSlot {
    // SAFETY: (seat I1) see above.
    unsafe { ThreadSlot::pretend(number) }
}

fn put(front: &ThreadCache<Watched>, at: u32, entry: Box<Entry<Watched>>) -> Put<Watched> {
    front.put_at(seat(at), used(entry), 1)
}

/// How many come out of a put again.
fn back(put: Put<Watched>) -> usize {
    let victim = put.victim.map(used).is_some();
    usize::from(victim) + usize::from(put.handed_back.map(used).is_some())
}

fn drained(front: &ThreadCache<Watched>) -> usize {
    let mut count = 0;
    front.drain_all(|entry| {
        used(entry);
        count += 1;
    });
    count
}

#[test]
fn loom_owner_and_thief_share_what_is_there() {
    model(|| {
        let front = Arc::new(ThreadCache::new(1, 4, 2));
        assert_eq!(back(put(&front, 0, entry(0))), 0);
        let thief = front.clone();
        let stolen = thread::spawn(move || thief.take_at(seat(1), 0).map(used).is_some());
        let own = front.take_at(seat(0), 0).map(used);
        let kept = own.is_some();
        own.into_iter().for_each(|entry| assert_eq!(back(put(&front, 0, entry)), 0));
        assert!(stolen.join().unwrap() || kept);
        assert_eq!(front.validate(), Ok(()));
    });
}

#[test]
fn loom_a_buffer_brought_home_is_found_although_a_thief_looks_in_vain() {
    model(|| {
        let front = Arc::new(ThreadCache::new(1, 4, 2));
        assert_eq!(back(put(&front, 0, entry(0))), 0);
        let away = front.take_at(seat(0), 0).unwrap();
        let (bringer, thief) = (front.clone(), front.clone());
        let bringing = thread::spawn(move || assert_eq!(back(put(&bringer, 1, away)), 0));
        let stolen = thief.take_at(seat(1), 0).map(used).is_some();
        bringing.join().unwrap();
        assert_eq!(front.validate(), Ok(()), "the class is to be found where it is");
        assert_eq!(front.take_at(seat(1), 0).is_some(), !stolen);
    });
}

#[test]
fn loom_two_bring_home_while_the_owner_takes() {
    model(|| {
        let front = Arc::new(ThreadCache::new(1, 8, 2));
        let bringer = front.clone();
        let bringing = thread::spawn(move || assert_eq!(back(put(&bringer, 1, entry(0))), 0));
        assert_eq!(back(put(&front, 0, entry(0))), 0);
        let taken = front.take_at(seat(0), 0).map(used).is_some();
        assert!(taken, "its own is there");
        bringing.join().unwrap();
        assert_eq!((front.idle_count(), front.validate()), (1, Ok(())));
    });
}

#[test]
fn loom_two_puts_and_one_place() {
    model(|| {
        let front = Arc::new(ThreadCache::new(1, 1, 2));
        let other = front.clone();
        let there = thread::spawn(move || back(put(&other, 1, entry(1))));
        let here = back(put(&front, 0, entry(0)));
        assert_eq!(here + there.join().unwrap(), 1);
        assert_eq!((front.idle_count(), front.validate()), (1, Ok(())));
    });
}

#[test]
fn loom_a_put_and_a_lower_limit() {
    model(|| {
        let front = Arc::new(ThreadCache::new(1, 2, 2));
        assert_eq!(back(put(&front, 0, entry(0))), 0);
        let other = front.clone();
        let there = thread::spawn(move || back(put(&other, 1, entry(1))));
        let mut pushed_out = 0;
        front.set_limit(1, |_| pushed_out += 1);
        assert_eq!(pushed_out + there.join().unwrap(), 1);
        assert_eq!((front.idle_count(), front.validate()), (1, Ok(())));
    });
}

#[test]
fn loom_nothing_is_stranded_by_a_put_that_meets_the_seal() {
    for home in 0..2 {
        model(move || {
            let front = Arc::new(ThreadCache::new(1, 4, 2));
            let putter = front.clone();
            let putting = thread::spawn(move || back(put(&putter, 0, entry(home))));
            front.seal();
            let found = drained(&front);
            assert_eq!(found + putting.join().unwrap(), 1);
            assert_eq!((front.idle_count(), front.validate()), (0, Ok(())));
        });
    }
}
