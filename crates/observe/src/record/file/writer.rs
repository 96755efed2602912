//! The pools that record, the thread that writes a recording, and the files that are open.
//!
//! Pools of one process that name the same file share it. A record goes into one bounded queue, which never waits: a record that
//! finds no room is counted as lost. The thread takes what the queue holds every 50 ms, or when it is woken because the queue fills up or
//! a pool ends, and writes it as blocks, each compressed separately for a name that ends in `.gz`. A process that dies leaves whole blocks
//! except the last. A process that exits waits up to 2 s until what was recorded before is in the file.

use std::cell::Cell;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::mem::take;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{Receiver, SendTimeoutError, Sender, bounded};
use flate2::Compression;
use flate2::write::GzEncoder;

use super::Unrecorded;
use super::format::{BLOCK_BYTES, Item, TimedSnapshot, add_item, block, head};
use super::names::Names;
use super::open::{Opened, flock, open_locked};
use crate::diagnosis::Snapshot;
use crate::record::{Event, PoolDescription, Record, Recorded, Recorder};
use pinpool_os::call_stack::CallStack;
use pinpool_os::exit::call_at_exit;
use pinpool_os::file_id::FileId;
use pinpool_os::fork::{ForkGeneration, OfProcess};
use pinpool_os::sync::plain::{Mutex, MutexGuard};
use pinpool_os::threads;

/// Time between two writes.
const PERIOD: Duration = Duration::from_millis(50);
/// Longest wait for the writer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest delay of an exit, and of a pool that is built while another thread opens a file.
const SHORT_PATIENCE: Duration = Duration::from_secs(2);
/// Records of the queue: 5 MiB.
const CAPACITY: usize = 1 << 16;
/// The writer is woken if the queue holds this many.
const WAKE_AT: usize = 4096;
/// Least time between two snapshots.
const SNAPSHOT_US: u64 = 100_000;
/// Later snapshots are further apart: the elapsed time divided by this number.
const SNAPSHOT_PARTS: u64 = 200;

thread_local! {
    /// The number of the thread in recordings; 0: none yet.
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

/// Commands to the thread.
enum Command {
    Add(Item),
    /// Ends this pool, if any, and answers when all records so far are in the file.
    Flush(Option<u32>, Sender<()>),
}

/// A file that is being written.
#[derive(Debug)]
struct Writer {
    path: PathBuf,
    /// Time 0 of the recording.
    begun: Instant,
    queue: Sender<Command>,
    /// The thread, once it runs.
    thread: OnceLock<Thread>,
    names: Arc<Mutex<Names>>,
    /// Records for which the queue had no room, since the last write.
    unqueued: AtomicU64,
    /// The state after the last write.
    recorded: Mutex<Recorded>,
}

/// A file that this process has opened and may continue.
#[derive(Default)]
struct TraceFile {
    begun: Option<Instant>,
    /// Pools in the file, and those that have not ended.
    pools: u32,
    open_pools: usize,
    names: Arc<Mutex<Names>>,
    /// `None` while the file is closed.
    writer: Option<Arc<Writer>>,
    /// The file and its length when it was last closed; `None` for a file without a length.
    left: Option<(FileId, u64)>,
}

type TraceFiles = HashMap<PathBuf, TraceFile>;
static TRACE_FILES: OfProcess<Mutex<TraceFiles>> = OfProcess::new(Mutex::default);

/// Locks the list of files; `None` if another thread, which may wait for a disk, keeps it locked until `until`.
fn lock_until(files: &Mutex<TraceFiles>, until: Instant) -> Option<MutexGuard<'_, TraceFiles>> {
    loop {
        match files.try_lock() {
            None if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            locked => return locked,
        }
    }
}

