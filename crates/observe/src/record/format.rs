//! The bytes of a recording: a head, then blocks that each can be read alone.
//!
//! ```text
//!   head    "PINPOOLT"  version: u32
//!   block   length: u32   CRC-32 of the items: u32   items
//!   item    kind: u8   numbers (LEB128; times and differences zigzag)   texts (length, UTF-8)
//! ```
//!
//! Numbers of fixed width are little-endian. Within a block, time, thread and pool hold until the next item that sets them.

use super::event::{Event, PoolDescription};
use pinpool_os::call_stack::Frame;

/// The first bytes of a recording.
pub(super) const MAGIC: [u8; 8] = *b"PINPOOLT";
/// The newest version that this code reads and writes.
pub(super) const VERSION: u32 = 3;
/// The first version that has [`Event::Waited`].
pub(super) const MARKS_WAITS: u32 = 3;
/// Bytes of the head.
pub(super) const HEAD_BYTES: usize = 12;
/// Bytes before the items of a block.
pub(super) const FRAME_BYTES: usize = 8;
/// Most bytes of items in a block.
pub(super) const BLOCK_BYTES_MAX: usize = 1 << 20;
/// A block is closed after so many records, which take less than [`BLOCK_BYTES_MAX`].
pub(super) const BLOCK_RECORDS_MAX: usize = 8192;
/// Longest text.
pub(super) const TEXT_BYTES_MAX: usize = 4096;
/// Most frames of a call stack.
pub(super) const FRAMES_MAX: usize = 64;
/// Most facts of a pool.
pub(super) const FACTS_MAX: usize = 256;

const GET: u8 = 1;
const REFUSED: u8 = 2;
const PUT: u8 = 3;
const COMPLETED: u8 = 4;
const LEAKED: u8 = 5;
const NEW: u8 = 6;
const GONE: u8 = 7;
const PIN: u8 = 8;
const UNPIN: u8 = 9;
const MOVE: u8 = 10;
const LIMIT: u8 = 11;
const CEILING: u8 = 12;
const CLEARED: u8 = 13;
const MISSING: u8 = 14;
const END: u8 = 15;
const SAMPLED: u8 = 16;
const WAITED: u8 = 17;
pub(super) const THREAD: u8 = 64;
pub(super) const POOL: u8 = 65;
pub(super) const POOL_FACTS: u8 = 66;
pub(super) const TAG: u8 = 67;
pub(super) const STACK: u8 = 68;

/// The head of a file.
pub(super) fn head() -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(&MAGIC);
    head[8..].copy_from_slice(&VERSION.to_le_bytes());
    head
}

/// A block in the making.
#[derive(Debug, Default)]
pub(super) struct BlockWriter {
    items: Vec<u8>,
    records: usize,
    time_ns: u64,
    thread: Option<u32>,
    pool: Option<u32>,
}

impl BlockWriter {
    /// Adds a record.
    pub(super) fn record(&mut self, time_ns: u64, thread: u32, pool: u32, event: &Event) {
        if self.thread.replace(thread) != Some(thread) {
            self.item(THREAD, &[thread.into()]);
        }
        if self.pool.replace(pool) != Some(pool) {
            self.item(POOL, &[pool.into()]);
        }
        let (kind, fields, count) = fields(event);
        self.items.push(kind);
        let since = time_ns.wrapping_sub(self.time_ns).cast_signed();
        self.number(zigzag(since));
        self.time_ns = time_ns;
        fields[..count].iter().for_each(|&field| self.number(field));
        self.records += 1;
    }

    /// Adds what is known of a pool.
    pub(super) fn pool(&mut self, pool: &PoolDescription) {
        self.item(POOL_FACTS, &[pool.number.into(), pool.facts.len().min(FACTS_MAX) as u64]);
        for (name, value) in pool.facts.iter().take(FACTS_MAX) {
            self.text(name);
            self.text(value);
        }
    }

    /// Adds the name of a tag.
    pub(super) fn tag(&mut self, number: u32, name: &str) {
        self.item(TAG, &[number.into()]);
        self.text(name);
    }

    /// Adds the frames of a call stack.
    pub(super) fn stack(&mut self, number: u32, frames: &[Frame]) {
        self.item(STACK, &[number.into(), frames.len().min(FRAMES_MAX) as u64]);
        for Frame { name, file, line } in frames.iter().take(FRAMES_MAX) {
            self.text(name);
            self.text(file);
            self.number((*line).into());
        }
    }

    /// Whether the block is to be closed.
    pub(super) fn is_full(&self) -> bool {
        self.records >= BLOCK_RECORDS_MAX || self.items.len() >= BLOCK_BYTES_MAX / 2
    }

    /// Records in the block.
    pub(super) fn records(&self) -> u64 {
        self.records as u64
    }

    pub(super) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The block with its frame; this one is empty again.
    pub(super) fn finish(&mut self) -> Vec<u8> {
        let items = std::mem::take(&mut self.items);
        *self = Self::default();
        let mut block = Vec::with_capacity(FRAME_BYTES + items.len());
        block.extend(u32::try_from(items.len()).unwrap_or(u32::MAX).to_le_bytes());
        block.extend(crc32fast::hash(&items).to_le_bytes());
        block.extend(items);
        block
    }

