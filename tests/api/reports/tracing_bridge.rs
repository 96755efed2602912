//! The lines of the pool as `tracing` receives them through its bridge for the crate `log`, and as filters select them.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use tracing::Level;

use crate::child::alone;
use crate::fixture::heap;

/// Text that a subscriber writes.
#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_subscriber_gets_the_lines_with_level_target_and_name_of_the_pool() {
    // A process has one logger.
    alone(|| {
        let written = Written::default();
        let writer = written.clone();
        let subscriber = tracing_subscriber::fmt().with_max_level(Level::DEBUG).with_ansi(false).without_time();
        subscriber.with_writer(move || writer.clone()).init();
        let pool = heap().name("loader").max_bytes(1 << 20).build().unwrap();
        drop(pool.get(4096).unwrap());
        drop(pool);
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        for start in [
            " INFO pinpool::pool: pool[loader] created: preset=adaptive backend=heap ",
            "DEBUG pinpool::growth: pool[loader] acquired: request=4096B held=0B->",
            " INFO pinpool::pool: pool[loader] pool_ended: requests=1 hits=0 misses=1 ",
        ] {
            assert!(text.lines().any(|line| line.starts_with(start)), "{start:?} is missing in:\n{text}");
        }
    });
}

#[test]
fn a_filter_selects_one_kind_of_event() {
    alone(|| {
        let written = Written::default();
        env_logger::Builder::new()
            .parse_filters("off,pinpool::out_of_memory=warn")
            .target(env_logger::Target::Pipe(Box::new(written.clone())))
            .init();
        let pool = heap().max_bytes(1 << 20).wait(std::time::Duration::ZERO).build().unwrap();
        pool.get(2 << 20).unwrap_err();
        drop(pool);
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        let records: Vec<_> = text.lines().filter(|line| line.starts_with('[')).collect();
        assert!(!records.is_empty() && records.iter().all(|line| line.contains(" pinpool::out_of_memory] ")), "{text}");
    });
}
