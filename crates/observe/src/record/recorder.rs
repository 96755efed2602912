//! One pool's part in a recording.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::event::{Event, PoolDescription};
use super::queues::{self, Pushed, Stamped};
use super::ticks::Ticks;
use super::writer::Writer;
use super::{Recorded, Unrecorded};
use pinpool_os::call_stack::CallStack;
use pinpool_os::fork::ForkGeneration;

/// Records what one pool does.
#[derive(Debug)]
pub struct Recorder {
    writer: Arc<Writer>,
    /// A copy of the writer's ticks, kept apart from what changes in the writer.
    ticks: Ticks,
    file: u64,
    pool: u32,
    is_ended: AtomicBool,
    generation: ForkGeneration,
}

impl Recorder {
    /// Records a pool to `path`, in which `%p` stands for the number of the process. Also returns where the recording is that was there
    /// before.
    pub fn open(path: &Path, description: PoolDescription) -> Result<(Arc<Self>, Option<PathBuf>), Unrecorded> {
        let path = match path.to_str() {
            Some(text) if text.contains("%p") => PathBuf::from(text.replace("%p", &std::process::id().to_string())),
            _ => path.to_owned(),
        };
        let (writer, pool, earlier) = Writer::of(&path)?;
        Ok((Self::begin(writer, pool, description), earlier))
    }

    fn begin(writer: Arc<Writer>, pool: u32, description: PoolDescription) -> Arc<Self> {
        let since_1970 = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let begun = since_1970.as_secs_f64() - writer.ticks.now_ns() as f64 / 1e9;
        let mut facts = description.facts;
        facts.push(("process".to_owned(), std::process::id().to_string()));
        facts.push(("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()));
        facts.push(("time".to_owned(), format!("{begun:.6}")));
        writer.describe(PoolDescription { number: pool, facts });
        let (is_ended, generation) = (AtomicBool::new(false), ForkGeneration::now());
        let (ticks, file) = (writer.ticks, writer.queues.number());
        Arc::new(Self { writer, ticks, file, pool, is_ended, generation })
    }

    /// Records another pool to the same file.
    pub fn for_pool(&self, description: PoolDescription) -> Option<Arc<Self>> {
        let (writer, pool, _) = Writer::of(&self.writer.path).ok()?;
        Some(Self::begin(writer, pool, description))
    }

    /// The number of a tag from now on.
    pub fn name_tag(&self, name: &str) -> u32 {
        self.writer.name_tag(name)
    }

    /// The number of a call stack from now on; `None` if the file has too many.
    pub fn number_stack(&self, stack: &Arc<CallStack>) -> Option<u32> {
        self.writer.number_stack(stack)
    }

    /// Adds a record; never waits.
    #[inline]
    pub fn record(&self, event: Event) {
        let record = Stamped { ticks: self.ticks.now(), pool: self.pool, event };
        match queues::push(self.file, &record) {
            Pushed::Done => {}
            Pushed::Wake => self.writer.wake(),
            Pushed::NoQueue => self.writer.queues.push_first(record),
        }
    }

    pub fn path(&self) -> &Path {
        &self.writer.path
    }

    /// The pool has ended: waits until its records are in the file. `None` if it has ended before.
    pub fn end(&self) -> Option<Recorded> {
        // Relaxed: one caller ends it.
        (!self.is_ended.swap(true, Ordering::Relaxed)).then(|| self.writer.end(self.pool))
    }
}

/// Where a pool was not built in the end.
impl Drop for Recorder {
    fn drop(&mut self) {
        if !self.generation.is_stale() {
            self.end();
        }
    }
}
