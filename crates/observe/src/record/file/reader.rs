//! Reads recordings.
//!
//! In a truncated file, the intact records of the last block are read as well, and the truncation is reported. Bytes and records
//! are bounded, so that a small compressed file cannot exhaust memory.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::io::{self, BufReader, ErrorKind, Read};

use super::format::{BLOCK_BYTES_MAX, FRAME_BYTES, HEAD_BYTES, Item, MAGIC, TimedSnapshot, VERSION};
use crate::record::{Event, PoolDescription, Record};
use pinpool_os::call_stack::Frame;

/// Maximum number of decompressed bytes that are read.
const BYTES_MAX: u64 = 4 << 30;
/// Maximum number of records, which take about a gigabyte of memory.
const RECORDS_MAX: usize = 16_000_000;
/// Maximum number of pools, tags and call stacks together.
const NAMES_MAX: usize = 65_536;

/// A whole recording, in order of time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Recording {
    /// The records, in order of time.
    pub records: Vec<Record>,
    pub pools: Vec<PoolDescription>,
    /// Holder tags by number; 0 is none.
    pub tags: BTreeMap<u32, String>,
    /// Call stacks of sampled requests by number, innermost frame first.
    pub stacks: BTreeMap<u32, Vec<Frame>>,
    /// Snapshots of the pools' states, in order of time.
    pub snapshots: Vec<TimedSnapshot>,
    /// Number of records that were lost while the recording was written.
    pub lost: u64,
    /// The reason that the recording is incomplete: it is truncated, damaged, or longer than the limits.
    pub warning: Option<String>,
}

impl Recording {
    pub fn is_begun_by(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC)
    }

    /// Reads a decompressed recording.
    ///
    /// # Errors
    ///
    /// If the input cannot be read, is not a recording, or has another version.
    pub fn read(bytes: impl Read) -> io::Result<Self> {
        let mut input = Input { bytes: BufReader::with_capacity(1 << 16, bytes), at: 0, error: None };
        let head = input.take(HEAD_BYTES);
        if !head.starts_with(&MAGIC) {
            let other = invalid("not a recording: it does not begin with `PINPOOLT`".to_owned());
            return Err(input.error.filter(|_| head.is_empty()).unwrap_or(other));
        }
        let mut recording = Self::default();
        let Some(found) = head[MAGIC.len()..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes)) else {
            recording.warning = Some("the file is truncated in its head: there are no records".to_owned());
            return Ok(recording);
        };
        if found != VERSION {
            return Err(invalid(format!(
                "the recording has format version {found}, and this build reads version {VERSION}: use the pinpool that recorded it"
            )));
        }
        let mut read = Ok(true);
        while read == Ok(true) {
            read = recording.read_block(&mut input);
        }
        let records = recording.records.len();
        recording.warning =
            read.err().map(|why| format!("the recording {why}: {records} records before that are read"));
        // Records of different threads may be out of order. The sort is stable, so that the records of one thread keep their
        // order.
        recording.records.sort_by_key(|record| record.time_ns);
        recording.snapshots.sort_by_key(|taken| taken.time_ns);
        let mut threads = HashMap::new();
        for record in &mut recording.records {
            let next = u32::try_from(threads.len()).unwrap_or(u32::MAX);
            record.thread = *threads.entry(record.thread).or_insert(next);
        }
        Ok(recording)
    }

    /// Adds the next block. Returns `false` at the end of the file. An error says why nothing after it is read.
    fn read_block<R: Read>(&mut self, input: &mut Input<R>) -> Result<bool, String> {
        let begin = input.at;
        if begin > BYTES_MAX {
            return Err(has_more_than(format_args!("{} GiB", BYTES_MAX >> 30)));
        }
        let frame = input.take(FRAME_BYTES);
        if frame.is_empty() && input.error.is_none() {
            return Ok(false);
        }
        let Ok([a, b, c, d, e, f, g, h]) = <[u8; FRAME_BYTES]>::try_from(frame) else {
            return Err(input.damage_text(begin, "truncated in the head of a block"));
        };
        let (len, sum) = (u32::from_le_bytes([a, b, c, d]) as usize, u32::from_le_bytes([e, f, g, h]));
        if len == 0 || len > BLOCK_BYTES_MAX {
            return Err(input.damage_text(begin, format_args!("damaged: a block of {len} bytes")));
        }
        let items = input.take(len);
        let whole = items.len() == len;
        if whole && crc32fast::hash(&items) != sum {
            return Err(input.damage_text(begin, "damaged: a block does not have its checksum"));
        }
        let mut rest = &items[..];
        while !rest.is_empty() {
            match postcard::take_from_bytes(rest) {
                Ok((item, after)) => {
                    rest = after;
                    self.add(item)?;
                }
                Err(_) if !whole => break,
                Err(error) => {
                    let at = items.len() - rest.len();
                    return Err(input.damage_text(begin, format_args!("damaged at byte {at} of a block: {error}")));
                }
            }
        }
        if whole { Ok(true) } else { Err(input.damage_text(begin, "truncated in a block")) }
    }

    /// Adds an item. An error names the limit that the recording exceeds.
    fn add(&mut self, item: Item) -> Result<(), String> {
        match item {
            Item::Record(record) => {
                if let Event::Missing { records } = record.event {
                    self.lost = self.lost.saturating_add(records);
                }
                self.records.push(record);
            }
            Item::Pool(pool) => self.pools.push(pool),
            Item::Tag(number, name) => _ = self.tags.insert(number, name),
            Item::Stack(number, frames) => _ = self.stacks.insert(number, frames),
            Item::Snapshot(taken) => self.snapshots.push(taken),
        }
        if self.records.len() + self.snapshots.len() > RECORDS_MAX {
            return Err(has_more_than(format_args!("{RECORDS_MAX} records")));
        }
        if self.pools.len() + self.tags.len() + self.stacks.len() > NAMES_MAX {
            return Err(has_more_than(format_args!("{NAMES_MAX} pools, tags and call stacks")));
        }
        Ok(())
    }

    /// Returns the end time of each pool that has ended, by the pool's number.
    pub fn ends(&self) -> HashMap<u32, u64> {
        let ends = self.records.iter().filter(|record| record.event == Event::End);
        ends.map(|record| (record.pool, record.time_ns)).collect()
    }

    /// Returns the pool with that number.
    pub fn pool(&self, number: u32) -> Option<&PoolDescription> {
        self.pools.iter().find(|pool| pool.number == number)
    }

    /// Returns the tag with that number; `None` for 0.
    pub fn tag(&self, number: u32) -> Option<&str> {
        self.tags.get(&number).map(String::as_str)
    }

    /// Returns the innermost frame of the call stack with that number; `None` for 0.
    pub fn place(&self, stack: u32) -> Option<String> {
        self.stacks.get(&stack)?.first().map(Frame::to_string)
    }
}