    fn item(&mut self, kind: u8, fields: &[u64]) {
        self.items.push(kind);
        fields.iter().for_each(|&field| self.number(field));
    }

    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.items.push(number.to_le_bytes()[0] | 0x80);
            number >>= 7;
        }
        self.items.push(number.to_le_bytes()[0]);
    }

    fn text(&mut self, text: &str) {
        let end = (0..=text.len().min(TEXT_BYTES_MAX)).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        let text = &text[..end];
        self.number(text.len() as u64);
        self.items.extend_from_slice(text.as_bytes());
    }
}

fn zigzag(number: i64) -> u64 {
    ((number << 1) ^ (number >> 63)).cast_unsigned()
}

/// Kind, fields and their number.
#[inline]
pub(super) fn fields(event: &Event) -> (u8, [u64; 5], usize) {
    let flag = u64::from;
    match *event {
        Event::Get { id, bytes, class_bytes, tag, took_ns } => (GET, [id, bytes, class_bytes, tag.into(), took_ns], 5),
        Event::Refused { bytes, class_bytes, tag, took_ns } => {
            (REFUSED, [bytes, class_bytes, tag.into(), took_ns, 0], 4)
        }
        Event::Sampled { id, stack } => (SAMPLED, [id, stack.into(), 0, 0, 0], 2),
        Event::Put { id, in_flight } => (PUT, [id, flag(in_flight), 0, 0, 0], 2),
        Event::Completed { id } => (COMPLETED, [id, 0, 0, 0, 0], 1),
        Event::Leaked { id } => (LEAKED, [id, 0, 0, 0, 0], 1),
        Event::New { id, address, class_bytes, from_source } => {
            (NEW, [id, address, class_bytes, flag(from_source), 0], 4)
        }
        Event::Gone { id } => (GONE, [id, 0, 0, 0, 0], 1),
        Event::Pin { address, bytes, took_ns, failed } => (PIN, [address, bytes, took_ns, flag(failed), 0], 4),
        Event::Unpin { address, bytes, took_ns, failed } => (UNPIN, [address, bytes, took_ns, flag(failed), 0], 4),
        Event::Move { from, to, bytes, took_ns } => (MOVE, [from, to, bytes, took_ns, 0], 4),
        Event::Limit { from, to } => (LIMIT, [from, to, 0, 0, 0], 2),
        Event::Ceiling { bytes } => (CEILING, [bytes, 0, 0, 0, 0], 1),
        Event::Cleared => (CLEARED, [0; 5], 0),
        Event::Waited => (WAITED, [0; 5], 0),
        Event::Missing { records } => (MISSING, [records, 0, 0, 0, 0], 1),
        Event::End => (END, [0; 5], 0),
    }
}

/// The event of that kind with the fields that `number` gives; else `invalid`.
pub(super) fn event_of<E: Copy>(kind: u8, mut number: impl FnMut() -> Result<u64, E>, invalid: E) -> Result<Event, E> {
    Ok(match kind {
        GET => Event::Get {
            id: number()?,
            bytes: number()?,
            class_bytes: number()?,
            tag: small(number()?, invalid)?,
            took_ns: number()?,
        },
        REFUSED => Event::Refused {
            bytes: number()?,
            class_bytes: number()?,
            tag: small(number()?, invalid)?,
            took_ns: number()?,
        },
        SAMPLED => Event::Sampled { id: number()?, stack: small(number()?, invalid)? },
        PUT => Event::Put { id: number()?, in_flight: flag(number()?, invalid)? },
        COMPLETED => Event::Completed { id: number()? },
        LEAKED => Event::Leaked { id: number()? },
        NEW => Event::New {
            id: number()?,
            address: number()?,
            class_bytes: number()?,
            from_source: flag(number()?, invalid)?,
        },
        GONE => Event::Gone { id: number()? },
        PIN => {
            Event::Pin { address: number()?, bytes: number()?, took_ns: number()?, failed: flag(number()?, invalid)? }
        }
        UNPIN => {
            Event::Unpin { address: number()?, bytes: number()?, took_ns: number()?, failed: flag(number()?, invalid)? }
        }
        MOVE => Event::Move { from: number()?, to: number()?, bytes: number()?, took_ns: number()? },
        LIMIT => Event::Limit { from: number()?, to: number()? },
        CEILING => Event::Ceiling { bytes: number()? },
        CLEARED => Event::Cleared,
        WAITED => Event::Waited,
        MISSING => Event::Missing { records: number()? },
        END => Event::End,
        _ => return Err(invalid),
    })
}

pub(super) fn small<E>(number: u64, invalid: E) -> Result<u32, E> {
    u32::try_from(number).map_err(|_| invalid)
}

fn flag<E>(number: u64, invalid: E) -> Result<bool, E> {
    match number {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(invalid),
    }
}
