//! The search for the placement of a buffer that needs the fewest uncommitted granules.
//!
//! A *gap* is a maximal free extent, committed or not, in which uncommitted runs and the holes that touch them alternate. An
//! uncommitted granule is wholly free, so there are no more gaps with uncommitted granules than uncommitted runs, however many
//! buffers are live. The search walks only these gaps.
//!
//! ```text
//!   |live|  hole  | uncomm.  |  hole  |   uncommitted ... |
//!        ^        ^          ^     ^
//!        gap      candidates: where the gap starts, where a part starts on a granule, and, for each hole, the granule
//!                 from which the buffer just ends within the hole. No other start needs fewer granules or lies lower.
//! ```
//!
//! These candidates suffice. As a buffer moves up within a gap, the count of missing granules falls only when the start of the
//! buffer passes an uncommitted granule, and rises only when its end enters an uncommitted granule. So the lowest best start is
//! the start of the gap, the edge of a granule, or, inside an uncommitted run, the position from which the buffer ends in the
//! last granule of a hole. For any other start, a start one granule further up is better, or a lower start is as good. This holds
//! for granules of one size. A buffer across two sizes may have a slightly better start, by less than one of the larger granules.

use super::extent::{Extent, Grid};
use super::extent_set::ExtentSet;
use super::granules::GranuleSizes;

/// A possible placement of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GapFit {
    pub(super) buffer: Extent,
    /// Bytes of the granules that must be committed.
    pub(super) missing_bytes: u64,
    pub(super) gap_bytes: u64,
}

impl GapFit {
    /// Returns the key for the order of policy-R5: the fewest bytes of granules to commit, then the tightest gap, then the lowest
    /// address.
    fn rank(&self) -> (u64, u64, u64) {
        (self.missing_bytes, self.gap_bytes, self.buffer.start)
    }
}

/// A hole or an uncommitted run that is a part of a gap.
struct GapPart {
    extent: Extent,
    uncommitted: bool,
    /// Uncommitted bytes of the gap below this part.
    uncommitted_below: u64,
}

/// Returns the best placement (policy-R5) of `bytes` in the gaps that have uncommitted granules.
pub(super) fn best_fit(uncommitted: &ExtentSet, holes: &ExtentSet, bytes: u64, sizes: GranuleSizes) -> Option<GapFit> {
    let mut best: Option<GapFit> = None;
    let mut runs = uncommitted.iter().peekable();
    let mut parts = Vec::new();
    while let Some(first) = runs.next() {
        let grid = Grid::around(first, sizes);
        parts.clear();
        let hole = |extent, uncommitted_below| GapPart { extent, uncommitted: false, uncommitted_below };
        parts.extend(holes.ending_at(first.start).map(|extent| hole(extent, 0)));
        let mut uncommitted_bytes = 0;
        let mut run = Some(first);
        while let Some(extent) = run {
            parts.push(GapPart { extent, uncommitted: true, uncommitted_below: uncommitted_bytes });
            uncommitted_bytes += extent.bytes();
            let mut gap_end = extent.end;
            if let Some(next) = holes.starting_at(extent.end) {
                parts.push(hole(next, uncommitted_bytes));
                gap_end = next.end;
            }
            run = runs.next_if(|next| next.start == gap_end);
        }
        if let Some(fit) = best_in_gap(&parts, bytes, grid)
            && best.is_none_or(|best| fit.rank() < best.rank())
        {
            best = Some(fit);
        }
    }
    best
}

fn best_in_gap(parts: &[GapPart], bytes: u64, grid: Grid) -> Option<GapFit> {
    let (gap_start, gap_end) = (parts.first()?.extent.start, parts.last()?.extent.end);
    let gap_bytes = gap_end - gap_start;
    if gap_bytes < bytes {
        return None;
    }
    let part_at = |at: u64| &parts[parts.partition_point(|part| part.extent.start <= at).saturating_sub(1)];
    let starts = parts.iter().map(|part| part.extent.start);
    let ends = parts
        .iter()
        .filter(|part| !part.uncommitted && part.extent.end >= gap_start + bytes)
        .map(|part| grid.down(part.extent.end - bytes));
    starts
        .chain(ends)
        .filter(|&start| start >= gap_start && start + bytes <= gap_end)
        .map(|start| {
            // Uncommitted bytes of the gap below `edge`, which is the edge of a granule in `part` if `part` is uncommitted.
            let below = |part: &GapPart, edge: u64| {
                part.uncommitted_below + if part.uncommitted { edge - part.extent.start } else { 0 }
            };
            // The granules that contain the first and the last byte count in full if they are uncommitted.
            let end = start + bytes;
            let missing_bytes = below(part_at(end - 1), grid.up(end)) - below(part_at(start), grid.down(start));
            GapFit { buffer: Extent { start, end }, missing_bytes, gap_bytes }
        })
        .min_by_key(GapFit::rank)
}
