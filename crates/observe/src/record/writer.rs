//! The thread that writes a recording, and the files that are open.
//!
//! Pools of one process that name the same file share it. A record goes into one bounded queue, which never waits: a record that
//! finds no room is counted as lost. The thread takes what the queue holds every 50 ms, or when a recording thread wakes it, sorts it
//! by time and writes it as blocks, each compressed separately for a name that ends in `.gz`. A process that dies leaves whole blocks
//! except the last. A process that exits waits up to 2 s until what was recorded before is in the file.
#![allow(unsafe_code)] // Registers the handler of the exit.

use std::cell::Cell;
use std::collections::HashMap;
use std::hash::Hash;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded};
use crossbeam::queue::ArrayQueue;

use super::event::{Event, PoolDescription, Record};
use super::format::{BlockWriter, Item, TimedSnapshot, head};
use super::output::Output;
use super::{Recorded, Unrecorded, open};
use pinpool_os::call_stack::{CallStack, Frame};
use pinpool_os::file_id::FileId;
use pinpool_os::fork::OfProcess;
use pinpool_os::sync::plain::{Mutex, MutexGuard};
use pinpool_os::threads;

/// Time between two writes.
const PERIOD: Duration = Duration::from_millis(50);
/// Longest wait for the writer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest delay of an exit.
const EXIT_PATIENCE: Duration = Duration::from_secs(2);
/// Records of the queue: 5 MiB.
const CAPACITY: usize = 1 << 16;
/// A thread wakes the writer after this many records.
const WAKE_EVERY: u32 = 1024;

/// Most tags of a file: half of what a reader accepts.
const TAGS_MAX: usize = 32_768;
/// Most call stacks of a file: a quarter of that.
const STACKS_MAX: usize = 16_384;
/// The tag of requests beyond [`TAGS_MAX`].
const OTHER_TAGS: &str = "(other tags)";

thread_local! {
    /// The number of the thread in recordings (0: none yet), and its records until it wakes the writer.
    static THREAD: Cell<(u32, u32)> = const { Cell::new((0, WAKE_EVERY)) };
}

/// Commands to the thread.
enum Command {
    /// The queue fills up.
    Wake,
    Add(Item),
    /// The process exits; the answer comes when all records so far are in the file.
    Flush(Sender<()>),
    /// A pool has ended; the answer comes when all of its records are in the file.
    End(u32, Sender<Recorded>),
}

/// A file that is being written.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) path: PathBuf,
    /// Time 0 of the recording.
    pub(super) begun: Instant,
    queue: ArrayQueue<Record>,
    commands: Sender<Command>,
    is_woken: AtomicBool,
    is_closed: AtomicBool,
    /// Pools that have not ended; changed under the lock of `TRACE_FILES`.
    open_pools: AtomicU32,
    names: Mutex<Named>,
    /// Records for which the queue had no room, since the last write.
    unqueued: AtomicU64,
    /// Records that are in the file, and lost ones.
    written: AtomicU64,
    lost: AtomicU64,
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
struct Named {
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
    fn tag(&mut self, name: &str) -> u32 {
        let number = self.tags.number(name.into(), TAGS_MAX - 1);
        number.or_else(|| self.tags.number(OTHER_TAGS.into(), TAGS_MAX)).unwrap_or(0)
    }
}

/// A file that this process has opened and may continue.
struct TraceFile {
    path: PathBuf,
    writer: Weak<Writer>,
    begun: Instant,
    pools: u32,
    names: Named,
    /// The file and its length when it was last closed; `None` for a file without a length.
    left: Option<(FileId, u64)>,
}

static TRACE_FILES: OfProcess<Mutex<Vec<TraceFile>>> = OfProcess::new(Mutex::default);

/// Locks the list of files; `None` if another thread, which may wait for a disk, keeps it locked until `until`.
fn lock_until(opened: &Mutex<Vec<TraceFile>>, until: Instant) -> Option<MutexGuard<'_, Vec<TraceFile>>> {
    loop {
        match opened.try_lock() {
            None if Instant::now() < until => std::thread::sleep(Duration::from_millis(1)),
            locked => return locked,
        }
    }
}

