//! The pools that record, the thread that writes a recording, and the files that are open.
//!
//! Pools of one process that name the same file share it. A record goes into one bounded queue, and a record that finds no room
//! is counted as lost. The queue is locked only to add an item or to take all of them, so no request waits for the disk. The
//! thread empties the queue every 50 ms, and sooner if the queue fills up or a pool ends. It writes the items as blocks, and
//! compresses each block separately if the file's name ends in `.gz`. If the process dies, all blocks except the last are
//! whole. A process that exits waits up to 2 s until the records so far are in the file.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::mem::{replace, take};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use flate2::Compression;
use flate2::write::GzEncoder;

use super::Unrecorded;
use super::format::{BLOCK_BYTES, Item, TimedSnapshot, add_item, block, head};
use super::names::{Names, item};
use super::open::{Opened, flock, open_locked};
use crate::diagnosis::Snapshot;
use crate::record::{Event, Name, PoolDescription, Record, Recorded, Recorder};
use pinpool_os::clock::monotonic_ns;
use pinpool_os::exit::call_at_exit;
use pinpool_os::file_id::FileId;
use pinpool_os::fork::{ForkGeneration, PerProcess};
use pinpool_os::sync::unmodeled::Mutex;
use pinpool_os::threads;
use pinpool_os::unwind::catch_panic;

/// Maximum time between two writes.
const PERIOD: Duration = Duration::from_millis(50);
/// Longest time that the end of a pool waits for the writer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest time that the exit of the process waits for the writers.
const EXIT_PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of items in the queue, which take 3.5 MiB. While the disk is slow, the thread holds as many again.
const CAPACITY: usize = 1 << 16;
/// The writer is woken each time that the queue has grown by this many items.
const WAKE_AT: usize = 4096;
/// Minimum time between two snapshots of a pool.
const SNAPSHOT_US: u64 = 100_000;
/// Later snapshots are further apart: the time between them is the elapsed time divided by this number.
const SNAPSHOT_PARTS: u64 = 200;

thread_local! {
    /// Number of the thread in recordings. Relaxed: it only needs to be unique.
    static THREAD: u32 = THREADS.fetch_add(1, Ordering::Relaxed);
}
static THREADS: AtomicU32 = AtomicU32::new(1);

/// A request to the thread to write now and, with a pool's number, to end the pool. The answer is sent when all earlier records
/// are in the file. `None` only wakes the thread.
type Flush = Option<(Option<u32>, Sender<()>)>;

/// A file, open or not, and the records for it.
#[derive(Debug)]
struct Writer {
    path: PathBuf,
    /// Time 0 of the recording, by the system's monotonic clock.
    begun_ns: u64,
    /// Items since the last write, and the number of records that found no room.
    queue: Mutex<(Vec<Item>, u64)>,
    flushes: (Sender<Flush>, Receiver<Flush>),
    names: Mutex<Names>,
    /// Whether a pool of the file has been built. Nothing is written before.
    is_begun: AtomicBool,
    /// Number of records that the thread had taken from the queue or found lost, but not yet written, when it took its last
    /// item.
    taken: AtomicU64,
    /// The state after the last write.
    recorded: Mutex<Recorded>,
}

/// A file that this process has opened and may continue.
struct TraceFile {
    writer: Arc<Writer>,
    /// Number of pools in the file, and number of pools that have not ended. The file is open while there are some.
    pools: u32,
    open_pools: usize,
    /// The file and its length when it was last closed; `None` for a file without a length.
    left: Option<(FileId, u64)>,
}

/// The files of this process by path, open or closed. The map is locked for moments only. A file's lock is held while the file
/// is opened or closed, which may take long on a slow disk.
static TRACE_FILES: PerProcess<Mutex<HashMap<PathBuf, Arc<Mutex<TraceFile>>>>> = PerProcess::new(Mutex::default);

impl TraceFile {
    fn new(path: PathBuf) -> Self {
        let (begun_ns, flushes) = (monotonic_ns(), unbounded());
        let (queue, names, is_begun, taken, recorded) = Default::default();
        let writer = Arc::new(Writer { path, begun_ns, queue, flushes, names, is_begun, taken, recorded });
        Self { writer, pools: 0, open_pools: 0, left: None }
    }

