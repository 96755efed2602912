//! Two other pools of pinned memory, as models: what their rules would pin for a workload.
//!
//! The rules are those of PyTorch (`CachingHostAllocator`, sources of 2025) and of RMM (`pool_memory_resource`, 2026) with their defaults. A
//! model has no ceiling, one stream and one thread, and a buffer is idle as soon as it is put. Neither pool gives memory back by itself.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::format::TraceOp;
use super::report::ReplayReport;
use super::workload::Workload;

/// Whose rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Each block has a power of two of bytes, and is used again for requests of the same power.
    Torch,
    /// One arena, in which the smallest free block that fits is divided and free neighbours merge. It begins empty, and grows by what it
    /// holds, or by the request if that is longer.
    Rmm,
}

/// RMM's alignment.
const ALIGN: u64 = 256;

impl Peer {
    /// The figures that such a pool has; those that only pinpool has are 0.
    pub fn play(self, workload: &Workload) -> ReplayReport {
        let mut pool = Model { peer: self, ..Model::default() };
        let (mut held, mut now_us, mut pinned_byte_us) = (HashMap::new(), 0, 0_u128);
        for (_, operation) in workload.lines() {
            match *operation {
                TraceOp::Get { id, bytes, .. } => _ = held.insert(id, pool.get(bytes as u64, workload)),
                TraceOp::Put { id } => pool.put(held.remove(&id).flatten()),
                TraceOp::Steps { count, bytes, step } => {
                    let sizes = std::iter::successors(Some(bytes), |last| Some(last.saturating_add(step)));
                    for (_, bytes) in (0..count).zip(sizes) {
                        let block = pool.get(bytes as u64, workload);
                        pool.put(block);
                    }
                }
                TraceOp::Advance { micros } => {
                    now_us += micros;
                    pinned_byte_us += u128::from(pool.pinned) * u128::from(micros);
                }
                TraceOp::Clear | TraceOp::Pool { .. } => {}
            }
        }
        let mean = pinned_byte_us.checked_div(now_us.into()).and_then(|mean| u64::try_from(mean).ok());
        ReplayReport {
            preset: if self == Self::Torch { "torch" } else { "rmm" },
            page_locks: pool.page_locks,
            late_page_locks: pool.late_page_locks,
            bytes_locked: pool.pinned,
            peak_pinned_bytes: pool.pinned,
            peak_requested_bytes: workload.peak_requested_bytes(),
            mean_pinned_bytes: mean.unwrap_or(pool.pinned),
            pinned_after_60s_bytes: pool.pinned,
            gets: pool.gets,
            front_hits: pool.gets - pool.page_locks,
            ..ReplayReport::default()
        }
    }
}

/// A block: its address and length.
type Block = (u64, u64);

struct Model {
    peer: Peer,
    /// Free blocks by length and address, and for RMM by address too.
    free: BTreeSet<(u64, u64)>,
    by_address: BTreeMap<u64, u64>,
    next_address: u64,
    pinned: u64,
    gets: u64,
    page_locks: u64,
    late_page_locks: u64,
}

impl Default for Model {
    fn default() -> Self {
        Self {
            peer: Peer::Torch,
            free: BTreeSet::new(),
            by_address: BTreeMap::new(),
            next_address: ALIGN,
            pinned: 0,
            gets: 0,
            page_locks: 0,
            late_page_locks: 0,
        }
    }
}

impl Model {
    fn get(&mut self, bytes: u64, workload: &Workload) -> Option<Block> {
        if bytes == 0 {
            return None;
        }
        self.gets += 1;
        let bytes = match self.peer {
            Peer::Torch => bytes.next_power_of_two(),
            Peer::Rmm => bytes.next_multiple_of(ALIGN),
        };
        let fits = self.free.range((bytes, 0)..).next().copied();
        let (found, at) = match (fits, self.peer) {
            (Some(block), Peer::Rmm) => block,
            (Some(block), Peer::Torch) if block.0 == bytes => block,
            (_, Peer::Torch) => self.pin(bytes, workload),
            (None, Peer::Rmm) => self.pin(bytes.max(self.pinned), workload),
        };
        self.take(found, at);
        if found > bytes {
            self.give(at + bytes, found - bytes);
        }
        Some((at, bytes))
    }

    fn put(&mut self, block: Option<Block>) {
        let Some((mut at, mut bytes)) = block else { return };
        if self.peer == Peer::Rmm {
            let before = self.by_address.range(..at).next_back().map(|(&before, &length)| (length, before));
            for (length, neighbour) in
                before.into_iter().chain(self.by_address.get(&(at + bytes)).map(|&l| (l, at + bytes)))
            {
                if neighbour + length == at || neighbour == at + bytes {
                    self.take(length, neighbour);
                    (at, bytes) = (at.min(neighbour), bytes + length);
                }
            }
        }
        self.give(at, bytes);
    }

    /// A block of new memory, which is no neighbour of what there is.
    fn pin(&mut self, bytes: u64, workload: &Workload) -> (u64, u64) {
        self.page_locks += 1;
        self.late_page_locks += u64::from(self.gets > workload.gets() / 2);
        self.pinned += bytes;
        let at = self.next_address;
        self.next_address += bytes + ALIGN;
        self.give(at, bytes);
        (bytes, at)
    }

    fn take(&mut self, bytes: u64, at: u64) {
        self.free.remove(&(bytes, at));
        self.by_address.remove(&at);
    }

    fn give(&mut self, at: u64, bytes: u64) {
        self.free.insert((bytes, at));
        self.by_address.insert(at, bytes);
    }
}
