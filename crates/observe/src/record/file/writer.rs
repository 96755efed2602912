//! The thread that writes a recording, and the files that are open.
//!
//! Pools of one process that name the same file share it. A record goes into one bounded queue, which never waits: a record that
//! finds no room is counted as lost. The thread takes what the queue holds every 50 ms, or when it is woken because the queue fills up or
//! a pool ends, and writes it as blocks, each compressed separately for a name that ends in `.gz`. A process that dies leaves whole blocks
//! except the last. A process that exits waits up to 2 s until what was recorded before is in the file.

use std::cell::Cell;
use std::collections::HashMap;
use std::hash::Hash;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, SendTimeoutError, Sender, bounded};

use super::Unrecorded;
use super::format::{Item, head};
use super::open::open;
use super::output::Output;
use crate::record::{Event, Record, Recorded};
use pinpool_os::call_stack::CallStack;
use pinpool_os::exit::call_at_exit;
use pinpool_os::file_id::FileId;
use pinpool_os::fork::OfProcess;
use pinpool_os::sync::plain::{Mutex, MutexGuard};
use pinpool_os::threads;

/// Time between two writes.
const PERIOD: Duration = Duration::from_millis(50);
/// Longest wait for the writer.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Longest delay of an exit, and of a pool that is built while another thread opens a file.
const SHORT_PATIENCE: Duration = Duration::from_secs(2);
/// Records of the queue: 5 MiB.
const CAPACITY: usize = 1 << 16;
/// The writer is woken if the queue holds this many.
const WAKE_AT: usize = 4096;

/// Most tags of a file: half of what a reader accepts.
const TAGS_MAX: usize = 32_768;
/// Most call stacks of a file: a quarter of that.
const STACKS_MAX: usize = 16_384;
/// The tag of requests beyond [`TAGS_MAX`].
const OTHER_TAGS: &str = "(other tags)";

thread_local! {
    /// The number of the thread in recordings; 0: none yet.
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

/// Commands to the thread.
enum Command {
    Add(Item),
    /// Ends this pool, if any, and answers when all records so far are in the file.
    Flush(Option<u32>, Sender<Recorded>),
}

/// A file that is being written.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) path: PathBuf,
    /// Time 0 of the recording.
    pub(super) begun: Instant,
    queue: Sender<Command>,
    /// The thread, once it runs.
    thread: OnceLock<Thread>,
    pub(super) names: Arc<Mutex<Named>>,
    /// Records for which the queue had no room, since the last write.
    unqueued: AtomicU64,
    /// The state after the last write.
    recorded: Mutex<Recorded>,
}

/// Things that records refer to by number. Numbers stay valid while the process continues the file.
#[derive(Debug)]
struct Names<K> {
    numbers: HashMap<K, u32>,
    /// Not yet in the file.
    unwritten: Vec<(u32, K)>,
}

/// The tags and call stacks of a file.
#[derive(Debug, Default)]
pub(super) struct Named {
    tags: Names<Box<str>>,
    stacks: Names<Arc<CallStack>>,
}

impl<K> Default for Names<K> {
    fn default() -> Self {
        Self { numbers: HashMap::new(), unwritten: Vec::new() }
    }
}

impl<K: Clone + Eq + Hash> Names<K> {
    /// From 1 on; `None` of a new one if there are `most`.
    fn number(&mut self, key: K, most: usize) -> Option<u32> {
        if let Some(&number) = self.numbers.get(&key) {
            return Some(number);
        }
        let number = u32::try_from(self.numbers.len() + 1).ok().filter(|_| self.numbers.len() < most)?;
        self.numbers.insert(key.clone(), number);
        self.unwritten.push((number, key));
        Some(number)
    }

    /// Writes all names again, since a failed write may have lost some.
    fn forget_written(&mut self) {
        self.unwritten = self.numbers.iter().map(|(key, &number)| (number, key.clone())).collect();
    }
}

impl Named {
    /// The number of a tag; tags beyond [`TAGS_MAX`] share one.
    pub(super) fn tag(&mut self, name: &str) -> u32 {
        let number = self.tags.number(name.into(), TAGS_MAX - 1);
        number.or_else(|| self.tags.number(OTHER_TAGS.into(), TAGS_MAX)).unwrap_or(0)
    }

    /// The number of a call stack; `None` beyond [`STACKS_MAX`].
    pub(super) fn stack(&mut self, stack: &Arc<CallStack>) -> Option<u32> {
        self.stacks.number(stack.clone(), STACKS_MAX)
    }
}

/// A file that this process has opened and may continue.
struct TraceFile {
    path: PathBuf,
    begun: Instant,
    /// Pools in the file, and those that have not ended.
    pools: u32,
    open_pools: usize,
    names: Arc<Mutex<Named>>,
    /// `None` while the file is closed.
    writer: Option<Arc<Writer>>,
    /// The file and its length when it was last closed; `None` for a file without a length.
    left: Option<(FileId, u64)>,
}

