//! The chunks out of which the driver carves small blocks: what a block of `cuMemHostAlloc` costs depends on them.
//!
//! Only counts: each block of the double has memory of its own.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::sync::lock;

/// Measured: one that is fresh costs as much as 1 MiB, blocks from a live one next to nothing.
const CHUNK_BYTES: u64 = 2 << 20;
/// The largest block that was measured to come out of a live chunk.
pub(crate) const CARVED_BYTES_MAX: u64 = 64 << 10;

/// Bytes in use of each live chunk, by number.
#[derive(Debug, Default)]
struct Chunks {
    made: u64,
    live: BTreeMap<u64, u64>,
}

static CHUNKS: Mutex<Chunks> = Mutex::new(Chunks { made: 0, live: BTreeMap::new() });

impl Chunks {
    /// The chunk of a block, and whether it is fresh.
    fn take(&mut self, bytes: u64) -> (u64, bool) {
        if let Some((&number, used)) = self.live.iter_mut().find(|(_, used)| **used + bytes <= CHUNK_BYTES) {
            *used += bytes;
            return (number, false);
        }
        self.made += 1;
        self.live.insert(self.made, bytes);
        (self.made, true)
    }

    /// Whether the chunk is empty now, and gone.
    fn give_back(&mut self, number: u64, bytes: u64) -> bool {
        let Some(used) = self.live.get_mut(&number) else { return false };
        *used -= bytes;
        let is_empty = *used == 0;
        if is_empty {
            self.live.remove(&number);
        }
        is_empty
    }
}

/// The chunk of a block and whether it is fresh; `None` for a block that is not carved.
pub(crate) fn take(bytes: u64) -> Option<(u64, bool)> {
    (bytes <= CARVED_BYTES_MAX).then(|| lock(&CHUNKS).take(bytes))
}

/// Whether the chunk of this block is empty now, and gone.
pub(crate) fn give_back(number: u64, bytes: u64) -> bool {
    lock(&CHUNKS).give_back(number, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_serves_blocks_until_it_is_full_and_goes_with_the_last() {
        let mut chunks = Chunks::default();
        assert_eq!(chunks.take(CARVED_BYTES_MAX), (1, true));
        for _ in 1..32 {
            assert_eq!(chunks.take(CARVED_BYTES_MAX), (1, false));
        }
        assert_eq!(chunks.take(4096), (2, true));
        for _ in 1..32 {
            assert!(!chunks.give_back(1, CARVED_BYTES_MAX));
        }
        assert_eq!(chunks.take(4096), (1, false), "the room of a block that was freed");
        assert!(chunks.give_back(2, 4096));
    }
}
