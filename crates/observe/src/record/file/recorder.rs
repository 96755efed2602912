//! The records of one pool.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use super::Unrecorded;
use super::format::{Item, TimedSnapshot};
use super::writer::{PATIENCE, Writer};
use crate::diagnosis::Snapshot;
use crate::record::{Event, PoolDescription, Recorded, Recorder};
use pinpool_os::call_stack::CallStack;
use pinpool_os::fork::ForkGeneration;

/// Least time between two snapshots.
const SNAPSHOT_US: u64 = 100_000;
/// Later snapshots are further apart: the elapsed time divided by this number.
const SNAPSHOT_PARTS: u64 = 200;

/// One pool in a file.
#[derive(Debug)]
struct RecordedPool {
    writer: Arc<Writer>,
    pool: u32,
    is_ended: AtomicBool,
    /// Time of the next snapshot, by the clock of the pool.
    next_us: AtomicU64,
    generation: ForkGeneration,
}

/// Records a pool to `path`, in which `%p` is the process id. Also returns the new path of an earlier recording.
pub fn open(path: &Path, facts: Vec<(String, String)>) -> Result<(Arc<dyn Recorder>, Option<PathBuf>), Unrecorded> {
    let process = std::process::id().to_string();
    let path = path.to_str().map_or_else(|| path.to_owned(), |text| text.replace("%p", &process).into());
    let (writer, number, earlier) = Writer::of(&path)?;
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let begun = since_1970.as_secs_f64() - writer.begun.elapsed().as_secs_f64();
    let own =
        [("process", process), ("version", env!("CARGO_PKG_VERSION").to_owned()), ("time", format!("{begun:.6}"))];
    let facts = facts.into_iter().chain(own.map(|(name, value)| (name.to_owned(), value))).collect();
    writer.add(Item::Pool(PoolDescription { number, facts }), PATIENCE);
    let (is_ended, next_us, generation) = (AtomicBool::new(false), AtomicU64::new(0), ForkGeneration::now());
    Ok((Arc::new(RecordedPool { writer, pool: number, is_ended, next_us, generation }), earlier))
}

impl Recorder for RecordedPool {
    fn name_tag(&self, name: &str) -> u32 {
        self.writer.names.lock().tag(name)
    }

    fn number_stack(&self, stack: &Arc<CallStack>) -> Option<u32> {
        self.writer.names.lock().stack(stack)
    }

    fn record(&self, event: Event) {
        self.writer.push(self.pool, event);
    }

    fn wants_snapshot(&self, now_us: u64) -> bool {
        // Relaxed: at worst two threads add one each.
        let is_due = now_us >= self.next_us.load(Ordering::Relaxed);
        if is_due {
            self.next_us.store(now_us + SNAPSHOT_US.max(now_us / SNAPSHOT_PARTS), Ordering::Relaxed);
        }
        is_due
    }

    fn snapshot(&self, at_us: u64, snapshot: Snapshot) {
        let (time_ns, pool, snapshot) = (self.writer.now_ns(), self.pool, Box::new(snapshot));
        self.writer.add(Item::Snapshot(TimedSnapshot { time_ns, pool, at_us, snapshot }), Duration::ZERO);
    }

    fn path(&self) -> &Path {
        &self.writer.path
    }

    fn end(&self) -> Option<Recorded> {
        // Relaxed: one caller ends it.
        (!self.is_ended.swap(true, Ordering::Relaxed)).then(|| self.writer.end(self.pool))
    }
}

/// If the pool could not be built.
impl Drop for RecordedPool {
    fn drop(&mut self) {
        if !self.generation.is_stale() {
            self.end();
        }
    }
}
