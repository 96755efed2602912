//! Memory pressure of the machine.

use super::{MIB, after_seconds, over_virtual_memory, ten_idle_granules, with_manual_clock};
use crate::captured_log::{count, lines, listen};
use crate::pressure_file::PressureFile;

#[test]
fn pressure_shortens_the_idle_timeout_or_releases_everything() {
    listen();
    let file = PressureFile::new();
    let (pool, clock) =
        with_manual_clock(over_virtual_memory().unstable_settings(|only| only.pressure = Some(file.path())));
    ten_idle_granules(&pool);
    file.write(20.0, 0.0);
    after_seconds(&clock, &pool, 10);
    assert_eq!(after_seconds(&clock, &pool, 14).memory.held_bytes, 20 << 20, "a quarter of 60 s");
    assert_eq!(after_seconds(&clock, &pool, 1).memory.held_bytes, 16 << 20);
    ten_idle_granules(&pool);
    let used = pool.get(2 * MIB).unwrap();
    file.write(20.0, 20.0);
    let stats = after_seconds(&clock, &pool, 1);
    assert_eq!((stats.memory.held_bytes, stats.memory.idle), (2 << 20, 0), "immediately, except for what is in use");
    drop(used);
    assert_eq!(after_seconds(&clock, &pool, 1).memory.held_bytes, 0, "while the pressure lasts");
    file.write(0.0, 0.0);
    after_seconds(&clock, &pool, 1);
    ten_idle_granules(&pool);
    assert_eq!(after_seconds(&clock, &pool, 69).memory.held_bytes, 20 << 20, "the idle timeout is back");
    after_seconds(&clock, &pool, 60);
    assert!(after_seconds(&clock, &pool, 1).memory.held_bytes < 20 << 20);
    let logged = lines();
    assert_eq!((count(&logged, "memory_pressure: idle"), count(&logged, "pressure_ended: ")), (2, 1), "{logged:?}");
}