impl TraceFile {
    /// Opens the file and starts its thread. Returns the new path of an earlier recording.
    fn open(&mut self, path: PathBuf) -> Result<(Arc<Writer>, Option<PathBuf>), Unrecorded> {
        let mut opened = open_locked(&path, self.left)?;
        let earlier = opened.earlier.take();
        let is_continued = self.pools > 0 && opened.bytes != Some(0);
        if !is_continued {
            *self = Self::default();
        }
        let (queue, received) = bounded(CAPACITY);
        let writer = Arc::new(Writer {
            path,
            begun: *self.begun.get_or_insert_with(Instant::now),
            queue,
            thread: OnceLock::new(),
            names: self.names.clone(),
            unqueued: Default::default(),
            recorded: Default::default(),
        });
        let run = Run {
            writer: writer.clone(),
            received,
            opened,
            head: if is_continued { Vec::new() } else { head() },
            items: Vec::new(),
            records: 0,
        };
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

/// Records a pool to `path`, in which `%p` is the process ID. Also returns the new path of an earlier recording.
pub fn open(path: &Path, facts: Vec<(String, String)>) -> Result<(Arc<dyn Recorder>, Option<PathBuf>), Unrecorded> {
    let process = std::process::id().to_string();
    let path = path.to_str().map_or_else(|| path.to_owned(), |text| text.replace("%p", &process).into());
    // Another thread holds it while a file is closed.
    let mut files = lock_until(TRACE_FILES.get(), Instant::now() + SHORT_PATIENCE).ok_or(Unrecorded::Busy)?;
    let file = files.entry(path.clone()).or_default();
    let (writer, earlier) = match &file.writer {
        Some(writer) => (writer.clone(), None),
        None => file.open(path)?,
    };
    let number = file.pools;
    file.open_pools += 1;
    file.pools += 1;
    drop(files);
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let begun = since_1970.as_secs_f64() - writer.begun.elapsed().as_secs_f64();
    let own =
        [("process", process), ("version", env!("CARGO_PKG_VERSION").to_owned()), ("time", format!("{begun:.6}"))];
    let facts = facts.into_iter().chain(own.map(|(name, value)| (name.to_owned(), value))).collect();
    let _ = writer.queue.send_timeout(Command::Add(Item::Pool(PoolDescription { number, facts })), PATIENCE);
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
        static THREADS: AtomicU32 = AtomicU32::new(1);
        let (time_ns, pool, queue) = (self.writer.now_ns(), self.pool, &self.writer.queue);
        if THREAD.get() == 0 {
            // Relaxed: only unique.
            THREAD.set(THREADS.fetch_add(1, Ordering::Relaxed));
        }
        let record = Record { time_ns, thread: THREAD.get(), pool, event };
        if queue.try_send(Command::Add(Item::Record(record))).is_err() {
            // Relaxed: a sum.
            self.writer.unqueued.fetch_add(1, Ordering::Relaxed);
        } else if queue.len() >= WAKE_AT {
            self.writer.wake();
        }
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
        let item = Item::Snapshot(TimedSnapshot { time_ns, pool, at_us, snapshot });
        let _ = self.writer.queue.try_send(Command::Add(item));
    }

    fn path(&self) -> &Path {
        &self.writer.path
    }

    fn end(&self) -> Option<Recorded> {
        // Relaxed: one caller ends it.
        if self.is_ended.swap(true, Ordering::Relaxed) {
            return None;
        }
        let Writer { queue, unqueued, recorded, .. } = &*self.writer;
        let sent = self.writer.flush(Some(self.pool), PATIENCE).map_err(|error| error.is_timeout());
        let answer = sent.and_then(|answered| answered.recv_timeout(PATIENCE).map_err(|error| error.is_timeout()));
        let mut recorded = recorded.lock().clone();
        if let Err(is_timeout) = answer {
            recorded.failure = Some(match is_timeout {
                true => format!("the disk has not taken the last records within {PATIENCE:?}"),
                false => "the thread that writes it has ended".to_owned(),
            });
            // Including records that are neither written nor counted as lost.
            recorded.lost += queue.len() as u64 + unqueued.load(Ordering::Relaxed);
        }
        Some(recorded)
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

impl Writer {
    /// Lets the thread write now.
    fn wake(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Time since the recording began.
    fn now_ns(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Ends `pool`, if any. The receiver gets the answer when all records so far are in the file.
    fn flush(&self, pool: Option<u32>, patience: Duration) -> Result<Receiver<()>, SendTimeoutError<Command>> {
        let (answer, answered) = bounded(1);
        let sent = self.queue.send_timeout(Command::Flush(pool, answer), patience);
        self.wake();
        sent.map(|()| answered)
    }
}

/// Flushes the open files when the process exits. A process that ends without its exit handlers loses what was recorded since the last
/// write.
extern "C" fn flush_open() {
    let until = Instant::now() + SHORT_PATIENCE;
    let files = TRACE_FILES.get_if_made().and_then(|files| lock_until(files, until));
    let writers: Vec<_> =
        files.iter().flat_map(|files| files.values()).filter_map(|file| file.writer.clone()).collect();
    // A writer takes the lock to close its file.
    drop(files);
    let left = || until.saturating_duration_since(Instant::now());
    let asked: Vec<_> = writers.iter().filter_map(|writer| writer.flush(None, left()).ok()).collect();
    for answered in asked {
        let _ = answered.recv_timeout(left());
    }
}

/// The thread's own state: the open file, and the block that is being filled.
struct Run {
    writer: Arc<Writer>,
    received: Receiver<Command>,
    opened: Opened,
    /// The head until it is written.
    head: Vec<u8>,
    items: Vec<u8>,
    /// Records of the block.
    records: u64,
}

impl Run {
    fn run(mut self) {
        let _ = self.writer.thread.set(thread::current());
        loop {
            let flushes = self.take_queue();
            let ended = flushes.iter().filter(|(pool, _)| pool.is_some()).count();
            let is_last = ended > 0 && self.end(ended);
            for (_, answer) in &flushes {
                let _ = answer.send(());
            }
            if is_last {
                return;
            }
            thread::park_timeout(PERIOD);
        }
    }

    /// Some pools have ended. If they were the last, closes the file under the lock, so that no new pool opens it before.
    fn end(&mut self, pools: usize) -> bool {
        let mut files = TRACE_FILES.get().lock();
        let Some(file) = files.get_mut(&self.writer.path) else { return true };
        file.open_pools -= pools;
        if file.open_pools > 0 {
            return false;
        }
        if self.has_failed() {
            file.names.lock().forget_written();
        }
        let Opened { file: output, bytes, .. } = &self.opened;
        // Explicit, because a child created without the `fork` handlers may hold a copy of the descriptor.
        let _ = flock(output, libc::LOCK_UN);
        file.left = output.metadata().ok().map(|metadata| FileId::from_metadata(&metadata)).zip(*bytes);
        file.writer = None;
        true
    }

    /// Writes what the queue holds, and returns what must be answered then.
    fn take_queue(&mut self) -> Vec<(Option<u32>, Sender<()>)> {
        // Read before the records, so that later losses are reported later. At most one queue of records is taken, so that busy threads do
        // not keep this thread in the loop.
        let lost = self.writer.unqueued.swap(0, Ordering::Relaxed);
        let mut flushes = Vec::new();
        for _ in 0..CAPACITY {
            match self.received.try_recv() {
                Ok(Command::Add(item)) => self.add(&item),
                Ok(Command::Flush(pool, answer)) => flushes.push((pool, answer)),
                Err(_) => break,
            }
        }
        // Taken after the records, so that the names of all records are included. Resolved without the lock, because this reads files.
        let unwritten = take(&mut self.writer.names.lock().unwritten);
        for (name, number) in unwritten {
            self.add(&name.item(number));
        }
        let missing = (lost > 0).then_some((0, Event::Missing { records: lost }));
        let ends = flushes.iter().filter_map(|(pool, _)| Some(((*pool)?, Event::End)));
        for (pool, event) in missing.into_iter().chain(ends) {
            self.add(&Item::Record(Record { time_ns: self.writer.now_ns(), thread: 0, pool, event }));
        }
        self.write_block();
        self.writer.recorded.lock().lost += lost;
        flushes
    }

    /// Adds an item to the block, which is written if it is long enough.
    fn add(&mut self, item: &Item) {
        self.records += u64::from(matches!(item, Item::Record(_)));
        add_item(&mut self.items, item);
        if self.items.len() >= BLOCK_BYTES {
            self.write_block();
        }
    }

    fn has_failed(&self) -> bool {
        self.writer.recorded.lock().failure.is_some()
    }

    /// Writes the block, unless an earlier one could not be written.
    fn write_block(&mut self) {
        let (items, records) = (take(&mut self.items), take(&mut self.records));
        let is_lost = self.has_failed();
        // Without the lock, because a disk may be slow.
        let failure = if items.is_empty() || is_lost { None } else { self.write(block(&items)).err() };
        let recorded = &mut *self.writer.recorded.lock();
        *(if is_lost || failure.is_some() { &mut recorded.lost } else { &mut recorded.records }) += records;
        recorded.failure = recorded.failure.take().or(failure.map(|error| error.to_string()));
    }

    fn write(&mut self, block: Vec<u8>) -> io::Result<()> {
        let mut bytes = [take(&mut self.head), block].concat();
        if self.writer.path.extension().is_some_and(|extension| extension == "gz") {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(&bytes)?;
            bytes = encoder.finish()?;
        }
        let Opened { file, bytes: end, .. } = &mut self.opened;
        let mut output: &File = file;
        let written = output.write_all(&bytes);
        if let Some(end) = end {
            match written {
                Ok(()) => *end += bytes.len() as u64,
                // Nothing after a partial block could be read.
                Err(_) => _ = file.set_len(*end),
            }
        }
        written
    }
}