impl Writer {
    /// The writer of `path`, the number of another pool in it, and the new path of an earlier recording if this pool opened the file.
    pub(super) fn of(path: &Path) -> Result<(Arc<Self>, u32, Option<PathBuf>), Unrecorded> {
        let no_thread = |error: io::Error| {
            Unrecorded::Failed(format!(
                "has no thread that writes it: {error}; raise the limit on threads (`ulimit -u`)"
            ))
        };
        // Another thread holds it while a file is closed.
        let until = Instant::now() + Duration::from_secs(2);
        let mut opened = lock_until(TRACE_FILES.get(), until).ok_or(Unrecorded::Busy)?;
        let known = opened.iter().position(|file| file.path == path);
        if let Some(index) = known
            && let Some(writer) =
                opened[index].writer.upgrade().filter(|writer| !writer.is_closed.load(Ordering::Relaxed))
        {
            writer.open_pools.fetch_add(1, Ordering::Relaxed);
            opened[index].pools += 1;
            return Ok((writer, opened[index].pools - 1, None));
        }
        let left = known.and_then(|index| opened[index].left);
        let open::Opened { file, bytes, earlier } = open::open(path, left)?;
        let is_continued = known.is_some() && bytes != Some(0);
        let before = known.map(|index| opened.swap_remove(index)).filter(|_| is_continued);
        let (pools, names, begun) =
            before.map_or_else(|| (0, Named::default(), Instant::now()), |file| (file.pools, file.names, file.begun));
        let (commands, received) = bounded(4096);
        let writer = Arc::new(Self {
            path: path.to_owned(),
            begun,
            queue: ArrayQueue::new(CAPACITY),
            commands,
            is_woken: Default::default(),
            is_closed: Default::default(),
            open_pools: AtomicU32::new(1),
            names: Mutex::new(names),
            unqueued: Default::default(),
            written: Default::default(),
            lost: Default::default(),
        });
        let is_compressed = path.extension().is_some_and(|extension| extension == "gz");
        let head = if is_continued { Vec::new() } else { head() };
        let output = Output::new(file, bytes, is_compressed, head);
        let run = Run { writer: writer.clone(), received, output, block: BlockWriter::default() };
        threads::spawn(c"pinpool-trace", move || run.run()).map_err(no_thread)?;
        flush_at_exit();
        opened.push(TraceFile {
            path: path.to_owned(),
            writer: Arc::downgrade(&writer),
            begun,
            pools: pools + 1,
            names: Named::default(),
            left: None,
        });
        Ok((writer, pools, earlier))
    }