    /// Opens the file and starts its thread.
    fn open(&mut self, own: Arc<Mutex<Self>>) -> Result<(), Unrecorded> {
        let opened = open_locked(&self.writer.path, self.left)?;
        let is_continued = self.pools > 0 && opened.bytes != Some(0);
        if !is_continued {
            *self = Self::new(self.writer.path.clone());
        }
        *self.writer.recorded.lock() = Recorded::default();
        let head = if is_continued { Vec::new() } else { head() };
        let run = Run { file: own, writer: self.writer.clone(), opened, head, items: Vec::new(), records: 0 };
        let failed = |error| format!("has no thread that writes it: {error}; raise the limit on threads (`ulimit -u`)");
        threads::spawn(c"pinpool-trace", move || run.run()).map_err(|error| Unrecorded::Failed(failed(error)))?;
        static REGISTERED: AtomicBool = AtomicBool::new(false);
        call_at_exit(&REGISTERED, flush_open);
        Ok(())
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

/// Records a pool to `path`, in which `%p` is the process ID.
pub fn open(path: &Path, facts: Vec<(String, String)>) -> Result<Arc<dyn Recorder>, Unrecorded> {
    let process = std::process::id().to_string();
    let path = path.to_str().map_or_else(|| path.to_owned(), |text| text.replace("%p", &process).into());
    let new = || Arc::new(Mutex::new(TraceFile::new(path.clone())));
    let of_path = TRACE_FILES.get().lock().entry(path.clone()).or_insert_with(new).clone();
    let mut file = of_path.lock();
    if file.open_pools == 0 {
        file.open(of_path.clone())?;
    }
    let (writer, number) = (file.writer.clone(), file.pools);
    file.open_pools += 1;
    file.pools += 1;
    drop(file);
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let begun = since_1970.as_secs_f64() - writer.now_ns() as f64 / 1e9;
    let own =
        [("process", process), ("version", env!("CARGO_PKG_VERSION").to_owned()), ("time", format!("{begun:.6}"))];
    let facts = facts.into_iter().chain(own.map(|(name, value)| (name.to_owned(), value))).collect();
    writer.queue.lock().0.push(Item::Pool(PoolDescription { number, facts }));
    let (is_ended, next_us, generation) = (AtomicBool::new(false), AtomicU64::new(0), ForkGeneration::now());
    Ok(Arc::new(RecordedPool { writer, pool: number, is_ended, next_us, generation }))
}

impl Recorder for RecordedPool {
    fn number(&self, name: Name) -> u32 {
        self.writer.names.lock().number(name)
    }

    fn begin(&self) {
        // Relaxed: the thread sees the store soon after. It sees it before it ends a pool, because of the order of the channel.
        self.writer.is_begun.store(true, Ordering::Relaxed);
    }

    fn record(&self, event: Event) {
        let (time_ns, thread, pool) = (self.writer.now_ns(), THREAD.with(|number| *number), self.pool);
        self.writer.add(Item::Record(Record { time_ns, thread, pool, event }));
    }

    fn wants_snapshot(&self, now_us: u64) -> bool {
        let after = |next_us| (now_us >= next_us).then(|| now_us + SNAPSHOT_US.max(now_us / SNAPSHOT_PARTS));
        // Relaxed: the update succeeds for only one of several threads.
        self.next_us.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after).is_ok()
    }

    fn snapshot(&self, at_us: u64, snapshot: Snapshot) {
        let (time_ns, pool, snapshot) = (self.writer.now_ns(), self.pool, Box::new(snapshot));
        self.writer.add(Item::Snapshot(TimedSnapshot { time_ns, pool, at_us, snapshot }));
    }

    fn path(&self) -> &Path {
        &self.writer.path
    }

    fn recorded(&self) -> Recorded {
        self.writer.recorded.lock().clone()
    }

    fn end(&self) -> Option<Recorded> {
        // Relaxed: the swap lets only one caller end the pool.
        if self.is_ended.swap(true, Ordering::Relaxed) {
            return None;
        }
        let answer = self.writer.flush(Some(self.pool)).recv_timeout(PATIENCE);
        let mut recorded = self.recorded();
        if answer.is_err() {
            recorded.failure = Some(format!("the last records were not written within {PATIENCE:?}"));
            // Include records that are neither written nor counted as lost.
            let (items, lost) = &*self.writer.queue.lock();
            recorded.lost += items.len() as u64 + lost + self.writer.taken.load(Ordering::Relaxed);
        }
        Some(recorded)
    }
}

/// Ends the pool in the recording if it could not be built.
impl Drop for RecordedPool {
    fn drop(&mut self) {
        if !self.generation.is_stale() {
            self.end();
        }
    }
}

impl Writer {
    /// Returns the time since the recording began.
    fn now_ns(&self) -> u64 {
        monotonic_ns().saturating_sub(self.begun_ns)
    }

