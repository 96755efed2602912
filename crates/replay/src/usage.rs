//! Bytes by state over the records of a recording.

use std::collections::HashMap;

use pinpool_observe::record::{Event, Record};

/// What the pools of a recording hold, record by record.
#[derive(Debug, Clone, Default)]
pub struct Usage {
    /// Class bytes of buffers that users hold.
    pub in_use_bytes: u64,
    /// Requested bytes of these buffers.
    pub requested_bytes: u64,
    /// Bytes of returned buffers with copies in flight.
    pub in_flight_bytes: u64,
    /// Bytes of idle buffers.
    pub idle_bytes: u64,
    /// Pinned bytes.
    pub pinned_bytes: u64,
    buffers: HashMap<(u32, u64), Buffer>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Buffer {
    state: State,
    class_bytes: u64,
    requested_bytes: u64,
    tag: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Idle,
    InUse,
    InFlight,
    Gone,
}

impl Usage {
    /// Applies the next record.
    pub fn apply(&mut self, record: &Record) {
        let key = |id| (record.pool, id);
        match record.event {
            Event::New { id, class_bytes, .. } => {
                self.change(key(id), State::Idle, |buffer| buffer.class_bytes = class_bytes);
            }
            Event::Get { id, bytes, class_bytes, tag, .. } => self.change(key(id), State::InUse, |buffer| {
                (buffer.class_bytes, buffer.requested_bytes, buffer.tag) = (class_bytes, bytes, tag);
            }),
            Event::Put { id, in_flight: true } => self.change(key(id), State::InFlight, |_| ()),
            Event::Put { id, .. } | Event::Completed { id } => self.change(key(id), State::Idle, |_| ()),
            Event::Gone { id } | Event::Leaked { id } => {
                self.change(key(id), State::Gone, |_| ());
                self.buffers.remove(&key(id));
            }
            Event::Pin { bytes, failed: false, .. } => self.pinned_bytes = self.pinned_bytes.saturating_add(bytes),
            Event::Unpin { bytes, failed: false, .. } => self.pinned_bytes = self.pinned_bytes.saturating_sub(bytes),
            _ => {}
        }
    }

    /// Requested length and tag of a known buffer.
    pub fn buffer(&self, pool: u32, id: u64) -> Option<(u64, u32)> {
        self.buffers.get(&(pool, id)).map(|buffer| (buffer.requested_bytes, buffer.tag))
    }

    fn change(&mut self, key: (u32, u64), to: State, set: impl FnOnce(&mut Buffer)) {
        let known = self.buffers.insert(key, Buffer::default());
        let mut buffer = known.unwrap_or_default();
        if known.is_some() {
            self.count(&buffer, |sum, bytes| sum.saturating_sub(bytes));
        }
        buffer.state = to;
        set(&mut buffer);
        self.count(&buffer, u64::saturating_add);
        self.buffers.insert(key, buffer);
    }

    fn count(&mut self, buffer: &Buffer, sum: impl Fn(u64, u64) -> u64) {
        let bytes = buffer.class_bytes;
        match buffer.state {
            State::Idle => self.idle_bytes = sum(self.idle_bytes, bytes),
            State::InFlight => self.in_flight_bytes = sum(self.in_flight_bytes, bytes),
            State::InUse => {
                self.in_use_bytes = sum(self.in_use_bytes, bytes);
                self.requested_bytes = sum(self.requested_bytes, buffer.requested_bytes);
            }
            State::Gone => {}
        }
    }
}
