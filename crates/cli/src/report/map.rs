//! The map of the memory: what each part of it was used for, at the end of equal spans of time.

use std::collections::{BTreeMap, HashMap};

use pinpool_replay::{Event, Record};

use super::figure::{MapState, Panel, Unit};

const COLUMNS: usize = 120;
const ROWS_MAX: u64 = 64;
/// Rows are whole multiples of this: the granule of most arenas.
const GRANULE_BYTES: u64 = 2 << 20;

/// The map, and what it shows in words; `None` if the records have no addresses of pinned memory.
pub(super) fn map(records: &[Record]) -> Option<(Panel, String)> {
    let places = Places::of(records)?;
    let end_ns = records.last()?.time_ns.max(1);
    let mut memory = Memory::default();
    let mut columns = Vec::with_capacity(COLUMNS);
    let mut rest = records;
    for column in 1..=COLUMNS as u64 {
        let until_ns = u128::from(end_ns) * u128::from(column) / COLUMNS as u128;
        let now = rest.partition_point(|record| u128::from(record.time_ns) <= until_ns);
        let (applied, later) = rest.split_at(now);
        applied.iter().for_each(|record| memory.apply(record));
        rest = later;
        columns.push(memory.states(&places));
    }
    let row = Unit::Bytes.text(places.row_bytes as f64);
    let description = format!(
        "Each of the {} rows is {row} of the {} that were pinned at any time, lowest address at the bottom; each column is the \
         state at the end of a {COLUMNS}th of the time. A row that has several states shows in flight before in use before idle \
         before free; what is blank is not pinned.",
        places.rows(),
        Unit::Bytes.text(places.len_bytes as f64)
    );
    let name = format!("place in the memory (rows of {row})");
    Some((Panel::Map { name, x_max: end_ns as f64 * 1e-9, columns }, description))
}

/// All addresses that were pinned at any time, without the gaps between them.
struct Places {
    /// First byte: last byte and the bytes of all places before.
    ranges: BTreeMap<u64, (u64, u64)>,
    len_bytes: u64,
    row_bytes: u64,
}

impl Places {
    fn of(records: &[Record]) -> Option<Self> {
        let pinned = records.iter().filter_map(|record| match record.event {
            Event::Pin { address, bytes, failed: false, .. } => Some((address, bytes)),
            Event::Move { to, bytes, .. } => Some((to, bytes)),
            _ => None,
        });
        let mut pinned: Vec<_> = pinned.filter(|&(address, bytes)| address > 0 && bytes > 0).collect();
        pinned.sort_unstable();
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for (address, bytes) in pinned {
            let end = address.saturating_add(bytes);
            match joined.last_mut() {
                Some(last) if address <= last.1 => last.1 = last.1.max(end),
                _ => joined.push((address, end)),
            }
        }
        let mut len_bytes = 0;
        let mut ranges = BTreeMap::new();
        for (begin, end) in joined {
            ranges.insert(begin, (end, len_bytes));
            len_bytes += end - begin;
        }
        let row_bytes = len_bytes.div_ceil(ROWS_MAX).checked_next_multiple_of(GRANULE_BYTES)?;
        (len_bytes > 0).then_some(Self { ranges, len_bytes, row_bytes })
    }

    fn rows(&self) -> usize {
        usize::try_from(self.len_bytes.div_ceil(self.row_bytes)).unwrap_or(0)
    }

    /// The rows of some bytes; `None` of bytes that were never pinned.
    fn rows_of(&self, address: u64, bytes: u64) -> Option<std::ops::RangeInclusive<usize>> {
        let (begin, &(end, before)) = self.ranges.range(..=address).next_back()?;
        if address >= end || bytes == 0 {
            return None;
        }
        let offset = address - begin + before;
        let last = offset + (bytes - 1).min(end - address - 1);
        let row = |offset: u64| usize::try_from(offset / self.row_bytes).ok();
        Some(row(offset)?..=row(last)?)
    }
}

/// What is pinned, and the buffers in it.
#[derive(Default)]
struct Memory {
    /// First byte and length.
    pinned: BTreeMap<u64, u64>,
    buffers: HashMap<(u32, u64), Buffer>,
}

struct Buffer {
    address: u64,
    bytes: u64,
    state: MapState,
}

impl Memory {
    fn apply(&mut self, record: &Record) {
        let pool = record.pool;
        match record.event {
            Event::Pin { address, bytes, failed: false, .. } => self.pin(address, bytes),
            Event::Unpin { address, bytes, failed: false, .. } => self.unpin(address, bytes),
            Event::Move { from, to, bytes, .. } => {
                self.unpin(from, bytes);
                self.pin(to, bytes);
            }
            Event::New { id, address, class_bytes, from_source: true } => {
                let buffer = Buffer { address, bytes: class_bytes, state: MapState::Idle };
                self.buffers.insert((pool, id), buffer);
            }
            Event::Get { id, .. } => self.set(pool, id, MapState::InUse),
            Event::Put { id, in_flight: true } => self.set(pool, id, MapState::InFlight),
            Event::Put { id, .. } | Event::Completed { id } => self.set(pool, id, MapState::Idle),
            Event::Gone { id } => {
                self.buffers.remove(&(pool, id));
            }
            _ => {}
        }
    }

