//! Uncommitted granules as maximal runs, and the search for the placement that needs the fewest of them.
//!
//! A *gap* is a maximal free extent, committed or not: uncommitted runs and the holes that touch them, alternating. An
//! uncommitted granule is wholly free, so there are no more gaps with uncommitted granules than uncommitted runs, however
//! many buffers live; the search walks only those.
//!
//! ```text
//!   |live|  hole  | uncomm.  |  hole  |   uncommitted ... |
//!        ^        ^          ^     ^
//!        gap      candidates: where the gap starts, where a part starts on a granule, and, for each hole, the granule
//!                 from which the buffer just ends within the hole. No other start needs fewer granules or lies lower.
//! ```
//!
//! Why these suffice: as a buffer moves up within a gap, the count of missing granules falls only when its start passes an
//! uncommitted granule, and rises only when its end enters one. So the lowest best start is the start of the gap, a
//! granule edge, or inside an uncommitted run the position where the buffer ends in the last granule of a hole. From any
//! other start, one granule further up would be better, or a lower start as good. That holds among granules of one size; a
//! buffer across two sizes may find a start that needs less, by less than a granule of the larger.
//!
//! - **uncommitted-I1**: Runs are whole granules, and no two touch or overlap.

use std::collections::BTreeMap;

use super::extent::{Extent, Grid};
use super::granules::GranuleSizes;
use super::holes::Holes;

#[derive(Clone, Default, Debug)]
pub(super) struct Uncommitted {
    end_by_start: BTreeMap<u64, u64>,
}

/// A possible placement of a buffer, and the bytes that are missing there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct GapFit {
    pub(super) buffer: Extent,
    /// Bytes of the granules to commit.
    pub(super) missing_bytes: u64,
    pub(super) gap_bytes: u64,
}

impl GapFit {
    /// The order of policy-R5: the fewest bytes of granules to commit, then the tightest gap, then the lowest address.
    fn rank(&self) -> (u64, u64, u64) {
        (self.missing_bytes, self.gap_bytes, self.buffer.start)
    }
}

/// A hole or uncommitted run of a gap.
struct GapPart {
    extent: Extent,
    uncommitted: bool,
    /// Uncommitted bytes of the gap below this part.
    uncommitted_below: u64,
}

impl Uncommitted {
    /// Adds a run of granules and merges it with its neighbours.
    pub(super) fn add(&mut self, run: Extent) {
        let mut whole = run;
        if let Some((&start, &end)) = self.end_by_start.range(..run.start).next_back()
            && end == run.start
        {
            whole.start = start;
        }
        if let Some(end) = self.end_by_start.remove(&run.end) {
            whole.end = end;
        }
        self.end_by_start.insert(whole.start, whole.end);
    }

    /// The uncommitted runs within `extent`, by address.
    pub(super) fn within(&self, extent: Extent) -> Vec<Extent> {
        let first = self.end_by_start.range(..=extent.start).next_back().map_or(extent.start, |(&start, _)| start);
        self.end_by_start
            .range(first..extent.end)
            .filter_map(|(&start, &end)| Extent::between(start.max(extent.start), end.min(extent.end)))
            .collect()
    }

    /// The run that holds all of `part`.
    pub(super) fn around(&self, part: Extent) -> Option<Extent> {
        let around = self.end_by_start.range(..=part.start).next_back().map(|(&start, &end)| Extent { start, end });
        around.filter(|around| part.end <= around.end)
    }

    /// Removes `run`, which must be completely uncommitted.
    pub(super) fn cut(&mut self, run: Extent) {
        let Some(around) = self.around(run) else {
            debug_assert!(false, "{run:?} is not uncommitted");
            return;
        };
        self.end_by_start.remove(&around.start);
        for rest in around.without(run).into_iter().flatten() {
            self.end_by_start.insert(rest.start, rest.end);
        }
    }

    /// All runs, by address.
    pub(super) fn iter(&self) -> impl Iterator<Item = Extent> + '_ {
        self.end_by_start.iter().map(|(&start, &end)| Extent { start, end })
    }

    /// The best placement (policy-R5) of `bytes` in a gap with uncommitted granules.
    pub(super) fn best_fit(&self, holes: &Holes, bytes: u64, sizes: GranuleSizes) -> Option<GapFit> {
        let mut best: Option<GapFit> = None;
        let mut runs = self.iter().peekable();
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

    /// Checks uncommitted-I1.
    #[cfg(test)]
    pub(super) fn validate(&self, sizes: GranuleSizes) -> Result<(), String> {
        let mut last_end = None;
        for run in self.iter() {
            if run.start >= run.end || last_end.is_some_and(|end| end >= run.start) {
                return Err(format!("uncommitted-I1: {run:?} is empty or touches the run that ends at {last_end:?}"));
            }
            let grid = Grid::around(run, sizes);
            if grid.down(run.start) != run.start || grid.down(run.end) != run.end {
                return Err(format!("uncommitted-I1: {run:?} is not whole granules of {sizes:?}"));
            }
            last_end = Some(run.end);
        }
        Ok(())
    }
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
            // Uncommitted bytes below the granule edge that `edge` gives for `at`, if `part` is uncommitted.
            let below = |part: &GapPart, edge: u64| {
                part.uncommitted_below + if part.uncommitted { edge - part.extent.start } else { 0 }
            };
            // The granule of the last byte counts if it is uncommitted; the granule of the first byte is not below the start.
            let end = start + bytes;
            let missing_bytes = below(part_at(end - 1), grid.up(end)) - below(part_at(start), grid.down(start));
            GapFit { buffer: Extent { start, end }, missing_bytes, gap_bytes }
        })
        .min_by_key(GapFit::rank)
}
