//! Requests that keep their call stack: a leaked buffer is reported with the function that requested it.

use std::path::Path;

use pinpool::{PinnedBuf, Pool, PoolBuilder};
use pinpool_observe::record::Event;

use crate::captured_log::{lines_with_levels, listen};
use crate::fixture::{heap, with_manual_clock};
use crate::recordings::read_recording;
use crate::scratch::scratch;
use crate::valid_stats::valid_stats;

fn sampling(every: u64) -> PoolBuilder {
    // Without a maintenance thread, dropping the last handle ends the pool and its recording.
    heap().maintenance_thread(false).max_bytes(64 << 20).call_stacks(every)
}

#[inline(never)]
fn get_for_ever(pool: &Pool) -> PinnedBuf {
    pool.get(4096).unwrap()
}

#[inline(never)]
fn get_tagged(pool: &Pool) -> PinnedBuf {
    pool.get(8192).unwrap()
}

/// The id of each sampled buffer, with the first frame of its call stack.
fn sampled(path: &Path) -> Vec<(u64, String)> {
    let recording = read_recording(path).unwrap();
    let name = |stack: u32| recording.stacks[&stack].first().map_or_else(String::new, |frame| frame.name.clone());
    let sampled = recording.records.iter().filter_map(|record| match record.event {
        Event::Sampled { id, stack } => Some((id, name(stack))),
        _ => None,
    });
    sampled.collect()
}

#[test]
fn a_leak_without_a_tag_is_named_too_and_without_samples_the_setting_is() {
    for (every, named) in [(1, "get_for_ever)"), (0, "")] {
        let (pool, clock) = with_manual_clock(sampling(every));
        let mut kept = Vec::new();
        for _ in 0..90 {
            (0..19).for_each(|_| drop(pool.get(4096).unwrap()));
            kept.push(get_for_ever(&pool));
            clock.advance_us(1_000_000);
            pool.maintain();
        }
        let why = pool.diagnose();
        assert_eq!(why.cause.name(), "leak", "{why}");
        assert!(why.found.as_str().ends_with(named), "{why}");
        assert_eq!(why.remedy.as_deref().unwrap().contains("call_stacks(100)"), every == 0, "{why}");
    }
}

#[test]
fn the_end_of_a_pool_lists_the_call_sites_of_live_buffers() {
    let pool = sampling(1).build().unwrap();
    let labels = pool.tagged("labels");
    listen();
    let out = (get_for_ever(&pool), get_tagged(&labels));
    drop((pool, labels));
    let lines: Vec<_> = lines_with_levels().into_iter().map(|(_, line)| line).collect();
    let listed = lines.iter().find(|line| line.contains(" buffers_still_out: ")).unwrap();
    let place = |bytes: &str| listed.lines().find(|line| line.contains(bytes)).unwrap();
    assert!(place("8.0KiB tag=labels").ends_with("get_tagged"), "{listed}");
    assert!(place("4.0KiB tag=(untagged)").ends_with("get_for_ever"), "{listed}");
    assert!(!listed.contains("without a tag"), "{listed}");
    drop(out);
}

#[test]
#[inline(never)] // Without debug information an inlined function has no frame.
fn a_recording_has_each_stack_once_and_each_sampled_request() {
    let (_dir, path) = scratch("t.trace");
    let pool = sampling(1).trace(path.clone()).build().unwrap();
    (0..100).for_each(|_| drop(get_for_ever(&pool)));
    drop(pool);
    let sampled = sampled(&path);
    assert_eq!(sampled.len(), 100);
    assert!(sampled.iter().all(|(_, name)| name.ends_with("::get_for_ever")), "{sampled:?}");
    let (stacks, outer) = (read_recording(&path).unwrap().stacks, "a_recording_has_each_stack_once");
    assert_eq!(stacks.len(), 1);
    assert!(stacks.values().all(|frames| frames.iter().any(|frame| frame.name.contains(outer))), "{stacks:?}");
}

#[test]
fn a_pool_that_does_not_sample_records_no_stack_and_keeps_the_fast_path() {
    let (_dir, path) = scratch("t.trace");
    let pool = sampling(0).trace(path.clone()).build().unwrap();
    drop((pool.tagged("labels").get(4096).unwrap(), pool));
    assert_eq!((sampled(&path), read_recording(&path).unwrap().stacks.len()), (Vec::new(), 0));

    let has_fast_path = |every| {
        let pool = sampling(every).build().unwrap();
        drop(pool.get(4096).unwrap());
        pinpool::unstable::fast_path::is_open(&pool)
    };
    assert_eq!((has_fast_path(0), has_fast_path(1000)), (true, false));
}

#[test]
fn samples_are_as_many_as_asked_for_and_rows_end_with_their_buffers() {
    let (_dir, path) = scratch("t.trace");
    let pool = sampling(10).trace(path.clone()).build().unwrap();
    (0..2_000).for_each(|_| drop(pool.get(4096).unwrap()));
    assert_eq!(valid_stats(&pool).memory.in_use, 0);
    assert!(pool.dump().holders().is_empty(), "{}", pool.dump());
    drop(pool);
    let count = sampled(&path).len();
    assert!((100..300).contains(&count), "{count}");
}
