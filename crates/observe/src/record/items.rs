//! The items of a block, read back.

use super::event::{Event, PoolDescription};
use super::format::{FACTS_MAX, FRAMES_MAX, POOL, POOL_FACTS, STACK, TAG, TEXT_BYTES_MAX, THREAD, event_of, small};
use pinpool_os::call_stack::Frame;

/// What an item of a block says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Item {
    Record { time_ns: u64, thread: u32, pool: u32, event: Event },
    Pool(PoolDescription),
    Tag { number: u32, name: String },
    Stack { number: u32, frames: Vec<Frame> },
}

/// Why the items of a block end early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Broken {
    /// In the middle of an item.
    CutOff,
    /// An item of no known kind, or with a number that it cannot have.
    Invalid { at: usize },
}

/// The items of a block.
#[derive(Debug)]
pub(super) struct BlockReader<'a> {
    items: &'a [u8],
    at: usize,
    time_ns: u64,
    thread: u32,
    pool: u32,
}

impl<'a> BlockReader<'a> {
    pub(super) fn new(items: &'a [u8]) -> Self {
        Self { items, at: 0, time_ns: 0, thread: 0, pool: 0 }
    }

    /// The next item; `None` at the end of the block.
    pub(super) fn next_item(&mut self) -> Result<Option<Item>, Broken> {
        while let Some(&kind) = self.items.get(self.at) {
            let begin = self.at;
            self.at += 1;
            let invalid = Broken::Invalid { at: begin };
            match kind {
                THREAD => self.thread = self.small(invalid)?,
                POOL => self.pool = self.small(invalid)?,
                POOL_FACTS => return self.facts(invalid).map(Item::Pool).map(Some),
                TAG => {
                    let number = self.small(invalid)?;
                    return Ok(Some(Item::Tag { number, name: self.text(invalid)? }));
                }
                STACK => {
                    let (number, count) = (self.small(invalid)?, self.count(FRAMES_MAX, invalid)?);
                    let frames = (0..count).map(|_| self.frame(invalid)).collect::<Result<_, _>>()?;
                    return Ok(Some(Item::Stack { number, frames }));
                }
                _ => {
                    let since = unzigzag(self.number(invalid)?);
                    let event = event_of(kind, || self.number(invalid), invalid)?;
                    self.time_ns = self.time_ns.wrapping_add_signed(since);
                    let Self { time_ns, thread, pool, .. } = *self;
                    return Ok(Some(Item::Record { time_ns, thread, pool, event }));
                }
            }
        }
        Ok(None)
    }

    fn facts(&mut self, invalid: Broken) -> Result<PoolDescription, Broken> {
        let (number, count) = (self.small(invalid)?, self.count(FACTS_MAX, invalid)?);
        let facts = (0..count).map(|_| Ok((self.text(invalid)?, self.text(invalid)?)));
        Ok(PoolDescription { number, facts: facts.collect::<Result<_, _>>()? })
    }

    fn frame(&mut self, invalid: Broken) -> Result<Frame, Broken> {
        Ok(Frame { name: self.text(invalid)?, file: self.text(invalid)?, line: self.small(invalid)? })
    }

    /// A number of things, or of bytes, that is at most `most`.
    fn count(&mut self, most: usize, invalid: Broken) -> Result<usize, Broken> {
        usize::try_from(self.number(invalid)?).ok().filter(|&count| count <= most).ok_or(invalid)
    }

    fn number(&mut self, invalid: Broken) -> Result<u64, Broken> {
        let mut number = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = *self.items.get(self.at).ok_or(Broken::CutOff)?;
            self.at += 1;
            // The tenth byte has one bit left.
            if shift == 63 && byte > 1 {
                return Err(invalid);
            }
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(invalid)
    }

    fn small(&mut self, invalid: Broken) -> Result<u32, Broken> {
        small(self.number(invalid)?, invalid)
    }

    fn text(&mut self, invalid: Broken) -> Result<String, Broken> {
        let len = self.count(TEXT_BYTES_MAX, invalid)?;
        let bytes = self.items.get(self.at..self.at + len).ok_or(Broken::CutOff)?;
        self.at += len;
        std::str::from_utf8(bytes).map(ToOwned::to_owned).map_err(|_| invalid)
    }
}

