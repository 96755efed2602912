//! Bare granules: address space that is free and not locked, as maximal runs of whole granules; and the search for the
//! place where the fewest of them must be locked.
//!
//! A *gap* is a maximal free run whether locked or not: bare runs and the locked holes that touch them, in turn. Every
//! bare granule is wholly free, so there are no more gaps with something bare in them than bare runs, however many
//! buffers live: the search walks those alone.
//!
//! ```text
//!   |live|  hole  |   bare   |  hole  |   bare .......... |
//!        ^        ^          ^     ^
//!        gap      candidates: where the gap starts, where a piece starts on a granule, and, for each hole, the granule
//!                 from which the buffer just ends within the hole. No other start needs fewer granules or lies lower.
//! ```
//!
//! Why these suffice: moving a buffer up within a gap, the count of missing granules falls only when its start passes a
//! granule of a bare run, and rises only when its end enters one. So the lowest of the best starts is the start of the
//! gap or a granule edge; and if it lies inside a bare run, then its end lies in the last granule of a hole (else one
//! granule further would be better still, or no worse place would lie lower).

use std::collections::BTreeMap;

use super::extent::{Extent, Grid, align_up};
use super::holes::Holes;

#[derive(Clone, Default, Debug)]
pub(super) struct Bare {
    end_by_start: BTreeMap<u64, u64>,
}

/// A place for a buffer and what it still needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fit {
    pub(super) buffer: Extent,
    pub(super) missing_granules: u64,
    pub(super) gap_bytes: u64,
}

impl Fit {
    /// Rule 5: the fewest granules to lock, then the tightest gap, then the lowest address.
    fn rank(&self) -> (u64, u64, u64) {
        (self.missing_granules, self.gap_bytes, self.buffer.start)
    }
}

/// One piece of a gap, and how many bare granules lie before it in the gap.
struct Piece {
    span: Extent,
    bare: bool,
    bare_before: u64,
}

impl Bare {
    /// Adds a run of granules and merges it with what it touches.
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

    /// The bare runs within `span`, by address.
    pub(super) fn within(&self, span: Extent) -> Vec<Extent> {
        let first = self.end_by_start.range(..=span.start).next_back().map_or(span.start, |(&start, _)| start);
        self.end_by_start
            .range(first..span.end)
            .filter_map(|(&start, &end)| Extent::between(start.max(span.start), end.min(span.end)))
            .collect()
    }

    /// Takes out `run`, all of which must be bare.
    pub(super) fn cut(&mut self, run: Extent) {
        let around = self.end_by_start.range(..=run.start).next_back().map(|(&start, &end)| Extent { start, end });
        let Some(around) = around.filter(|around| run.end <= around.end) else {
            debug_assert!(false, "{run:?} is not bare");
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

    /// The best place (rule 5) in a gap that has something bare in it.
    pub(super) fn best_fit(&self, holes: &Holes, bytes: u64, align: u64, granule_bytes: u64) -> Option<Fit> {
        let mut best: Option<Fit> = None;
        let mut runs = self.iter().peekable();
        let mut pieces = Vec::new();
        while let Some(first) = runs.next() {
            let grid = Grid { origin: 0, granule_bytes };
            pieces.clear();
            pieces.extend(holes.ending_at(first.start).map(|span| Piece { span, bare: false, bare_before: 0 }));
            let mut bare_granules = 0;
            let mut run = Some(first);
            while let Some(span) = run {
                pieces.push(Piece { span, bare: true, bare_before: bare_granules });
                bare_granules += span.bytes() / granule_bytes;
                let mut gap_end = span.end;
                if let Some(hole) = holes.starting_at(span.end) {
                    pieces.push(Piece { span: hole, bare: false, bare_before: bare_granules });
                    gap_end = hole.end;
                }
                run = runs.next_if(|next| next.start == gap_end);
            }
            if let Some(fit) = best_in_gap(&pieces, bytes, align, grid)
                && best.is_none_or(|best| fit.rank() < best.rank())
            {
                best = Some(fit);
            }
        }
        best
    }

    /// No two runs touch or overlap, and all are whole granules.
    pub(super) fn validate(&self, granule_bytes: u64) -> Result<(), String> {
        let mut last_end = None;
        for run in self.iter() {
            if run.start >= run.end || last_end.is_some_and(|end| end >= run.start) {
                return Err(format!("bare {run:?} is empty or touches the run that ends at {last_end:?}"));
            }
            if run.offset() % granule_bytes != 0 || run.bytes() % granule_bytes != 0 {
                return Err(format!("bare {run:?} is not whole granules of {granule_bytes}"));
            }
            last_end = Some(run.end);
        }
        Ok(())
    }
}

fn best_in_gap(pieces: &[Piece], bytes: u64, align: u64, grid: Grid) -> Option<Fit> {
    let (gap_start, gap_end) = (pieces.first()?.span.start, pieces.last()?.span.end);
    let gap_bytes = gap_end - gap_start;
    if gap_bytes < bytes {
        return None;
    }
    let piece_at = |at: u64| &pieces[pieces.partition_point(|piece| piece.span.start <= at).saturating_sub(1)];
    let starts = pieces.iter().map(|piece| align_up(piece.span.start, align));
    let ends = pieces
        .iter()
        .filter(|piece| !piece.bare && piece.span.end >= gap_start + bytes)
        .map(|piece| align_up(grid.down(piece.span.end - bytes), align));
    starts
        .chain(ends)
        .filter(|&start| start >= gap_start && start + bytes <= gap_end)
        .map(|start| {
            let granules_below = |at: u64| {
                let piece = piece_at(at);
                piece.bare_before + if piece.bare { (at - piece.span.start) / grid.granule_bytes } else { 0 }
            };
            // The granule of the last byte counts when it is bare, that of the first is not yet below it.
            let last = start + bytes - 1;
            let missing_granules = granules_below(last) + u64::from(piece_at(last).bare) - granules_below(start);
            Fit { buffer: Extent { start, end: start + bytes }, missing_granules, gap_bytes }
        })
        .min_by_key(Fit::rank)
}
