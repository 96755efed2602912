//! The items of a block, read back.

use super::event::{Event, PoolDescription};
use super::format::{FACTS_MAX, POOL, POOL_FACTS, TAG, TEXT_BYTES_MAX, THREAD, event_of, small};

/// What an item of a block says.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Item {
    Record { time_ns: u64, thread: u32, pool: u32, event: Event },
    Pool(PoolDescription),
    Tag { number: u32, name: String },
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
        let (number, count) = (self.small(invalid)?, self.number(invalid)?);
        let count = usize::try_from(count).ok().filter(|&count| count <= FACTS_MAX).ok_or(invalid)?;
        let facts = (0..count).map(|_| Ok((self.text(invalid)?, self.text(invalid)?)));
        Ok(PoolDescription { number, facts: facts.collect::<Result<_, _>>()? })
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
        let len = self.number(invalid)?;
        let len = usize::try_from(len).ok().filter(|&len| len <= TEXT_BYTES_MAX).ok_or(invalid)?;
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
        ) {
            let mut block = BlockWriter::default();
            let pool = PoolDescription { number: 7, facts };
            block.pool(&pool);
            block.tag(tag.0, &tag.1);
            records.iter().for_each(|(time_ns, thread, pool, event)| block.record(*time_ns, *thread, *pool, event));
            let bytes = block.finish();
            let items = &bytes[FRAME_BYTES..];
            prop_assert_eq!(&bytes[..4], &u32::try_from(items.len()).unwrap().to_le_bytes());
            prop_assert_eq!(&bytes[4..8], &crc32fast::hash(items).to_le_bytes());
            let mut reader = BlockReader::new(items);
            prop_assert_eq!(reader.next_item(), Ok(Some(Item::Pool(pool))));
            prop_assert_eq!(reader.next_item(), Ok(Some(Item::Tag { number: tag.0, name: tag.1 })));
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
