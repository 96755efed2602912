//! Hits do not allocate on the heap, according to a counting global allocator.

use pinpool::unstable::ManualClock;

use crate::fixture::heap;
use crate::heap_use;

#[test]
fn hits_allocate_nothing_on_the_heap() {
    // Some hits read the clock, and maintenance, which is due every 10 ms, may allocate. The clock is stopped, so that only
    // hits are counted.
    let pool = heap().unstable_clock(ManualClock::default()).build().unwrap();
    let lens = [100, 5_000, 100_000, 1 << 20];
    // The first round gives every class its buffer and every table its size.
    let round = || {
        let held = lens.map(|len| pool.get(len).unwrap());
        assert!(held.iter().all(|buffer| !buffer.is_empty()));
    };
    round();
    let before = heap_use::calls();
    assert!(before > 0, "the counting allocator is not in place");
    (0..1000).for_each(|_| round());
    assert_eq!(heap_use::calls() - before, 0);
    assert_eq!(pool.stats().requests.hits, 4000);
}
