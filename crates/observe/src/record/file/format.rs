//! The bytes of a recording: a head, then blocks that can each be read alone.
//!
//! ```text
//!   head    "PINPOOLT"  version: u32
//!   block   length: u32   CRC-32 of the items: u32   items, each encoded by postcard
//! ```
//!
//! Numbers of fixed width are little-endian.

use serde::{Deserialize, Serialize};

use crate::diagnosis::Snapshot;
use crate::record::{PoolDescription, Record};
use pinpool_os::call_stack::Frame;

/// The first bytes of a recording.
pub(super) const MAGIC: [u8; 8] = *b"PINPOOLT";
/// The version that this code reads and writes.
pub(super) const VERSION: u32 = 4;
/// Bytes of the head.
pub(super) const HEAD_BYTES: usize = 12;
/// Bytes before the items of a block.
pub(super) const FRAME_BYTES: usize = 8;
/// Maximum length of the items in a block; a block with a larger length is damaged.
pub(super) const BLOCK_BYTES_MAX: usize = 64 << 20;
/// A block is closed once its items have this many bytes.
pub(super) const BLOCK_BYTES: usize = 256 << 10;

/// A part of a block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Item {
    Record(Record),
    Pool(PoolDescription),
    /// The number and name of a tag.
    Tag(u32, String),
    /// The number of a call stack, and its frames, innermost first.
    Stack(u32, Vec<Frame>),
    Snapshot(TimedSnapshot),
}

/// The state of a pool, with the time in the recording and the time of the pool's own clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimedSnapshot {
    pub time_ns: u64,
    pub pool: u32,
    pub at_us: u64,
    pub snapshot: Box<Snapshot>,
}

/// Returns the head of a file.
pub(super) fn head() -> Vec<u8> {
    [&MAGIC[..], &VERSION.to_le_bytes()].concat()
}

/// Appends an item to the encoded items of a block.
pub(super) fn add_item(items: &mut Vec<u8>, item: &Item) {
    // Fails only for types that postcard does not support.
    *items = postcard::to_extend(item, std::mem::take(items)).unwrap_or_default();
}

/// Returns the block with these items: their length and checksum, and the items.
pub(super) fn block(items: &[u8]) -> Vec<u8> {
    let len = u32::try_from(items.len()).unwrap_or(u32::MAX);
    [&len.to_le_bytes()[..], &crc32fast::hash(items).to_le_bytes(), items].concat()
}
