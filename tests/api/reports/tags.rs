//! Buffers that carry a tag: who holds what, for how long, and what this costs other users.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use log::Level;
use pinpool::Rounding;
use pinpool::{Pool, PoolBuilder, Preset, Request};
use pinpool_testing::{SinkMemory, SinkStream};

use crate::captured_log::{lines_with_levels, listen};
use crate::fixture::{MIB, heap, held_sink, with_manual_clock};
use crate::valid_stats::valid_stats;

fn builder() -> PoolBuilder {
    heap().max_bytes(64 << 20)
}

/// Tag, buffers and bytes of all holders.
fn holders(pool: &Pool) -> Vec<(String, u64, u64)> {
    let all = pool.dump().holders().to_vec();
    // Under `tensorflow` each buffer takes a page more than its length.
    let more = if pool.unstable_config().preset == Preset::TensorFlow { 4096 } else { 0 };
    all.into_iter().map(|holder| (holder.tag, holder.buffers, holder.bytes - more * holder.buffers)).collect()
}

fn of(tag: &str, buffers: u64, bytes: u64) -> (String, u64, u64) {
    (tag.to_owned(), buffers, bytes)
}

#[test]
fn each_tag_counts_what_its_handles_hold() {
    for (preset, rounding) in [(Preset::Adaptive, Rounding::Eighths), (Preset::TensorFlow, Rounding::Exact)] {
        let pool = builder().preset(preset).setting("rounding", rounding).build().unwrap();
        let (images, labels) = (pool.tagged("loader/images"), pool.tagged("loader/labels"));
        assert_eq!((images.tag(), images.name()), (Some("loader/images"), None));
        let held: Vec<_> = (0..3).map(|_| images.clone().get(MIB).unwrap()).collect();
        let label = labels.get_with(Request::new(8192).timeout(Duration::ZERO)).unwrap();
        let untagged = pool.get(2 * MIB).unwrap();
        let all = [of("loader/images", 3, 3 << 20), of("(untagged)", 1, 2 << 20), of("loader/labels", 1, 8192)];
        assert_eq!(holders(&pool), all);
        drop((held, label));
        assert_eq!(holders(&pool), [of("(untagged)", 1, 2 << 20)]);
        // Idle memory has no holder: its next user has another tag.
        let other = labels.try_get(MIB).unwrap().unwrap();
        assert_eq!(holders(&pool), [of("(untagged)", 1, 2 << 20), of("loader/labels", 1, 1 << 20)]);
        drop((other, untagged));
        let plain = pool.get(MIB).unwrap();
        assert_eq!(holders(&pool), [of("(untagged)", 1, 1 << 20)]);
        drop(plain);
        assert_eq!(holders(&pool), []);
        valid_stats(&pool);
    }
}

#[test]
fn a_buffer_counts_for_its_tag_until_its_copy_completes() {
    let pool = builder().build().unwrap();
    let images = pool.tagged("images");
    let (stream, mut device, gate) = held_sink(MIB);
    let copy = images.get(MIB).unwrap().copy_to(&stream, &mut device).unwrap();
    assert_eq!(holders(&pool), [of("images", 1, 1 << 20)], "in flight");
    drop(gate);
    copy.wait().unwrap();
    pool.maintain();
    assert_eq!(holders(&pool), []);
    let buf = images.get(MIB).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // This thread has cached the pool.
            drop(pool.get(4096).unwrap());
            drop(buf);
        });
    });
    assert_eq!(holders(&pool), []);
}

#[test]
fn tasks_and_aligned_requests_carry_the_tag() {
    let pool = builder().max_bytes(4 << 20).build().unwrap();
    let tagged = pool.tagged("t");
    let aligned = tagged.get_with(Request::new(4096).align(1 << 16)).unwrap();
    let other = tagged.get(MIB).unwrap();
    assert_eq!(holders(&pool)[0].1, 2);
    drop((aligned, other));
    let all = pool.get(4 * MIB).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let mut get = std::pin::pin!(tagged.get_async(Request::new(4 * MIB).timeout(Duration::from_secs(3600))));
    assert!(get.as_mut().poll(&mut context).is_pending());
    drop(all);
    let Poll::Ready(Ok(buf)) = get.poll(&mut context) else { panic!("it is handed the buffer") };
    assert_eq!(holders(&pool), [of("t", 1, 4 << 20)]);
    drop(buf);
    assert!(tagged.get(0).unwrap().is_empty());
    assert_eq!(holders(&pool), []);
}

#[test]
fn a_buffer_that_is_lost_is_nobodys() {
    let builder = builder().unstable_settings(|only| only.copies_wait = Some(Duration::ZERO));
    let pool = builder.maintenance_thread(false).build().unwrap();
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(MIB));
    stream.fail();
    let _copy = pool.tagged("t").get(MIB).unwrap().copy_to(&stream, &mut device);
    pool.maintain();
    assert_eq!((holders(&pool), pool.stats().memory.quarantined), (Vec::new(), 1));
}

#[test]
fn at_the_end_the_log_has_totals_and_what_is_still_out() {
    let (pool, clock) = with_manual_clock(builder().name("p"));
    listen();
    let images = pool.tagged("images");
    let old = images.get(MIB).unwrap();
    clock.advance_us(5_000_000);
    pool.maintain();
    let (young, untagged) = (images.get(4096).unwrap(), pool.get(8192).unwrap());
    clock.advance_us(2_000_000);
    drop((images, pool));
    let kept = lines_with_levels();
    let [(Level::Info, ended), (Level::Info, out)] = kept.as_slice() else { panic!("two lines: {kept:?}") };
    assert_eq!(ended, "pool[p] pool_ended: requests=3 hits=0 misses=3 failed=0 evicted=0 pins=1 peak=2.0MiB");
    assert_eq!(
        out,
        "pool[p] buffers_still_out: memory stays allocated until these are dropped, buffers=3 bytes=1.0MiB\n  1.0MiB tag=images age=7.0s\n  \
         4.0KiB tag=images age=2.0s\n  8.0KiB in 1 buffers without a tag (see tagged())"
    );
    drop((old, young, untagged));
    assert_eq!(lines_with_levels(), []);
}