    /// Records the end of a pool. If it was the last, returns the locked list of files, so that no new pool opens the file before it is
    /// closed.
    fn end_one(&self) -> Option<MutexGuard<'static, Vec<TraceFile>>> {
        let opened = TRACE_FILES.get().lock();
        if self.open_pools.fetch_sub(1, Ordering::Relaxed) > 1 {
            return None;
        }
        self.is_closed.store(true, Ordering::Relaxed);
        Some(opened)
    }

    /// Adds a record of the calling thread; never waits.
    #[inline]
    pub(super) fn push(&self, record: Record) {
        static THREADS: AtomicU32 = AtomicU32::new(1);
        let (thread, left) = THREAD.get();
        // Relaxed: only unique.
        let thread = if thread == 0 { THREADS.fetch_add(1, Ordering::Relaxed) } else { thread };
        let left = left - 1;
        THREAD.set((thread, if left == 0 { WAKE_EVERY } else { left }));
        if self.queue.push(Record { thread, ..record }).is_err() {
            // Relaxed: a sum.
            self.unqueued.fetch_add(1, Ordering::Relaxed);
        }
        if left == 0 {
            self.wake();
        }
    }

    /// Adds a snapshot, unless the thread has many to write; never waits.
    pub(super) fn take(&self, taken: TimedSnapshot) {
        let _ = self.commands.try_send(Command::Add(Item::Snapshot(taken)));
    }

    /// Wakes the thread to write now.
    #[cold]
    pub(super) fn wake(&self) {
        // Relaxed: a hint; the thread writes every 50 ms anyway.
        if !self.is_woken.swap(true, Ordering::Relaxed) {
            let _ = self.commands.try_send(Command::Wake);
        }
    }

    /// Describes a pool, before its first record.
    pub(super) fn describe(&self, pool: PoolDescription) {
        let _ = self.commands.send_timeout(Command::Add(Item::Pool(pool)), PATIENCE);
    }

    /// The number of a tag; tags beyond those that a reader takes share one.
    pub(super) fn name_tag(&self, name: &str) -> u32 {
        self.names.lock().tag(name)
    }

    /// The number of a call stack; `None` beyond [`STACKS_MAX`].
    pub(super) fn number_stack(&self, stack: &Arc<CallStack>) -> Option<u32> {
        self.names.lock().stacks.number(stack.clone(), STACKS_MAX)
    }

    /// Waits until the records of the pool, which has ended, are in the file.
    pub(super) fn end(&self, pool: u32) -> Recorded {
        let (answer, answered) = bounded(1);
        let sent = self.commands.send_timeout(Command::End(pool, answer), PATIENCE);
        let answer = match sent {
            Ok(()) => answered.recv_timeout(PATIENCE),
            Err(SendTimeoutError::Disconnected(_)) => Err(RecvTimeoutError::Disconnected),
            Err(SendTimeoutError::Timeout(_)) => Err(RecvTimeoutError::Timeout),
        };
        answer.unwrap_or_else(|why| {
            let failure = match why {
                RecvTimeoutError::Timeout => format!("the disk has not taken the last records within {PATIENCE:?}"),
                RecvTimeoutError::Disconnected => "the thread that writes it has ended".to_owned(),
            };
            // Including records that are neither written nor counted as lost.
            let pending = self.queue.len() as u64 + self.unqueued.load(Ordering::Relaxed);
            let lost = self.lost.load(Ordering::Relaxed) + pending;
            Recorded { records: self.written.load(Ordering::Relaxed), lost, failure: Some(failure) }
        })
    }
}

/// The exit of this process flushes its files from now on. A process that ends without its exit handlers (`_exit`, `abort`, a signal)
/// loses what was recorded since the last write.
fn flush_at_exit() {
    static REGISTERED: AtomicBool = AtomicBool::new(false);
    // A child of `fork` has the handlers of its parent. Miri runs none.
    if !cfg!(miri) && !REGISTERED.swap(true, Ordering::Relaxed) {
        // SAFETY: the handler does not unwind. If it cannot be registered for lack of memory, exits do not wait.
        unsafe { libc::atexit(flush_open) };
    }
}

extern "C" fn flush_open() {
    let until = Instant::now() + EXIT_PATIENCE;
    let opened = TRACE_FILES.get_if_made().and_then(|opened| lock_until(opened, until));
    let writers: Vec<_> =
        opened.iter().flat_map(|opened| opened.iter()).filter_map(|file| file.writer.upgrade()).collect();
    // A writer takes the lock to close its file.
    drop(opened);
    let left = || until.saturating_duration_since(Instant::now());
    let ask = |writer: Arc<Writer>| {
        let (answer, answered) = bounded(1);
        writer.commands.send_timeout(Command::Flush(answer), left()).ok().map(|()| answered)
    };
    for answered in writers.into_iter().filter_map(ask).collect::<Vec<_>>() {
        let _ = answered.recv_timeout(left());
    }
}

/// The thread's own state.
struct Run {
    writer: Arc<Writer>,
    received: Receiver<Command>,
    output: Output,
    block: BlockWriter,
}