    /// Queues an item, unless the queue is full; then a record is counted as lost.
    fn add(&self, item: Item) {
        let queued = {
            let (items, lost) = &mut *self.queue.lock();
            match items.len() {
                ..CAPACITY => items.push(item),
                _ => *lost += u64::from(matches!(item, Item::Record(_))),
            }
            items.len()
        };
        if queued.is_multiple_of(WAKE_AT) && self.flushes.0.is_empty() {
            let _ = self.flushes.0.send(None);
        }
    }

    /// Asks the thread to write, and to end `pool`, if any. The receiver gets the answer when all records so far are in the
    /// file.
    fn flush(&self, pool: Option<u32>) -> Receiver<()> {
        let (answer, answered) = bounded(1);
        let _ = self.flushes.0.send(Some((pool, answer)));
        answered
    }
}

/// Flushes the open files when the process exits. A process that ends without its exit handlers loses what was recorded since the
/// last write.
extern "C" fn flush_open() {
    let until = Instant::now() + EXIT_PATIENCE;
    let Some(files) = TRACE_FILES.get_if_made() else { return };
    let files: Vec<_> = files.lock().values().cloned().collect();
    let ask = |file: &Arc<Mutex<TraceFile>>| loop {
        match file.try_lock() {
            // Another thread opens or closes the file, and may wait for a disk.
            None if Instant::now() < until => thread::sleep(Duration::from_millis(1)),
            file => break file.filter(|file| file.open_pools > 0).map(|file| file.writer.flush(None)),
        }
    };
    let asked: Vec<_> = files.iter().filter_map(ask).collect();
    for answered in asked {
        let _ = answered.recv_timeout(until.saturating_duration_since(Instant::now()));
    }
}

/// The thread's own state: the open file, and the block that is being filled.
struct Run {
    file: Arc<Mutex<TraceFile>>,
    writer: Arc<Writer>,
    opened: Opened,
    /// The head until it is written.
    head: Vec<u8>,
    items: Vec<u8>,
    /// Records of the block.
    records: u64,
}

impl Run {
    fn run(mut self) {
        let mut is_last = false;
        while !is_last {
            let flush = self.writer.flushes.1.recv_timeout(PERIOD).unwrap_or_default();
            let ended = flush.as_ref().and_then(|(pool, _)| *pool);
            // After a panic the thread continues, because pools wait for it. It then empties the queue and writes nothing.
            if self.writer.is_begun.load(Ordering::Relaxed) && catch_panic(|| self.write_queue(ended)).is_none() {
                self.writer.recorded.lock().failure = Some("its thread has panicked".to_owned());
            }
            is_last = ended.is_some() && self.end();
            let _ = flush.map(|(_, answer)| answer.send(()));
        }
    }

    /// Records that a pool has ended. If it was the last, closes the file under the lock, so that no new pool opens it before.
    /// Returns whether it was the last.
    fn end(&mut self) -> bool {
        let mut file = self.file.lock();
        file.open_pools -= 1;
        if file.open_pools > 0 {
            return false;
        }
        // The thread ends, so an exit that has asked it to write must not wait for an answer.
        self.writer.flushes.1.try_iter().for_each(drop);
        if self.has_failed() {
            self.writer.names.lock().forget_written();
        }
        // Unlocked explicitly, because a child created without the `fork` handlers may hold a copy of the descriptor.
        let _ = flock(&self.opened.file, libc::LOCK_UN);
        file.left = self.opened.file.metadata().ok().map(|found| FileId::from_metadata(&found)).zip(self.opened.bytes);
        // No pool continues a file without a head.
        file.pools = if self.head.is_empty() { file.pools } else { 0 };
        true
    }

