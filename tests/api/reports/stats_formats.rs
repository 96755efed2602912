//! The statistics as a table for people and as data for machines.

use std::sync::Arc;
use std::time::Duration;

use pinpool::{OnFull, Pool, Stats};
use pinpool_replay::SimSource;

use crate::fixture::{MIB, held_sink, over};
use crate::valid_stats::valid_stats;

/// A pool that has something to show in each row, and its copies still in flight.
fn busy() -> (Pool, Stats) {
    let builder = over(Arc::new(SimSource::new(1 << 40)), 8 << 20).name("train").on_full(OnFull::Pageable);
    let pool = builder.wait(Duration::from_millis(1)).maintenance_thread(false).build().unwrap();
    let (stream, mut device, gate) = held_sink(MIB);
    drop(pool.get(MIB).unwrap().copy_to(&stream, &mut device).unwrap());
    let _held = pool.get(5 * MIB).unwrap();
    let _unpinned = pool.get(4 * MIB - 1).unwrap();
    let stats = valid_stats(&pool);
    drop(gate);
    stream.synchronize().unwrap();
    (pool, stats)
}

#[test]
fn the_table_shows_what_is_not_zero() {
    let (pool, stats) = busy();
    let text = stats.to_string();
    let line = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap_or_default();
    assert!(line("pool[train]: adaptive on sim, ").ends_with("pinned, 0.0% hits"), "{text}");
    assert!(line("requests: ").starts_with("requests: served=3 misses=3 miss_reasons.first_of_size=2 "), "{text}");
    assert!(line("requests: ").contains(" waits=1 timeouts=1 pageable=1 "), "{text}");
    assert!(line("memory: ").contains(" in_use=2 in_use_bytes=9.0MiB "), "{text}");
    assert!(line("copies: ").starts_with("copies: in_flight=1 in_flight_bytes=1.0MiB "), "{text}");
    assert_eq!(line("limits: "), "limits: max_bytes=8.0MiB pool_size_limit=100");
    assert!(line("requests.wait_time").split_whitespace().nth(1) == Some("1"), "{text}");
    assert!(!text.contains("remap") && !text.ends_with('\n'), "{text}");
    let row = pool.class_stats()[0].to_string();
    assert_eq!(row, "class    1.0MiB: buffers=1 in_use=0 in_flight=1 idle=0 quarantined=0 peak=1 misses=1 evictions=0");
    assert_eq!(Stats::default().to_string(), "pool: adaptive on , not pinned, 0.0% hits");
}

#[cfg(feature = "serde")]
#[test]
fn as_data_each_figure_has_its_name_and_each_duration_its_unit() {
    let (_pool, stats) = busy();
    let data = serde_json::to_value(&stats).unwrap();
    assert_eq!((&data["name"], &data["requests"]["served"]), (&"train".into(), &3.into()));
    assert!(data["copies"]["oldest_age_seconds"].is_f64(), "{data}");
    for statistic in stats.unstable_list() {
        let pointer = format!("/{}", statistic.path.replace('.', "/"));
        let pointer = pointer.replace("oldest_age", "oldest_age_seconds").replace("reserve_eta", "reserve_eta_seconds");
        assert!(data.pointer(&pointer).is_some() && !statistic.help.is_empty(), "{statistic:?}");
    }
    let wait = &data["requests"]["wait_time"];
    assert_eq!((&wait["count"], wait["buckets"].as_array().map(Vec::len)), (&1.into(), Some(1)));
    for name in ["total", "min", "avg", "max", "p50", "p99", "p999"] {
        assert!(wait[format!("{name}_seconds")].as_f64().is_some_and(|seconds| seconds > 0.0), "{wait}");
    }
    let text = data.to_string();
    assert!(!text.contains("nanos") && !text.contains("\"secs\""), "a duration without a unit: {text}");
    assert_eq!(serde_json::to_value(pinpool::stats::ClassStats::default()).unwrap()["class_bytes"], 0);
}