impl Run {
    fn run(mut self) {
        loop {
            let command = self.received.recv_timeout(PERIOD);
            self.writer.is_woken.store(false, Ordering::Relaxed);
            match command {
                Ok(Command::Wake) | Err(RecvTimeoutError::Timeout) => self.write(),
                Ok(Command::Add(item)) => {
                    self.block.add(&item);
                    // A pool is described before its first record.
                    if matches!(item, Item::Pool(_)) || self.block.is_full() {
                        self.write();
                    }
                }
                Ok(Command::Flush(answer)) => {
                    self.write();
                    let _ = answer.send(());
                }
                Ok(Command::End(pool, answer)) => {
                    self.write();
                    let end = self.record(pool, Event::End);
                    self.block.add(&end);
                    let written = self.output.write(&mut self.block);
                    self.writer.written.fetch_add(written, Ordering::Relaxed);
                    let last = self.writer.end_one();
                    let is_last = last.is_some();
                    if let Some(mut opened) = last {
                        self.write();
                        // Before the answer: the next pool may open it again.
                        self.close(&mut opened);
                    }
                    let records = self.writer.written.load(Ordering::Relaxed);
                    let failure = self.output.failure.clone();
                    let lost = self.writer.lost.load(Ordering::Relaxed);
                    let _ = answer.send(Recorded { records, lost, failure });
                    if is_last {
                        return;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Closes the file and keeps the state needed to continue it.
    fn close(&mut self, opened: &mut [TraceFile]) {
        self.output.close();
        let mut names = std::mem::take(&mut *self.writer.names.lock());
        if self.output.failure.is_some() {
            names.tags.forget_written();
            names.stacks.forget_written();
        }
        let this = Arc::as_ptr(&self.writer);
        if let Some(file) = opened.iter_mut().find(|file| file.writer.as_ptr() == this) {
            file.names = names;
            file.left = self.output.left;
        }
    }

    /// Writes what the queue holds.
    fn write(&mut self) {
        let writer = self.writer.clone();
        // Read before the records, so that later losses are reported later. At most one queue of records is taken, so that busy threads do
        // not keep this thread in the loop.
        let lost = writer.unqueued.swap(0, Ordering::Relaxed);
        let mut taken: Vec<Record> = std::iter::from_fn(|| writer.queue.pop()).take(CAPACITY).collect();
        let records = taken.len() as u64;
        // Stable: the records of one thread stay in order.
        taken.sort_by_key(|record| record.time_ns);
        // Taken after the records, so that the tags of all records are included. Resolved without the lock, because this reads files.
        let (tags, stacks) = {
            let mut named = writer.names.lock();
            (std::mem::take(&mut named.tags.unwritten), std::mem::take(&mut named.stacks.unwritten))
        };
        let tags = tags.into_iter().map(|(number, name)| Item::Tag(number, name.into()));
        let frame = |Frame { name, file, line }| (name, file, line);
        let stacks = stacks
            .into_iter()
            .map(|(number, stack)| Item::Stack(number, stack.frames().into_iter().map(frame).collect()));
        let missing = (lost > 0).then(|| self.record(0, Event::Missing { records: lost }));
        let mut written = 0;
        for item in tags.chain(stacks).chain(taken.into_iter().map(Item::Record)).chain(missing) {
            self.block.add(&item);
            if self.block.is_full() {
                written += self.output.write(&mut self.block);
            }
        }
        written += self.output.write(&mut self.block);
        // Relaxed: read at the end of a pool, after the answer or after a timeout.
        writer.written.fetch_add(written, Ordering::Relaxed);
        // Records that a failed file did not take are lost too.
        let unwritten = if self.output.failure.is_some() { records.saturating_sub(written) } else { 0 };
        writer.lost.fetch_add(lost + unwritten, Ordering::Relaxed);
    }

    /// A record of this thread.
    fn record(&self, pool: u32, event: Event) -> Item {
        let time_ns = u64::try_from(self.writer.begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Item::Record(Record { time_ns, thread: 0, pool, event })
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