    /// Writes the items in the queue, and the end of a pool, if any.
    fn write_queue(&mut self, ended: Option<u32>) {
        // Only the items that are queued now are taken, so that busy threads do not keep this thread in the loop. The new queue
        // has capacity, so that an item rarely allocates while other threads wait for the lock.
        let empty = (Vec::with_capacity(2 * WAKE_AT), 0);
        let (items, lost) = replace(&mut *self.writer.queue.lock(), empty);
        for (left, item) in (0..items.len()).rev().zip(&items) {
            // Relaxed: a statistic.
            self.writer.taken.store(left as u64 + self.records + 1 + lost, Ordering::Relaxed);
            self.add(item);
        }
        // The names are taken after the records, so that the names of all records are included. They are resolved without the
        // lock, because resolving reads files.
        let unwritten = take(&mut self.writer.names.lock().unwritten);
        unwritten.into_iter().for_each(|name| self.add(&item(name)));
        let missing = (lost > 0).then_some((0, Event::Missing { records: lost }));
        for (pool, event) in missing.into_iter().chain(ended.map(|pool| (pool, Event::End))) {
            self.add(&Item::Record(Record { time_ns: self.writer.now_ns(), thread: 0, pool, event }));
        }
        self.write_block();
        self.writer.recorded.lock().lost += lost;
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

    /// Writes the block, unless an earlier block could not be written.
    fn write_block(&mut self) {
        let (items, records) = (take(&mut self.items), take(&mut self.records));
        // Written without the lock, because a disk may be slow.
        let written = if items.is_empty() || self.has_failed() { Ok(()) } else { self.write(block(&items)) };
        let recorded = &mut *self.writer.recorded.lock();
        recorded.failure = recorded.failure.take().or(written.err().map(|error| error.to_string()));
        *(if recorded.failure.is_some() { &mut recorded.lost } else { &mut recorded.records }) += records;
    }

    fn write(&mut self, block: Vec<u8>) -> io::Result<()> {
        let mut bytes = [take(&mut self.head), block].concat();
        if self.writer.path.extension().is_some_and(|extension| extension == "gz") {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
            encoder.write_all(&bytes)?;
            bytes = encoder.finish()?;
        }
        let Opened { file, bytes: end } = &mut self.opened;
        let mut output: &File = file;
        let emptied = if *end == Some(0) { file.set_len(0) } else { Ok(()) };
        let written = emptied.and_then(|()| output.write_all(&bytes));
        match (&written, end) {
            (Ok(()), Some(end)) => *end += bytes.len() as u64,
            // The partial block is removed, because a reader could read nothing after it.
            (Err(_), Some(end)) => _ = file.set_len(*end),
            (_, None) => {}
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_loses_records_and_snapshots_are_no_records() {
        let writer = TraceFile::new("/dev/null".into()).writer;
        let taken = TimedSnapshot { time_ns: 0, pool: 0, at_us: 0, snapshot: Box::default() };
        (0..=CAPACITY).for_each(|_| writer.add(Item::Snapshot(taken.clone())));
        writer.add(Item::Record(Record { time_ns: 0, thread: 0, pool: 0, event: Event::Cleared }));
        assert_eq!(writer.queue.lock().1, 1);
    }

    #[cfg(debug_assertions)] // A sum that overflows panics.
    #[test]
    fn a_panic_of_the_thread_fails_the_recording_and_the_queue_is_emptied() {
        let pool = open(Path::new("/dev/null"), Vec::new()).unwrap();
        let writer = TRACE_FILES.get().lock()[Path::new("/dev/null")].lock().writer.clone();
        writer.recorded.lock().lost = u64::MAX;
        writer.queue.lock().1 = 1;
        pool.begin();
        assert_eq!(pool.end().unwrap().failure.as_deref(), Some("its thread has panicked"));
        assert!(writer.queue.lock().0.is_empty());
    }

    #[test]
    fn a_file_that_opens_slowly_delays_no_other() {
        let slow = Path::new("/dev/full");
        drop(open(slow, Vec::new()).unwrap());
        let file = TRACE_FILES.get().lock()[slow].clone();
        let _opening = file.lock();
        assert!(open(Path::new("/"), Vec::new()).is_err());
    }
}
