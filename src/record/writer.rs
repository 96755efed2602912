//! The thread that writes a recording, and the files that are open.
//!
//! Pools of one process that name the same file share it. The thread takes what the queues hold every 50 ms, or when a thread
//! wakes it, sorts it by time and writes it as blocks, each compressed by itself for a name that ends in `.gz`: a process that
//! dies leaves whole blocks but for the last.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use crossbeam::channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded};
use flate2::Compression;
use flate2::write::GzEncoder;

use super::event::{Event, PoolDescription};
use super::format::{BlockWriter, head};
use super::queues::{Queues, Stamped};
use super::ticks::{Ticks, Timeline};
use super::{Recorded, Unrecorded};
use crate::fork::ForkGeneration;
use crate::maintenance_thread::block_signals;
use crate::sync::plain::Mutex;

/// Between two looks at the queues: what a process that dies loses at most.
const PERIOD: Duration = Duration::from_millis(50);
/// Longest wait for the writer, which may wait for a disk.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the thread is told.
enum Command {
    /// A queue fills up.
    Wake,
    Pool(PoolDescription),
    Tag(u32, String),
    /// A pool has ended; the answer comes when all of its records are in the file.
    End(u32, Sender<Recorded>),
}

/// A file that is being written.
#[derive(Debug)]
pub(super) struct Writer {
    pub(super) path: PathBuf,
    pub(super) ticks: Ticks,
    pub(super) queues: Queues,
    commands: Sender<Command>,
    is_woken: AtomicBool,
    /// Pools that have not ended; changed under the lock of `OPENED`.
    open_pools: AtomicU32,
    tags: AtomicU32,
    /// Records that are in the file.
    written: AtomicU64,
}

/// A file that this process has opened. An ended one is continued.
struct Opened {
    path: PathBuf,
    generation: ForkGeneration,
    writer: Weak<Writer>,
    ticks: Ticks,
    pools: u32,
    /// Tags named when it was last closed.
    tags: u32,
}

static OPENED: Mutex<Vec<Opened>> = Mutex::new(Vec::new());

impl Writer {
    /// The writer of `path` and the number of another pool in it.
    pub(super) fn of(path: &Path) -> Result<(Arc<Self>, u32), Unrecorded> {
        let failed = |error: io::Error| Unrecorded::Failed(error.to_string());
        // A child forked while another thread held the lock would wait without an end.
        let mut opened = OPENED.try_lock_for(Duration::from_secs(2)).ok_or(Unrecorded::Busy)?;
        opened.retain(|file| !file.generation.is_stale());
        let known = opened.iter().position(|file| file.path == path);
        if let Some(index) = known
            && let Some(writer) = opened[index].writer.upgrade().filter(|writer| !writer.is_closed())
        {
            writer.open_pools.fetch_add(1, Ordering::Relaxed);
            opened[index].pools += 1;
            return Ok((writer, opened[index].pools - 1));
        }
        let (pools, tags_before, ticks) = known.map_or_else(
            || (0, 0, Ticks::new()),
            |index| (opened[index].pools, opened[index].tags, opened[index].ticks),
        );
        let file = open(path, pools > 0)?;
        let (commands, received) = bounded(256);
        let (is_woken, queues) = (AtomicBool::new(false), Queues::new());
        let (open_pools, tags) = (AtomicU32::new(1), AtomicU32::new(tags_before));
        let written = AtomicU64::new(0);
        let writer =
            Arc::new(Self { path: path.to_owned(), ticks, queues, commands, is_woken, open_pools, tags, written });
        let output = Output::new(file, path.extension().is_some_and(|extension| extension == "gz"), pools > 0);
        let (timeline, block) = (Timeline::new(ticks), BlockWriter::default());
        let run = Run { writer: writer.clone(), received, output, timeline, block, lost: 0 };
        thread::Builder::new().name("pinpool-trace".to_owned()).spawn(move || run.run()).map_err(failed)?;
        if let Some(index) = known {
            opened.swap_remove(index);
        }
        let writer_of_path = Arc::downgrade(&writer);
        let generation = ForkGeneration::now();
        opened.push(Opened {
            path: path.to_owned(),
            generation,
            writer: writer_of_path,
            ticks,
            pools: pools + 1,
            tags: tags_before,
        });
        Ok((writer, pools))
    }

    /// A pool has ended. Whether it was the last: then this file is closed, and a new pool opens it again.
    fn end_one(&self) -> bool {
        let mut opened = OPENED.lock();
        let is_last = self.open_pools.fetch_sub(1, Ordering::Relaxed) == 1;
        if is_last {
            self.queues.is_closed.store(true, Ordering::Relaxed);
            let tags = self.tags.load(Ordering::Relaxed);
            opened.iter_mut().filter(|file| file.path == self.path).for_each(|file| file.tags = tags);
        }
        is_last
    }

    fn is_closed(&self) -> bool {
        self.queues.is_closed.load(Ordering::Relaxed)
    }

