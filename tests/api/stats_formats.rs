//! The figures as a table for people and as data for machines.

use std::sync::Arc;
use std::time::Duration;

use pinpool::copy::sink::{SinkMem, SinkStream};
use pinpool::{OnFull, Pool, Stats};
use pinpool_replay::SimSource;

use crate::fixture::{over, valid_stats};

const MIB: usize = 1 << 20;

/// A pool that has something to show in each row, and its copies still in flight.
fn busy() -> (Pool, Stats) {
    let builder = over(Arc::new(SimSource::new(1 << 40)), 8 << 20).name("train").on_full(OnFull::Pageable);
    let pool = builder.wait(Duration::from_millis(1)).background_poll(false).build().unwrap();
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMem::new(MIB));
    let gate = stream.hold();
    drop(pool.get(MIB).unwrap().copy_to(&stream, &mut device).unwrap());
    let _held = pool.get(5 * MIB).unwrap();
    let _unpinned = pool.get(4 * MIB - 1).unwrap();
    let stats = valid_stats(&pool);
    drop(gate);
    stream.synchronize().unwrap();
    (pool, stats)
}

#[test]
fn the_table_has_a_line_for_each_thing_that_there_is_and_none_for_others() {
    let (pool, stats) = busy();
    let text = stats.to_string();
    let line = |start: &str| {
        let found = text.lines().find(|line| line.trim_start().starts_with(start));
        found.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).unwrap_or_default()
    };
    assert_eq!(
        line("pool train"),
        "pool train: adaptive on sim, pinned; ceiling 8.0 MiB; at most 100 idle buffers"
            .replace("pinned", if stats.is_pinned { "pinned" } else { "not pinned" })
    );
    assert_eq!(line("gets"), "gets 3: 0 hits (0.00 %), 3 misses, 0 failed; 0 puts");
    assert_eq!(line("misses:"), "misses: first of size 2, at ceiling 1");
    assert_eq!(line("waits"), "waits 1: 0 now, 1 ran out; 1 fallbacks");
    assert_eq!(line("rounding"), "rounding adds 0.0 % (over 3 gets)");
    assert_eq!(line("in use"), "in use 2 9.0 MiB 2 9.0 MiB");
    assert_eq!(line("in flight"), "in flight 1 1.0 MiB 1 1.0 MiB");
    assert_eq!(line("not pinned"), "not pinned 1 4.0 MiB 1 4.0 MiB");
    assert!(line("pin ").starts_with("pin 2 ") || line("pin ").starts_with("pin 1 "), "{text}");
    assert!(line("wait ").starts_with("wait 1 "), "{text}");
    assert!(line("oldest in flight").contains("on stream"), "{text}");
    for absent in ["left:", "unpin", "remap", "lost", "in partitions", "to be released"] {
        assert_eq!(line(absent), "", "{text}");
    }
    assert!(!text.ends_with('\n') && text.lines().all(|line| line.len() <= 100 && line.trim_end() == line), "{text}");
    assert!(text.lines().count() < 24, "{text}");
    let row = pool.class_stats()[0].to_string();
    assert_eq!(row, "class   1.0 MiB: 1 buffers (0 in use, 1 in flight, 0 idle), at most 1; 1 misses, 0 left");
}

#[test]
fn a_pool_without_a_get_has_a_short_table() {
    let pool = over(Arc::new(SimSource::new(1 << 40)), 8 << 20).build().unwrap();
    let text = valid_stats(&pool).to_string();
    assert!(text.starts_with("pool: adaptive on sim"), "{text}");
    assert_eq!(text.lines().count(), 8, "{text}");
}

#[cfg(feature = "serde")]
#[test]
fn as_data_each_figure_has_its_name_and_each_duration_its_unit() {
    let (_pool, stats) = busy();
    let data = serde_json::to_value(&stats).unwrap();
    assert_eq!((&data["name"], &data["backend"], &data["gets"]), (&"train".into(), &"sim".into(), &3.into()));
    assert_eq!(data["miss_reasons"]["at_ceiling"], 1);
    assert_eq!(data["peaks"]["in_flight_bytes"], MIB);
    assert_eq!(data["requested"]["gets"], 3);
    assert_eq!(data["window"]["allocated"], stats.window.allocated);
    assert!(data["oldest_in_flight_seconds"].is_f64() && data["underlying"]["time_seconds"].is_f64(), "{data}");
    let wait = &data["wait_time"];
    assert_eq!((&wait["count"], wait["buckets"].as_array().map(Vec::len)), (&1.into(), Some(1)));
    for name in ["total", "min", "avg", "max", "p50", "p99", "p999"] {
        assert!(wait[format!("{name}_seconds")].as_f64().is_some_and(|seconds| seconds > 0.0), "{wait}");
    }
    let text = data.to_string();
    assert!(!text.contains("nanos") && !text.contains("\"secs\""), "a duration without a unit: {text}");
    assert_eq!(serde_json::to_value(pinpool::ClassStats::default()).unwrap()["class_bytes"], 0);
}
