//! Memory pressure of the machine.

use std::fs;

use super::{MIB, after_seconds, over_virtual_memory, ten_idle_granules, with_manual_clock};
use crate::captured_log::{count, lines, listen};

fn write(file: &std::path::Path, some: f64, full: f64) {
    let line = |kind, share| format!("{kind} avg10={share:.2} avg60=0.00 avg300=0.00 total=0\n");
    fs::write(file, line("some", some) + &line("full", full)).unwrap();
}

#[test]
fn pressure_shortens_the_idle_timeout_and_severe_pressure_releases_all_idle_memory_until_it_ends() {
    listen();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pressure");
    let (pool, clock) = with_manual_clock(over_virtual_memory().unstable_pressure(file.clone()));
    ten_idle_granules(&pool);
    write(&file, 20.0, 0.0);
    after_seconds(&clock, &pool, 10);
    assert_eq!(after_seconds(&clock, &pool, 14).memory.held_bytes, 20 << 20, "a quarter of 60 s");
    assert_eq!(after_seconds(&clock, &pool, 1).memory.held_bytes, 16 << 20);
    ten_idle_granules(&pool);
    let used = pool.get(2 * MIB).unwrap();
    write(&file, 20.0, 20.0);
    let stats = after_seconds(&clock, &pool, 1);
    assert_eq!((stats.memory.held_bytes, stats.memory.idle), (2 << 20, 0), "at once, except for what is in use");
    drop(used);
    assert_eq!(after_seconds(&clock, &pool, 1).memory.held_bytes, 0, "while the pressure lasts");
    write(&file, 0.0, 0.0);
    after_seconds(&clock, &pool, 1);
    ten_idle_granules(&pool);
    assert_eq!(after_seconds(&clock, &pool, 69).memory.held_bytes, 20 << 20, "the idle timeout is back");
    after_seconds(&clock, &pool, 60);
    assert!(after_seconds(&clock, &pool, 1).memory.held_bytes < 20 << 20);
    let logged = lines();
    assert_eq!((count(&logged, "memory_pressure: idle"), count(&logged, "pressure_ended: ")), (2, 1), "{logged:?}");
}
