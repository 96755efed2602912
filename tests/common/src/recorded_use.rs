//! A use of a pool that records it, and the number of its events.

use pinpool::Pool;
use pinpool_observe::record::{Event, Recording};
use pinpool_testing::{SinkMemory, SinkStream};

/// The number of events for which `is` holds.
pub fn count(recording: &Recording, is: impl Fn(&Event) -> bool) -> u64 {
    recording.records.iter().filter(|record| is(&record.event)).count() as u64
}

/// Holds three buffers at once and makes a copy, 20 times.
pub fn use_pool(pool: &Pool) {
    let stream = SinkStream::new().unwrap();
    for round in 0..20 {
        let mut device = SinkMemory::new(1 << 20);
        let buffers: Vec<_> = (1..=3).map(|n| pool.get(n * 10_000 + round).unwrap()).collect();
        pool.get(1 << 20).unwrap().copy_to(&stream, &mut device).unwrap().wait().unwrap();
        drop(buffers);
    }
    pool.maintain();
}
