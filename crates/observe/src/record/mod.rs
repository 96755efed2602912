//! Recordings of pools, for `pinpool why`, `report`, `advise` and `trace`.
//!
//! ```text
//!   request, return, pin ... ──▶ queue (bounded) ──▶ pinpool-trace ──▶ blocks with checksums ──▶ file
//! ```
//!
//! | file | owns |
//! | --- | --- |
//! | `event.rs` | the events |
//! | `file` | files, written and read back |
//!
//! Without the feature `io` nothing is recorded.
//!
//! # Format
//!
//! ```text
//! head    "PINPOOLT"                     8 bytes
//!         version                        u32
//! block   length of the items, in bytes  u32, at most 64 MiB
//!         CRC-32 (IEEE) of the items     u32
//!         items
//! block   ...
//! ```
//!
//! Numbers of fixed width are little-endian. Items are encoded by [postcard](https://postcard.jamesmunns.com/wire-format): an
//! enum is the number of its variant and then its fields, an unsigned number is LEB128, a text or list is its length and its
//! content. A file with a name that ends in `.gz` is a sequence of gzip members with one or several whole blocks each; the first
//! member also has the head.
//!
//! A block is written as a whole, every 50 ms or sooner while something is recorded, so if a process dies, only the last block
//! of its file may be truncated. A reader keeps the whole items of that block, reports the truncation, and stops there; it also
//! stops before a block with a wrong checksum. `pinpool trace`, `why`, `report` and `advise` use the intact part of such a file
//! and exit with 1.
//!
//! A process that exits (`exit`, or the end of `main`) while its pools live waits up to 2 s until earlier records are in the
//! file. A process that ends without its exit handlers (`_exit`, `abort`, a signal) loses the records since the last write. In
//! both cases `end` of these pools is missing, and `pinpool trace` names them.
//!
//! The queue of a file holds 65,536 records. Records that find no room are lost, counted, and reported in a record `missing`.
//!
//! # Opening a file
//!
//! A new file is readable by its user alone (mode 0600), because it contains addresses and tags. Pools of one process that name
//! the same file share it, and a later pool of that process continues it. An empty file is written, and a recording of another
//! process that has ended is overwritten once a pool is built. With `%p` in the name each process has its own file. A pipe of
//! this user is accepted if it has a reader when the pool is built; `/dev/null` and `/dev/full` are accepted too.
//!
//! Everything else is refused before anything is written: a file that does not begin as a recording (compressed or not), a
//! symbolic link, a directory, a device, a socket, and files of other users. Building the pool then fails with an error that
//! names the file and what it is.
//!
//! # Items
//!
//! The reader reads at most 4 GiB, 16 million records and snapshots, and 65,536 pools, tags and call stacks. The writer names at
//! most 24,576 tags and 24,576 call stacks. Requests with further tags are recorded as untagged, and requests with further call
//! stacks without a call stack.
//!
//! | variant | item | fields |
//! | --- | --- | --- |
//! | 0 | record | time in ns, thread, pool, event |
//! | 1 | pool | number, list of facts (name and value) |
//! | 2 | tag | number (not 0), name |
//! | 3 | call stack | number (not 0), list of frames, innermost first: function, file (may be empty), line |
//! | 4 | snapshot | time in ns, pool, time of the pool's clock in us, statistics and holders (`diagnosis::Snapshot` in `crates/observe`) |
//!
//! Time 0 is when the first pool of the file was built. Records of one thread are in order; records of different threads may be
//! out of order by some blocks, so a reader sorts them by time, keeping the order of equal times. Snapshots come at most every
//! 100 ms at first, later every 200th of the elapsed time, and at the end of each diagnosis window. `pinpool why` diagnoses
//! them with the rules of the running pool.
//!
//! | variant | event | fields |
//! | --- | --- | --- |
//! | 0 | request, served | id, bytes requested, bytes of the class, tag, ns that it took (0: a hit) |
//! | 1 | sampled: the call stack of the last request that returned this memory | id, number of the call stack |
//! | 2 | waited: the next request of this thread waited in the queue | |
//! | 3 | request, refused | bytes requested, bytes of the class, tag, ns that it took |
//! | 4 | return | id, whether devices may still use the buffer |
//! | 5 | completed: the copies of a buffer have ended | id |
//! | 6 | leaked: the end of its copies cannot be determined | id |
//! | 7 | new: memory of a buffer | id, address, bytes of the class, whether it is the backend's (else pageable memory in its place) |
//! | 8 | gone: memory left the pool's buffers | id |
//! | 9 | pin | address, bytes, ns of the call, whether it failed |
//! | 10 | unpin | address, bytes, ns of the call, whether it failed |
//! | 11 | move of granules | address before, address after, bytes, ns of the call (0 except for its first piece) |
//! | 12 | limit on idle buffers | before, after |
//! | 13 | limit in bytes | bytes; 2^64 - 1 is none |
//! | 14 | cleared | |
//! | 15 | missing records | their number |
//! | 16 | end of the pool | |
//!
//! An id identifies memory from `new` to `gone`. Between these two events, requests and returns of the id alternate. Tag 0 is none.
//!
//! Facts of a pool: `backend`, `pinned` (`driver`, `kernel` or `no`), `name` (if it has one), `process`, `version` (of
//! the crate), `time` (seconds since 1970 at time 0), `set_in_code` (the variables that the program sets in its code), and each
//! `PINPOOL_*` variable with its value.

use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

use crate::diagnosis::Snapshot;
use pinpool_os::call_stack::CallStack;
use pinpool_os::sync::unmodeled::AtomicU64;

mod event;
pub use event::{Event, PoolDescription, Record, SET_IN_CODE};

#[cfg(feature = "io")]
mod file;

#[cfg(feature = "io")]
pub use file::{Recording, TimedSnapshot, Unrecorded, check_path, open};

/// A name that records refer to by number.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Name {
    Tag(Box<str>),
    Stack(Arc<CallStack>),
}

/// Records what one pool does. Without the feature `io` there are no recorders.
pub trait Recorder: Debug + Send + Sync {
    /// Returns the number of a name, which is assigned on the first call; 0 if the file has too many names.
    fn number(&self, name: Name) -> u32;

    /// Records that the pool is built. Until then, no earlier recording at the path is overwritten.
    fn begin(&self);

    /// Adds a record; never waits for the file.
    fn record(&self, event: Event);

    /// Returns whether a snapshot is due: every 100 ms at first, later every 200th of the elapsed time.
    fn wants_snapshot(&self, now_us: u64) -> bool;

    /// Adds the state of the pool at `at_us` of the pool's clock; never waits for the file.
    fn snapshot(&self, at_us: u64, snapshot: Snapshot);

    fn path(&self) -> &Path;

    /// Returns the state of the file after the last write.
    fn recorded(&self) -> Recorded;

    /// Ends the pool and waits up to 10 s until its records are in the file. Returns `None` if the pool had ended before.
    fn end(&self) -> Option<Recorded>;
}

/// Number of pools with a requested recording that is missing or incomplete. Relaxed: a statistic.
pub static FAILED_RECORDINGS: AtomicU64 = AtomicU64::new(0);

/// The result of a pool's recording.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recorded {
    /// Records of this file so far, including other pools.
    pub records: u64,
    /// Records that found no room in the queue.
    pub lost: u64,
    /// The reason that the file is incomplete.
    pub failure: Option<String>,
}
