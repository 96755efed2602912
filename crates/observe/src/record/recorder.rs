//! The records of one pool.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::event::{Event, PoolDescription, Record};
use super::format::{Item, TimedSnapshot};
use super::writer::Writer;
use super::{Recorded, Unrecorded};
use crate::diagnosis::Snapshot;
use pinpool_os::call_stack::CallStack;
use pinpool_os::fork::ForkGeneration;

/// Least time between two snapshots.
const SNAPSHOT_US: u64 = 100_000;
/// Later snapshots are further apart: the elapsed time divided by this number.
const SNAPSHOT_PARTS: u64 = 200;

/// Records what one pool does.
#[derive(Debug)]
pub struct Recorder {
    writer: Arc<Writer>,
    /// Time 0 of the recording.
    begun: Instant,
    pool: u32,
    is_ended: AtomicBool,
    /// Time of the next snapshot, by the clock of the pool.
    next_us: AtomicU64,
    generation: ForkGeneration,
}

impl Recorder {
    /// Records a pool to `path`, in which `%p` is the process id. Also returns the new path of an earlier recording.
    pub fn open(path: &Path, description: PoolDescription) -> Result<(Arc<Self>, Option<PathBuf>), Unrecorded> {
        let path = match path.to_str() {
            Some(text) if text.contains("%p") => PathBuf::from(text.replace("%p", &std::process::id().to_string())),
            _ => path.to_owned(),
        };
        let (writer, pool, earlier) = Writer::of(&path)?;
        let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let begun = since_1970.as_secs_f64() - writer.begun.elapsed().as_secs_f64();
        let mut facts = description.facts;
        facts.push(("process".to_owned(), std::process::id().to_string()));
        facts.push(("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()));
        facts.push(("time".to_owned(), format!("{begun:.6}")));
        writer.describe(PoolDescription { number: pool, facts });
        let (is_ended, generation) = (AtomicBool::new(false), ForkGeneration::now());
        let begun = writer.begun;
        Ok((Arc::new(Self { writer, begun, pool, is_ended, next_us: AtomicU64::new(0), generation }), earlier))
    }

    /// Assigns a number to a tag.
    pub fn name_tag(&self, name: &str) -> u32 {
        self.writer.name_tag(name)
    }

    /// Assigns a number to a call stack; `None` if the file has too many.
    pub fn number_stack(&self, stack: &Arc<CallStack>) -> Option<u32> {
        self.writer.number_stack(stack)
    }

    /// Adds a record; never waits.
    #[inline]
    pub fn record(&self, event: Event) {
        self.writer.push(Record { time_ns: self.now_ns(), thread: 0, pool: self.pool, event });
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns true if a snapshot is due: every 100 ms at first, later every 200th of the elapsed time.
    pub fn wants_snapshot(&self, now_us: u64) -> bool {
        // Relaxed: at worst two threads add one each.
        let is_due = now_us >= self.next_us.load(Ordering::Relaxed);
        if is_due {
            self.next_us.store(now_us + SNAPSHOT_US.max(now_us / SNAPSHOT_PARTS), Ordering::Relaxed);
        }
        is_due
    }

    /// Adds the state of the pool at that time of its clock; never waits.
    pub fn snapshot(&self, at_us: u64, snapshot: Snapshot) {
        let (time_ns, pool, snapshot) = (self.now_ns(), self.pool, Box::new(snapshot));
        self.writer.add(Item::Snapshot(TimedSnapshot { time_ns, pool, at_us, snapshot }), Duration::ZERO);
    }

    pub fn path(&self) -> &Path {
        &self.writer.path
    }

    /// Ends the pool and waits until its records are in the file; `None` if it had ended before.
    pub fn end(&self) -> Option<Recorded> {
        // Relaxed: one caller ends it.
        (!self.is_ended.swap(true, Ordering::Relaxed)).then(|| self.writer.end(self.pool))
    }
}

/// If the pool could not be built.
impl Drop for Recorder {
    fn drop(&mut self) {
        if !self.generation.is_stale() {
            self.end();
        }
    }
}