    /// Adds a record; never waits.
    #[inline]
    pub(super) fn record(&self, pool: u32, event: Event) {
        if self.queues.push(Stamped { ticks: self.ticks.now(), pool, event }) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        // Relaxed: a hint; the writer looks every 50 ms anyway.
        if !self.is_woken.swap(true, Ordering::Relaxed) {
            let _ = self.commands.try_send(Command::Wake);
        }
    }

    /// Describes a pool, before its first record.
    pub(super) fn describe(&self, pool: PoolDescription) {
        let _ = self.commands.send_timeout(Command::Pool(pool), PATIENCE);
    }

    /// Names a tag; without its name, if the writer is stuck for long, it has a number still.
    pub(super) fn name_tag(&self, name: &str) -> u32 {
        // Relaxed: only unique.
        let number = self.tags.fetch_add(1, Ordering::Relaxed) + 1;
        let _ = self.commands.try_send(Command::Tag(number, name.to_owned()));
        number
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
            Recorded { records: self.written.load(Ordering::Relaxed), lost: 0, failure: Some(failure) }
        })
    }
}

/// Opens `path` for this process alone: empty, or to be continued.
#[allow(unsafe_code)]
fn open(path: &Path, continues: bool) -> Result<File, Unrecorded> {
    let failed = |error: io::Error| Unrecorded::Failed(error.to_string());
    let file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
    // SAFETY: the descriptor is open as long as `file` is.
    let locked = unsafe { libc::flock(std::os::fd::AsRawFd::as_raw_fd(&file), libc::LOCK_EX | libc::LOCK_NB) };
    if locked != 0 && io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock {
        return Err(Unrecorded::Taken);
    }
    // A pipe or a terminal has no length.
    if !continues && file.metadata().map_err(failed)?.is_file() {
        file.set_len(0).map_err(failed)?;
    }
    Ok(file)
}

/// The file, up to the first write that fails.
struct Output {
    file: Option<File>,
    is_compressed: bool,
    /// The head, before it is written.
    head: Vec<u8>,
    failure: Option<String>,
}

impl Output {
    fn new(file: File, is_compressed: bool, continues: bool) -> Self {
        let head = if continues { Vec::new() } else { head().to_vec() };
        Self { file: Some(file), is_compressed, head, failure: None }
    }

    /// Writes the block. Returns how many records of it are in the file.
    fn write(&mut self, block: &mut BlockWriter) -> u64 {
        if block.is_empty() {
            return 0;
        }
        let records = block.records();
        let mut bytes = std::mem::take(&mut self.head);
        bytes.extend(block.finish());
        let Some(file) = &mut self.file else { return 0 };
        let written = if self.is_compressed {
            let encode = || {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
                encoder.write_all(&bytes)?;
                encoder.finish()
            };
            encode().and_then(|member| file.write_all(&member))
        } else {
            file.write_all(&bytes)
        };
        if let Err(error) = written {
            self.failure = Some(error.to_string());
            self.file = None;
            return 0;
        }
        records
    }
}

/// The thread's own state.
struct Run {
    writer: Arc<Writer>,
    received: Receiver<Command>,
    output: Output,
    timeline: Timeline,
    block: BlockWriter,
    lost: u64,
}

impl Run {
    fn run(mut self) {
        block_signals();
        loop {
            let command = self.received.recv_timeout(PERIOD);
            self.writer.is_woken.store(false, Ordering::Relaxed);
            match command {
                Ok(Command::Wake) | Err(RecvTimeoutError::Timeout) => self.write(),
                Ok(Command::Pool(pool)) => {
                    self.block.pool(&pool);
                    self.write();
                }
                Ok(Command::Tag(number, name)) => {
                    self.block.tag(number, &name);
                    self.write();
                }
                Ok(Command::End(pool, answer)) => {
                    self.writer.record(pool, Event::End);
                    self.write();
                    let is_last = self.writer.end_one();
                    if is_last {
                        self.write();
                        self.writer.queues.close();
                        // Unlocked before the answer: the next pool may open it again.
                        self.output.file = None;
                    }
                    let records = self.writer.written.load(Ordering::Relaxed);
                    let failure = self.output.failure.clone();
                    let _ = answer.send(Recorded { records, lost: self.lost, failure });
                    if is_last {
                        return;
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Writes what the queues hold.
    fn write(&mut self) {
        self.timeline.read();
        let Self { writer, output, timeline, block, lost, .. } = self;
        let mut taken: Vec<(u64, u32, Stamped)> = Vec::new();
        *lost += writer.queues.take(|thread, record| taken.push((timeline.time_ns(record.ticks), thread, record)));
        // Stable: the records of one thread stay in order.
        taken.sort_by_key(|(time_ns, ..)| *time_ns);
        let mut written = 0;
        for (time_ns, thread, Stamped { pool, event, .. }) in &taken {
            block.record(*time_ns, *thread, *pool, event);
            if block.is_full() {
                written += output.write(block);
            }
        }
        written += output.write(block);
        // Relaxed: read by those who end a pool, after the answer or without one.
        writer.written.fetch_add(written, Ordering::Relaxed);
    }
}
