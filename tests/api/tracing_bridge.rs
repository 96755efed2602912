//! The lines of the pool as `tracing` receives them through its bridge for the crate `log`.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use pinpool::{Backend, Pool};
use tracing::Level;

use crate::child::alone;

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
        let pool =
            Pool::builder().without_env().backend(Backend::Heap).name("loader").max_bytes(1 << 20).build().unwrap();
        drop(pool.get(4096).unwrap());
        drop(pool);
        let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
        for start in [
            " INFO pinpool::diag: [loader] preset adaptive, back-end heap",
            "DEBUG pinpool::diag: [loader] acquired: 4096 bytes asked in 1 call, held 0 -> ",
            " INFO pinpool::diag: [loader] ended: 1 gets (0 hits, 1 misses, ",
        ] {
            assert!(text.lines().any(|line| line.starts_with(start)), "{start:?} is missing in:\n{text}");
        }
    });
}
