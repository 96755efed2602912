//! Idle buffers and those in use, by class.

use std::thread;

use pinpool::{Backend, Pool, Preset};

#[test]
fn idle_buffers_have_a_column_in_the_rows_of_the_classes() {
    for preset in [Preset::Adaptive, Preset::TensorFlow] {
        let pool = Pool::builder().without_env().backend(Backend::Heap).preset(preset).build().unwrap();
        let small: Vec<_> = (0..3).map(|_| pool.get(5_000).unwrap()).collect();
        let large: Vec<_> = (0..2).map(|_| pool.get(1 << 20).unwrap()).collect();
        let rows = || {
            let rows = pool.class_stats();
            rows.iter().map(|row| (row.buffers, row.in_use, row.idle)).collect::<Vec<_>>()
        };
        assert_eq!(rows(), [(3, 3, 0), (2, 2, 0)], "{preset:?}");
        drop(small);
        // Another thread's puts come back to the thread that took the buffers.
        thread::spawn(|| drop(large)).join().unwrap();
        assert_eq!(rows(), [(3, 0, 3), (2, 0, 2)], "{preset:?}");
        let _held = pool.get(5_000).unwrap();
        assert_eq!(rows(), [(3, 1, 2), (2, 0, 2)], "{preset:?}");
        let idle: u64 = pool.class_stats().iter().map(|row| row.idle).sum();
        assert_eq!(idle, pool.stats().memory.idle);
    }
}