    fn set(&mut self, pool: u32, id: u64, state: MapState) {
        if let Some(buffer) = self.buffers.get_mut(&(pool, id)) {
            buffer.state = state;
        }
    }

    fn pin(&mut self, address: u64, bytes: u64) {
        let known = self.pinned.entry(address).or_default();
        *known = bytes.max(*known);
    }

    /// Takes the bytes out of whatever holds them: memory is often unpinned in other pieces than it was pinned in.
    fn unpin(&mut self, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        let touched: Vec<_> = self
            .pinned
            .range(..end)
            .rev()
            .take_while(|&(&begin, &len)| begin.saturating_add(len) > address)
            .map(|(&begin, &len)| (begin, len))
            .collect();
        for (begin, len) in touched {
            let old_end = begin.saturating_add(len);
            self.pinned.remove(&begin);
            if begin < address {
                self.pinned.insert(begin, address - begin);
            }
            if old_end > end {
                self.pinned.insert(end, old_end - end);
            }
        }
    }

    fn states(&self, places: &Places) -> Vec<Option<MapState>> {
        let mut states = vec![None; places.rows()];
        let mut show = |address: u64, bytes: u64, state: MapState| {
            for row in places.rows_of(address, bytes).into_iter().flatten() {
                states[row] = states[row].max(Some(state));
            }
        };
        self.pinned.iter().for_each(|(&address, &bytes)| show(address, bytes, MapState::Free));
        self.buffers.values().for_each(|buffer| show(buffer.address, buffer.bytes, buffer.state));
        states
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn records(events: &[(u64, Event)]) -> Vec<Record> {
        events.iter().map(|&(time_ns, event)| Record { time_ns, thread: 0, pool: 0, event }).collect()
    }

    #[test]
    fn a_buffer_is_seen_in_each_of_its_states() {
        let get = |id| Event::Get { id, bytes: 5 * MIB, class_bytes: 6 * MIB, tag: 0, took_ns: 1 };
        let records = records(&[
            (0, Event::Pin { address: 64 * MIB, bytes: 8 * MIB, took_ns: 1, failed: false }),
            (0, Event::New { id: 1, address: 66 * MIB, class_bytes: 4 * MIB, from_source: true }),
            (0, get(1)),
            (300, Event::Put { id: 1, in_flight: true }),
            (600, Event::Completed { id: 1 }),
            (800, Event::Gone { id: 1 }),
            (900, Event::Unpin { address: 70 * MIB, bytes: 2 * MIB, took_ns: 1, failed: false }),
            (1200, Event::Cleared),
        ]);
        let Some((Panel::Map { columns, .. }, words)) = map(&records) else { panic!("no map") };
        let seen = |row: usize| {
            let mut states: Vec<_> = columns.iter().map(|column| column[row]).collect();
            states.dedup();
            states
        };
        let (free, idle) = (Some(MapState::Free), Some(MapState::Idle));
        assert_eq!(seen(0), [free]);
        assert_eq!(seen(1), [Some(MapState::InUse), Some(MapState::InFlight), idle, free]);
        assert_eq!(seen(3), [free, None]);
        assert_eq!(columns.len(), COLUMNS);
        assert!(words.starts_with("Each of the 4 rows is 2 MiB of the 8 MiB"), "{words}");
    }

    #[test]
    fn memory_far_apart_is_put_together_and_records_without_addresses_have_no_map() {
        let pin = |address| Event::Pin { address, bytes: 2 * MIB, took_ns: 1, failed: false };
        let map = map(&records(&[(0, pin(MIB)), (5, pin(1 << 40)), (9, pin(1 << 45))]));
        let Some((Panel::Map { columns, .. }, _)) = map else { panic!("no map") };
        assert_eq!(columns.last(), Some(&vec![Some(MapState::Free); 3]));
        assert!(super::map(&records(&[(0, Event::Cleared)])).is_none());
        assert!(super::map(&[]).is_none());
    }

    #[test]
    fn memory_is_unpinned_in_other_pieces_than_it_was_pinned_in() {
        let mut memory = Memory::default();
        memory.pin(0, 10);
        memory.pin(10, 10);
        memory.unpin(4, 8);
        assert_eq!(memory.pinned.into_iter().collect::<Vec<_>>(), [(0, 4), (12, 8)]);
    }
}
