//! What a pool cannot see: the owners of all bytes, and the first failure.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::device::Device;
use crate::memory::Memory;

/// Shared by the simulated source, the simulated device and the world that uses them.
#[derive(Debug)]
pub(crate) struct Site {
    pub(crate) memory: Mutex<Memory>,
    pub(crate) device: Mutex<Device>,
    owners: Mutex<Owners>,
    broken: Mutex<Option<String>>,
}

/// The bytes that users hold or a device may use.
#[derive(Debug, Default)]
struct Owners {
    by_start: BTreeMap<usize, Owner>,
    /// Bytes with copies of unknown outcome, which may stay pinned at the end.
    excused: Vec<Range<usize>>,
    /// Bytes of buffers with completed copies that the pool may not know of yet.
    unswept: Vec<Range<usize>>,
}

#[derive(Debug)]
struct Owner {
    end: usize,
    /// Bytes that the pool may hold on each side of the buffer for its alignment.
    slack: usize,
    is_held: bool,
    copies: u32,
    was_copied: bool,
    /// It is unknown whether a device still uses the bytes.
    is_lost: bool,
}

impl Owner {
    /// The bytes that the pool may hold for the buffer at `start`.
    fn block(&self, start: usize) -> Range<usize> {
        start.saturating_sub(self.slack)..self.end + self.slack
    }
}

impl Site {
    pub(crate) fn new(memory: Memory, device: Device) -> Arc<Self> {
        Arc::new(Self {
            memory: memory.into(),
            device: device.into(),
            owners: Mutex::default(),
            broken: Mutex::default(),
        })
    }

    pub(crate) fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap()
    }

    pub(crate) fn device(&self) -> MutexGuard<'_, Device> {
        self.device.lock().unwrap()
    }

    fn owners(&self) -> MutexGuard<'_, Owners> {
        self.owners.lock().unwrap()
    }

    /// Reports a failure. Only the first one is kept.
    pub(crate) fn report(&self, what: String) {
        self.broken.lock().unwrap().get_or_insert(what);
    }

    pub(crate) fn take_report(&self) -> Option<String> {
        self.broken.lock().unwrap().take()
    }

    /// Gives a user these bytes, which must have no other user. The pool may hold `slack` more bytes on each side.
    pub(crate) fn hand_out(&self, bytes: Range<usize>, slack: usize) {
        if let Some(other) = self.used(&bytes) {
            self.report(format!("a request returned bytes that are in use ({other})"));
        }
        let owner = Owner { end: bytes.end, slack, is_held: true, copies: 0, was_copied: false, is_lost: false };
        self.owners().by_start.insert(bytes.start, owner);
    }

    /// Describes a user of any of `bytes`.
    pub(crate) fn used(&self, bytes: &Range<usize>) -> Option<String> {
        let owners = self.owners();
        let (_, owner) = owners.by_start.range(..bytes.end).next_back()?;
        (owner.end > bytes.start).then(|| match owner {
            Owner { is_lost: true, .. } => "the end of its copy is unknown".to_owned(),
            Owner { is_held: true, .. } => "a user holds them".to_owned(),
            Owner { copies, .. } => format!("{copies} copies use them"),
        })
    }

    /// Records that the user gave up the buffer at `start`. Copies may still use it.
    pub(crate) fn give_up(&self, start: usize) {
        self.change(start, |owner| owner.is_held = false);
    }

    /// Records that a copy uses the byte at `at`. Returns the start of its buffer.
    pub(crate) fn begin_copy(&self, at: usize) -> Option<usize> {
        let start = *self.owners().by_start.range(..=at).next_back()?.0;
        self.change(start, |owner| (owner.copies, owner.was_copied) = (owner.copies + 1, true));
        Some(start)
    }

    pub(crate) fn end_copy(&self, start: usize) {
        self.change(start, |owner| owner.copies -= 1);
    }

    /// Marks the buffer that contains `at` as lost: it stays unknown whether a device uses the buffer.
    pub(crate) fn lose(&self, at: usize) {
        let start = self.owners().by_start.range(..=at).next_back().map(|(start, _)| *start);
        start.into_iter().for_each(|start| self.change(start, |owner| owner.is_lost = true));
    }

    /// Allows the pool to leak the buffer at `start`, because a query failed.
    pub(crate) fn excuse(&self, start: usize) {
        let mut owners = self.owners();
        if let Some(block) = owners.by_start.get(&start).map(|owner| owner.block(start)) {
            owners.excused.push(block);
        }
    }

    /// Allows the pool to leak every buffer that only copies use.
    pub(crate) fn excuse_copied(&self) {
        let mut owners = self.owners();
        let Owners { by_start, excused, .. } = &mut *owners;
        let copied = by_start.iter().filter(|(_, owner)| !owner.is_held && owner.copies > 0);
        excused.extend(copied.map(|(start, owner)| owner.block(*start)));
    }

    /// The pool has closed, and no longer waits for running copies. It also abandons buffers with completed copies that were
    /// returned later, because it queries only the oldest copy of each stream.
    pub(crate) fn excuse_pool(&self) {
        let mut owners = self.owners();
        let Owners { by_start, excused, unswept } = &mut *owners;
        let abandoned = by_start.iter().filter(|(_, owner)| !owner.is_held);
        let ranges: Vec<_> = abandoned.map(|(start, owner)| owner.block(*start)).collect();
        if !ranges.is_empty() {
            excused.extend(ranges);
            excused.append(unswept);
        }
        unswept.clear();
    }

    /// Records that the pool knows of all completed copies.
    pub(crate) fn record_swept(&self) {
        self.owners().unswept.clear();
    }

    fn change(&self, start: usize, change: impl FnOnce(&mut Owner)) {
        let mut owners = self.owners();
        let Some(owner) = owners.by_start.get_mut(&start) else { return };
        change(owner);
        if !owner.is_held && owner.copies == 0 && !owner.is_lost {
            let (bytes, was_copied) = (owner.block(start), owner.was_copied);
            owners.by_start.remove(&start);
            if was_copied {
                owners.unswept.push(bytes);
            }
        }
    }

    /// Whether the end of a run may leave `bytes` pinned, because a device may use them or the pool may assume so.
    pub(crate) fn may_stay(&self, bytes: &Range<usize>) -> bool {
        let overlaps = |other: &Range<usize>| other.start < bytes.end && bytes.start < other.end;
        let owners = self.owners();
        owners.excused.iter().any(overlaps)
            || owners.by_start.iter().any(|(start, owner)| overlaps(&owner.block(*start)))
    }

    /// Whether a pool has abandoned or may leak buffers, so that there may be less room permanently.
    pub(crate) fn any_excused(&self) -> bool {
        !self.owners().excused.is_empty()
    }

    /// Whether there may be a copy that, as far as the pool knows, never ends.
    pub(crate) fn any_stuck(&self) -> bool {
        let owners = self.owners();
        !owners.excused.is_empty() || !owners.by_start.is_empty()
    }

    /// Ranges that a device may still use.
    pub(crate) fn in_use(&self) -> Vec<Range<usize>> {
        self.owners().by_start.iter().map(|(start, owner)| *start..owner.end).collect()
    }
}
