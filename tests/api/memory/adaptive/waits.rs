//! Requests that wait at the limit.

use super::{MIB, after_seconds, over_virtual_memory, with_manual_clock};
use crate::captured_log::{count, lines, listen};

#[test]
fn a_shortage_is_logged_once_when_it_begins_and_once_when_it_is_over() {
    listen();
    let (pool, clock) = with_manual_clock(over_virtual_memory().max_bytes(2 << 20));
    let mut all = Some(pool.get(2 * MIB).unwrap());
    for _ in 0..100 {
        assert!(pool.get(4096).is_err());
        // A request that succeeds in between does not end the shortage.
        drop(all.take());
        all = Some(pool.get(2 * MIB).unwrap());
    }
    let logged = lines();
    assert_eq!((count(&logged, " refused: request=4.0KiB"), count(&logged, " shortage_ended: ")), (1, 0), "{logged:?}");
    drop(all);
    after_seconds(&clock, &pool, 1);
    let logged = lines();
    assert_eq!(count(&logged, " requests=100 waited=0s pageable=0"), 1, "{logged:?}");
}