static TRACE_FILES: OfProcess<Mutex<Vec<TraceFile>>> = OfProcess::new(Mutex::default);

/// Locks the list of files; `None` if another thread, which may wait for a disk, keeps it locked until `until`.
fn lock_until(opened: &Mutex<Vec<TraceFile>>, until: Instant) -> Option<MutexGuard<'_, Vec<TraceFile>>> {
    loop {
        match opened.try_lock() {
            None if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            locked => return locked,
        }
    }
}

impl TraceFile {
    fn new(path: &Path) -> Self {
        let (pools, open_pools, names, writer, left) = Default::default();
        Self { path: path.to_owned(), begun: Instant::now(), pools, open_pools, names, writer, left }
    }

    /// The writer of the file, which is opened if it is closed, and then the new path of an earlier recording.
    fn writer(&mut self) -> Result<(Arc<Writer>, Option<PathBuf>), Unrecorded> {
        if let Some(writer) = &self.writer {
            return Ok((writer.clone(), None));
        }
        let mut opened = open(&self.path, self.left)?;
        let earlier = opened.earlier.take();
        let is_continued = self.pools > 0 && opened.bytes != Some(0);
        if !is_continued {
            *self = Self::new(&self.path);
        }
        let (queue, received) = bounded(CAPACITY);
        let writer = Arc::new(Writer {
            path: self.path.clone(),
            begun: self.begun,
            queue,
            thread: OnceLock::new(),
            names: self.names.clone(),
            unqueued: Default::default(),
            recorded: Default::default(),
        });
        let is_compressed = self.path.extension().is_some_and(|extension| extension == "gz");
        let output = Output::new(opened, is_compressed, if is_continued { Vec::new() } else { head() });
        let run = Run { writer: writer.clone(), received, output };
        threads::spawn(c"pinpool-trace", move || run.run()).map_err(|error| {
            Unrecorded::Failed(format!(
                "has no thread that writes it: {error}; raise the limit on threads (`ulimit -u`)"
            ))
        })?;
        static REGISTERED: AtomicBool = AtomicBool::new(false);
        call_at_exit(&REGISTERED, flush_open);
        self.writer = Some(writer.clone());
        Ok((writer, earlier))
    }
}

impl Writer {
    /// The writer of `path`, the number of another pool in it, and the new path of an earlier recording if this pool opened the file.
    pub(super) fn of(path: &Path) -> Result<(Arc<Self>, u32, Option<PathBuf>), Unrecorded> {
        // Another thread holds it while a file is closed.
        let mut opened = lock_until(TRACE_FILES.get(), Instant::now() + SHORT_PATIENCE).ok_or(Unrecorded::Busy)?;
        let at = opened.iter().position(|file| file.path == path).unwrap_or_else(|| {
            opened.push(TraceFile::new(path));
            opened.len() - 1
        });
        let file = &mut opened[at];
        let (writer, earlier) = file.writer()?;
        file.open_pools += 1;
        file.pools += 1;
        Ok((writer, file.pools - 1, earlier))
    }

    /// Adds a record of the calling thread; never waits.
    #[inline]
    pub(super) fn push(&self, record: Record) {
        static THREADS: AtomicU32 = AtomicU32::new(1);
        if THREAD.get() == 0 {
            // Relaxed: only unique.
            THREAD.set(THREADS.fetch_add(1, Ordering::Relaxed));
        }
        let record = Record { thread: THREAD.get(), ..record };
        if self.queue.try_send(Command::Add(Item::Record(record))).is_err() {
            // Relaxed: a sum.
            self.unqueued.fetch_add(1, Ordering::Relaxed);
        } else if self.queue.len() >= WAKE_AT {
            self.wake();
        }
    }

    /// Lets the thread write now.
    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Adds an item, if the thread takes it within `patience`.
    pub(super) fn add(&self, item: Item, patience: Duration) {
        let _ = self.queue.send_timeout(Command::Add(item), patience);
    }

    /// Time since the recording began.
    pub(super) fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Ends `pool`, if any. The receiver gets the answer when all records so far are in the file.
    fn flush(&self, pool: Option<u32>, patience: Duration) -> Result<Receiver<Recorded>, SendTimeoutError<Command>> {
        let (answer, answered) = bounded(1);
        let sent = self.queue.send_timeout(Command::Flush(pool, answer), patience);
        self.wake();
        sent.map(|()| answered)
    }