fn unzigzag(number: u64) -> i64 {
    (number >> 1).cast_signed() ^ -(number & 1).cast_signed()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::format::{BLOCK_BYTES_MAX, BLOCK_RECORDS_MAX, BlockWriter, FRAME_BYTES};
    use super::*;

    fn event() -> impl Strategy<Value = Event> {
        let n = any::<u64>;
        prop_oneof![
            (n(), n(), n(), any::<u32>(), n()).prop_map(|(id, bytes, class_bytes, tag, took_ns)| Event::Get {
                id,
                bytes,
                class_bytes,
                tag,
                took_ns
            }),
            (n(), n(), any::<u32>(), n()).prop_map(|(bytes, class_bytes, tag, took_ns)| Event::Refused {
                bytes,
                class_bytes,
                tag,
                took_ns
            }),
            (n(), any::<u32>()).prop_map(|(id, stack)| Event::Sampled { id, stack }),
            (n(), any::<bool>()).prop_map(|(id, in_flight)| Event::Put { id, in_flight }),
            n().prop_map(|id| Event::Completed { id }),
            n().prop_map(|id| Event::Leaked { id }),
            (n(), n(), n(), any::<bool>()).prop_map(|(id, address, class_bytes, from_source)| Event::New {
                id,
                address,
                class_bytes,
                from_source
            }),
            n().prop_map(|id| Event::Gone { id }),
            (n(), n(), n(), any::<bool>()).prop_map(|(address, bytes, took_ns, failed)| Event::Pin {
                address,
                bytes,
                took_ns,
                failed
            }),
            (n(), n(), n(), any::<bool>()).prop_map(|(address, bytes, took_ns, failed)| Event::Unpin {
                address,
                bytes,
                took_ns,
                failed
            }),
            (n(), n(), n(), n()).prop_map(|(from, to, bytes, took_ns)| Event::Move { from, to, bytes, took_ns }),
            (n(), n()).prop_map(|(from, to)| Event::Limit { from, to }),
            n().prop_map(|bytes| Event::Ceiling { bytes }),
            Just(Event::Cleared),
            Just(Event::Waited),
            n().prop_map(|records| Event::Missing { records }),
            Just(Event::End),
        ]
    }

    proptest! {
        #[test]
        fn random_records_are_read_as_they_were_written(
            records in proptest::collection::vec((any::<u64>(), any::<u32>(), any::<u32>(), event()), 0..60),
            facts in proptest::collection::vec((".{0,20}", ".{0,20}"), 0..4),
            tag in (any::<u32>(), ".{0,40}"),
            frames in proptest::collection::vec((".{0,20}", ".{0,20}", any::<u32>()), 0..4),
        ) {
            let mut block = BlockWriter::default();
            let pool = PoolDescription { number: 7, facts };
            block.pool(&pool);
            block.tag(tag.0, &tag.1);
            let frames: Vec<_> = frames.into_iter().map(|(name, file, line)| Frame { name, file, line }).collect();
            block.stack(tag.0, &frames);
            records.iter().for_each(|(time_ns, thread, pool, event)| block.record(*time_ns, *thread, *pool, event));
            let bytes = block.finish();
            let items = &bytes[FRAME_BYTES..];
            prop_assert_eq!(&bytes[..4], &u32::try_from(items.len()).unwrap().to_le_bytes());
            prop_assert_eq!(&bytes[4..8], &crc32fast::hash(items).to_le_bytes());
            let mut reader = BlockReader::new(items);
            prop_assert_eq!(reader.next_item(), Ok(Some(Item::Pool(pool))));
            prop_assert_eq!(reader.next_item(), Ok(Some(Item::Tag { number: tag.0, name: tag.1 })));
            prop_assert_eq!(reader.next_item(), Ok(Some(Item::Stack { number: tag.0, frames })));
            for (time_ns, thread, pool, event) in records {
                prop_assert_eq!(reader.next_item(), Ok(Some(Item::Record { time_ns, thread, pool, event })));
            }
            prop_assert_eq!(reader.next_item(), Ok(None));
            // Cut off anywhere, it gives the items before that.
            let read = |bytes| {
                let mut reader = BlockReader::new(bytes);
                std::iter::from_fn(|| reader.next_item().ok().flatten()).collect::<Vec<_>>()
            };
            let whole = read(items);
            for end in 0..items.len().min(40) {
                let part = read(&items[..end]);
                prop_assert_eq!(&part[..], &whole[..part.len()]);
            }
        }
    }

    #[test]
    fn a_record_of_the_largest_numbers_leaves_room_in_a_block() {
        let mut block = BlockWriter::default();
        let most = u64::MAX;
        for n in 0..u32::try_from(BLOCK_RECORDS_MAX).unwrap() {
            let event = Event::Get { id: most, bytes: most, class_bytes: most, tag: u32::MAX, took_ns: most };
            block.record(if n % 2 == 0 { most / 2 } else { 0 }, u32::MAX - n, u32::MAX - n, &event);
        }
        assert!(block.is_full() && block.finish().len() <= BLOCK_BYTES_MAX);
    }
}