fn invalid(why: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

fn has_more_than(most: impl Display) -> String {
    format!("has more than {most}, the most that is read")
}

/// Input that is read up to the first error.
struct Input<R> {
    bytes: BufReader<R>,
    at: u64,
    error: Option<io::Error>,
}

impl<R: Read> Input<R> {
    /// Returns the next `len` bytes, or fewer at the end of the input or after an error.
    fn take(&mut self, len: usize) -> Vec<u8> {
        let mut taken = Vec::new();
        if self.error.is_none() {
            self.error = self.bytes.by_ref().take(len as u64).read_to_end(&mut taken).err();
        }
        self.at += taken.len() as u64;
        taken
    }

    fn damage_text(&self, at: u64, what: impl Display) -> String {
        let cause = self.error.as_ref().map_or_else(String::new, |error| format!(" ({error})"));
        format!("is {what} at byte {at}{cause}")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::format::{add_item, block, head};
    use super::*;

    #[test]
    fn a_recording_with_too_many_names_is_read_up_to_the_limit() {
        let mut items = Vec::new();
        let record = |event| Item::Record(Record { time_ns: 1, thread: 7, pool: 0, event });
        add_item(&mut items, &record(Event::Cleared));
        (1..=70_000).for_each(|number| add_item(&mut items, &Item::Tag(number, "a".to_owned())));
        add_item(&mut items, &record(Event::End));
        let recording = Recording::read([head(), block(&items)].concat().as_slice()).unwrap();
        assert_eq!(recording.records, [Record { time_ns: 1, thread: 0, pool: 0, event: Event::Cleared }]);
        assert!(recording.warning.unwrap().contains("more than 65536 pools, tags and call stacks"));
    }

    proptest! {
        #[test]
        fn random_bytes_in_a_valid_block_are_read_or_refused(items in proptest::collection::vec(any::<u8>(), 1..400)) {
            let recording = Recording::read([head(), block(&items)].concat().as_slice()).unwrap();
            prop_assert!(recording.records.len() <= items.len());
        }
    }
}