    /// Waits until the records of the pool, which has ended, are in the file.
    pub(super) fn end(&self, pool: u32) -> Recorded {
        let sent = self.flush(Some(pool), PATIENCE).map_err(|error| error.is_timeout());
        let answer = sent.and_then(|answered| answered.recv_timeout(PATIENCE).map_err(|error| error.is_timeout()));
        answer.unwrap_or_else(|is_timeout| {
            let failure = match is_timeout {
                true => format!("the disk has not taken the last records within {PATIENCE:?}"),
                false => "the thread that writes it has ended".to_owned(),
            };
            // Including records that are neither written nor counted as lost.
            let pending = self.queue.len() as u64 + self.unqueued.load(Ordering::Relaxed);
            let Recorded { records, lost, .. } = *self.recorded.lock();
            Recorded { records, lost: lost + pending, failure: Some(failure) }
        })
    }
}

/// Flushes the open files when the process exits. A process that ends without its exit handlers loses what was recorded since the last
/// write.
extern "C" fn flush_open() {
    let until = Instant::now() + SHORT_PATIENCE;
    let opened = TRACE_FILES.get_if_made().and_then(|opened| lock_until(opened, until));
    let writers: Vec<_> =
        opened.iter().flat_map(|opened| opened.iter()).filter_map(|file| file.writer.clone()).collect();
    // A writer takes the lock to close its file.
    drop(opened);
    let left = || until.saturating_duration_since(Instant::now());
    let asked: Vec<_> = writers.iter().filter_map(|writer| writer.flush(None, left()).ok()).collect();
    for answered in asked {
        let _ = answered.recv_timeout(left());
    }
}

/// The thread's own state.
struct Run {
    writer: Arc<Writer>,
    received: Receiver<Command>,
    output: Output,
}

impl Run {
    fn run(mut self) {
        let _ = self.writer.thread.set(thread::current());
        loop {
            let flushes = self.write();
            let ended = flushes.iter().filter(|(pool, _)| pool.is_some()).count();
            let is_last = ended > 0 && self.end(ended);
            for (_, answer) in &flushes {
                let _ = answer.send(self.output.recorded.clone());
            }
            if is_last {
                return;
            }
            thread::park_timeout(PERIOD);
        }
    }

    /// Some pools have ended. If they were the last, closes the file under the lock, so that no new pool opens it before.
    fn end(&mut self, pools: usize) -> bool {
        let mut opened = TRACE_FILES.get().lock();
        let Some(file) = opened.iter_mut().find(|file| file.path == self.writer.path) else { return true };
        file.open_pools -= pools;
        if file.open_pools > 0 {
            return false;
        }
        if self.output.recorded.failure.is_some() {
            let mut names = file.names.lock();
            names.tags.forget_written();
            names.stacks.forget_written();
        }
        file.left = self.output.end();
        file.writer = None;
        true
    }

    /// Writes what the queue holds, and returns what must be answered then.
    fn write(&mut self) -> Vec<(Option<u32>, Sender<Recorded>)> {
        let Self { writer, received, output } = self;
        // Read before the records, so that later losses are reported later. At most one queue of records is taken, so that busy threads do
        // not keep this thread in the loop.
        let lost = writer.unqueued.swap(0, Ordering::Relaxed);
        let mut flushes = Vec::new();
        for command in received.try_iter().take(CAPACITY) {
            match command {
                Command::Add(item) => output.add(&item),
                Command::Flush(pool, answer) => flushes.push((pool, answer)),
            }
        }
        // Taken after the records, so that the tags of all records are included. Resolved without the lock, because this reads files.
        let (tags, stacks) = {
            let mut named = writer.names.lock();
            (std::mem::take(&mut named.tags.unwritten), std::mem::take(&mut named.stacks.unwritten))
        };
        for (number, name) in tags {
            output.add(&Item::Tag(number, name.into()));
        }
        for (number, stack) in stacks {
            output.add(&Item::Stack(number, stack.frames()));
        }
        let missing = (lost > 0).then_some((0, Event::Missing { records: lost }));
        let ends = flushes.iter().filter_map(|(pool, _)| Some(((*pool)?, Event::End)));
        for (pool, event) in missing.into_iter().chain(ends) {
            output.add(&Item::Record(Record { time_ns: writer.now_ns(), thread: 0, pool, event }));
        }
        output.write();
        output.recorded.lost += lost;
        writer.recorded.lock().clone_from(&output.recorded);
        flushes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_keeps_its_number_and_excess_tags_share_one() {
        let mut names = Named::default();
        let numbers: Vec<_> = (0..TAGS_MAX + 1000).map(|n| names.tag(&format!("tag {n}"))).collect();
        assert_eq!((names.tags.numbers.len(), names.tags.unwritten.len()), (TAGS_MAX, TAGS_MAX));
        assert_eq!((names.tag("tag 7"), numbers[7]), (8, 8));
        let other = names.tag(OTHER_TAGS);
        assert!(numbers[TAGS_MAX - 1..].iter().all(|&number| number == other));
        names.tags.unwritten.clear();
        names.tags.forget_written();
        assert_eq!(names.tags.unwritten.len(), TAGS_MAX);
    }
}
