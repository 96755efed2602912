//! Placements that must commit or remap granules first (policy-R5, policy-R7, policy-R8, policy-R11).
//!
//! Granules are committed in steps of one call each, since a call for one buffer takes as long as a call that also serves the
//! next few buffers. The part of a step that the buffer does not need becomes a hole. Steps are long until the pool holds as many
//! bytes as it held recently, since these bytes will be needed again. Above that, steps are short, since the rest of
//! the last step is still unused at the peak.

use super::extent::{Extent, Grid, first_bytes};
use super::gaps::{self, GapFit};
use super::plan::{Plan, Step};
use super::retain::IdleRun;
use super::separate_regions::region_bytes;
use super::shrink::joined;
use super::{Arena, GrowthMode, HoleSet, RangeKind};

/// Idle granules are remapped once free bytes exceed the bytes in use divided by this number (policy-R7).
const SPARE_SHARE: u64 = 10;

/// The length of a step, if granules must be committed (policy-R7): 1/`STEP_SHARE` of the committed bytes, up to the
/// bytes that were committed recently, and 1/`NEW_STEP_SHARE` above that. A step is at most `STEP_BYTES_MAX`, and at
/// most `STEP_FACTOR` times the bytes that must be committed, but never less than those bytes.
const STEP_SHARE: u64 = 4;
const NEW_STEP_SHARE: u64 = 28;
const STEP_BYTES_MAX: u64 = 64 << 20;
const STEP_FACTOR: u64 = 9;

/// The limits of a placement.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GrowthLimits {
    /// Bytes that may be committed beyond those claimed now; `u64::MAX` without a limit.
    pub(crate) commit_bytes: u64,
    /// Bytes claimed in excess of a limit that was lowered. Decommitted bytes make room only once they exceed these bytes.
    pub(crate) over_bytes: u64,
    /// Whether separate regions may be decommitted now: a decommit does not wait for the device, or nothing else makes room.
    pub(crate) may_decommit_regions: bool,
    /// The longest step or separate region to commit per call, unless one buffer, or several of `largest_miss_bytes`, need more.
    /// Steps are short while copies run if a commit delays copies; 0 once the source has refused more than one buffer.
    pub(crate) step_bytes: u64,
    /// The size of the largest recent miss, or 0. A region should have room for several such buffers.
    pub(crate) largest_miss_bytes: u64,
    /// The most bytes that were committed at a recent miss. Steps are long until that many bytes are committed again.
    pub(crate) known_bytes: u64,
}

#[cfg(test)]
impl GrowthLimits {
    /// No limits.
    pub(crate) const UNLIMITED: Self = Self {
        commit_bytes: u64::MAX,
        over_bytes: 0,
        may_decommit_regions: true,
        step_bytes: u64::MAX,
        largest_miss_bytes: 0,
        known_bytes: u64::MAX,
    };
}

impl Arena {
    /// Returns the bytes that [`Arena::plan_growth`] would commit or remap for a buffer: 0 if [`Arena::carve`] succeeds, `None` if no
    /// range has enough free address space.
    pub(crate) fn missing_bytes(&self, bytes: u64) -> Option<u64> {
        let own = self.own_set(bytes);
        if [own, HoleSet::Shared].iter().any(|&set| self.holes[set as usize].tightest(bytes).is_some()) {
            return Some(0);
        }
        match self.growth {
            GrowthMode::Granules(_) => self.best_fit(bytes).map(|fit| fit.missing_bytes),
            GrowthMode::Regions => Some(bytes),
        }
    }

    /// Places a buffer of `bytes` at an address with missing granules, and plans to commit or remap them. Call [`Arena::carve`]
    /// first. Once this call has returned a plan, the bytes belong to the buffer, and the granules are in transit.
    /// Returns `None` if the plan would exceed the limits even after remapping or decommitting every idle granule that
    /// the limits permit, or if no range has enough free address space.
    pub(crate) fn plan_growth(&mut self, bytes: u64, limits: GrowthLimits) -> Option<Plan> {
        let plan = match self.growth {
            GrowthMode::Granules(_) => self.grow_granules(bytes, limits),
            GrowthMode::Regions => self.grow_region(bytes, limits),
        }?;
        self.stats.live_bytes += bytes;
        Some(plan)
    }

    /// Returns the placement of a buffer with the fewest bytes of granules to commit (policy-R5).
    pub(super) fn best_fit(&self, bytes: u64) -> Option<GapFit> {
        gaps::best_fit(&self.uncommitted, &self.holes[HoleSet::Shared as usize], bytes, self.sizes)
    }

    fn grow_granules(&mut self, bytes: u64, limits: GrowthLimits) -> Option<Plan> {
        let fit = self.best_fit(bytes)?;
        // A granule that the buffer covers only in part must not be remapped or decommitted either.
        let hull = self.granules_around(fit.buffer);
        let mut targets = self.uncommitted.within(hull);
        let mut origins = self.source_granules(hull, &targets, limits)?;

        let buffer = fit.buffer;
        let mut idle_before = Vec::new();
        // The holes within the buffer are taken. Its other parts are uncommitted.
        for part in self.holes[HoleSet::Shared as usize].within(buffer) {
            self.take_free(part, |run| idle_before.push(run));
        }
        let surplus_bytes = self.surplus(&origins, limits);
        if let (Some(last), Some(group)) = (targets.last_mut(), origins.by_size.last_mut()) {
            last.end += surplus_bytes;
            if let Some(last) = group.targets.last_mut() {
                last.end += surplus_bytes;
            }
        }
        targets.iter().for_each(|&target| self.take_target(target));
        let (mut moves, mut commits) = (Vec::new(), Vec::new());
        for SizeGroup { targets, remapped_bytes } in origins.by_size {
            let of_size = targets.first().map(|&first| self.granules_of_same_size(first).0);
            let sources = of_size.map_or_else(Vec::new, |of_size| self.longest_idle_within(of_size, remapped_bytes));
            for &source in &sources {
                self.take_idle(source, &mut idle_before);
            }
            pair(&targets, sources, &mut moves, &mut commits);
        }
        // The granules of the buffer and the remapped granules are no longer idle, so they are not decommitted.
        let mut steps = Vec::new();
        for extent in self.longest_idle(origins.decommitted_bytes) {
            self.take_idle(extent, &mut idle_before);
            steps.push(Step::Decommit { extent });
        }
        steps.append(&mut moves);
        steps.extend(joined(commits).into_iter().map(|extent| Step::Commit { extent }));
        Some(Plan { surplus_bytes, ..self.plan(Some(buffer), steps, idle_before) })
    }

    /// Returns the bytes to commit in addition to the missing bytes of the buffer, after its last granule (policy-R7).
    fn surplus(&self, origins: &GranuleOrigins, limits: GrowthLimits) -> u64 {
        let to_commit = |group: &SizeGroup| {
            group.targets.iter().map(|target| target.bytes()).sum::<u64>().saturating_sub(group.remapped_bytes)
        };
        let commit: u64 = origins.by_size.iter().map(to_commit).sum();
        let group = origins.by_size.last().filter(|_| origins.decommitted_bytes == 0);
        let Some(group) = group.filter(|&group| to_commit(group) > 0) else { return 0 };
        let Some(&last) = group.targets.last() else { return 0 };
        let Some(run) = self.uncommitted.around(last) else { return 0 };
        let (of_size, granule_bytes) = self.granules_of_same_size(last);
        let held = self.stats.committed_bytes;
        let known = (held / STEP_SHARE).min(limits.known_bytes.saturating_sub(held));
        let step = known.max(held / NEW_STEP_SHARE).min(STEP_BYTES_MAX).min(commit.saturating_mul(STEP_FACTOR));
        let step = step.min(limits.step_bytes).min(limits.commit_bytes) / granule_bytes * granule_bytes;
        step.saturating_sub(commit).min(run.end.min(of_size.end) - last.end) / granule_bytes * granule_bytes
    }

    /// Moves uncommitted granules into transit, because a plan commits them or remaps others there.
    pub(super) fn take_target(&mut self, target: Extent) {
        if let Some(run) = self.uncommitted.around(target) {
            self.uncommitted.cut(run, target);
        } else {
            debug_assert!(false, "{target:?} is not uncommitted");
        }
        self.stats.transit_bytes += target.bytes();
    }

    /// Decides which of the `targets`, the uncommitted granules within `hull`, are filled by remapping idle granules,
    /// and how many idle bytes are decommitted so that the other targets can be committed. Returns `None` if the limits
    /// and the idle granules do not suffice.
    fn source_granules(&self, hull: Extent, targets: &[Extent], limits: GrowthLimits) -> Option<GranuleOrigins> {
        let grid = Grid::around(hull, self.sizes);
        let missing_bytes: u64 = targets.iter().map(|target| target.bytes()).sum();
        let mut idle_bytes = self.idle.bytes() - self.idle.within(hull).map(|run| run.extent.bytes()).sum::<u64>();
        // policy-R7: remap the free bytes in excess of a tenth of the bytes in use. policy-R8: at the limit, remap the bytes that
        // would exceed the limit.
        let hole_bytes = self.holes[HoleSet::Shared as usize].bytes();
        let mut spare_bytes = hole_bytes.saturating_sub(self.stats.live_bytes / SPARE_SHARE);
        let mut excess_bytes = missing_bytes.saturating_sub(limits.commit_bytes);
        let mut to_commit_bytes = missing_bytes;
        let (mut by_size, mut largest_granule_bytes) = (Vec::new(), 1);
        for zone in grid.zones(hull) {
            let of_size: Vec<_> = targets.iter().filter_map(|target| target.common(zone)).collect();
            let Some(&first) = of_size.first() else { continue };
            let (size, granule_bytes) = self.granules_of_same_size(first);
            let wanted_bytes =
                (spare_bytes / granule_bytes * granule_bytes).max(excess_bytes.next_multiple_of(granule_bytes));
            let wanted_bytes = wanted_bytes.min(of_size.iter().map(|target| target.bytes()).sum());
            // The search stops at the wanted bytes, because there may be thousands of idle runs.
            let outside = self.idle.within(size).flat_map(|run| run.extent.without(hull)).flatten();
            let remapped_bytes = first_bytes(outside, wanted_bytes, |_, end| end).into_iter().map(Extent::bytes).sum();
            spare_bytes = spare_bytes.saturating_sub(remapped_bytes);
            excess_bytes = excess_bytes.saturating_sub(remapped_bytes);
            idle_bytes -= remapped_bytes;
            to_commit_bytes -= remapped_bytes;
            by_size.push(SizeGroup { targets: of_size, remapped_bytes });
            largest_granule_bytes = granule_bytes;
        }
        // Idle granules of other sizes cannot be remapped to the targets. They are decommitted to make room, or because they are
        // spare.
        let release_bytes = if excess_bytes == 0 { 0 } else { excess_bytes.saturating_add(limits.over_bytes) };
        let spare_bytes = spare_bytes / largest_granule_bytes * largest_granule_bytes;
        let decommitted_bytes = release_bytes.max(spare_bytes.min(to_commit_bytes).min(idle_bytes));
        (decommitted_bytes <= idle_bytes).then_some(GranuleOrigins { by_size, decommitted_bytes })
    }

    /// Returns the extent of all granules in the range of `extent` with the same size as its first granule, and that size.
    pub(super) fn granules_of_same_size(&self, extent: Extent) -> (Extent, u64) {
        let zone = self.sizes.zone_at(extent.offset());
        let origin = Grid::around(extent, self.sizes).origin;
        let end = origin.saturating_add(zone.end);
        (Extent { start: origin + zone.start, end }, zone.granule_bytes)
    }

    /// Returns `buffer` widened to the edges of its first and last granule.
    pub(super) fn granules_around(&self, buffer: Extent) -> Extent {
        self.range_of(buffer)
            .map_or(buffer, |range| Extent { start: range.grid.down(buffer.start), end: range.grid.up(buffer.end) })
    }

    fn grow_region(&mut self, bytes: u64, limits: GrowthLimits) -> Option<Plan> {
        let own = self.own_set(bytes);
        let on = |set: HoleSet| self.ranges.values().filter(move |range| range.set == set);
        let in_set: u64 = on(own).map(|range| range.extent.bytes()).sum();
        let room = |freed: u64| limits.commit_bytes.saturating_add(freed.saturating_sub(limits.over_bytes));
        // The bytes of the regions that are replaced, and the bytes that the system holds for all released regions.
        let (mut released, mut replaced, mut freed) = (Vec::new(), 0, 0);
        if limits.may_decommit_regions {
            let is_own = |run: &IdleRun| self.range_of(run.extent).is_some_and(|range| range.set == own);
            for run in self.idle.longest_idle().filter(|run| is_own(run) && run.extent.bytes() < bytes) {
                replaced += run.extent.bytes();
                freed += self.held_bytes(run.extent.bytes());
                released.push(run);
            }
            // policy-R8: at the limit, decommit any idle regions, the longest idle first, until one buffer fits.
            for run in self.idle.longest_idle() {
                if room(freed) >= self.held_bytes(bytes) {
                    break;
                }
                if !released.contains(&run) {
                    freed += self.held_bytes(run.extent.bytes());
                    released.push(run);
                }
            }
        }
        let limit_bytes = room(freed);
        let at_once = (limits.step_bytes, limits.largest_miss_bytes);
        let size = |within| region_bytes(in_set - replaced, bytes, replaced, within, at_once);
        let region = self.held_within(limit_bytes, size)?;
        let id = self.add_range(RangeKind::Separate, region, own)?;
        let extent = Extent::new(id, 0, region);
        let (mut steps, mut idle_before) = (Vec::new(), Vec::new());
        for IdleRun { extent, .. } in released {
            self.take_idle(extent, &mut idle_before);
            steps.push(Step::Decommit { extent });
        }
        steps.push(Step::Commit { extent });
        self.stats.transit_bytes += region;
        Some(Plan { surplus_bytes: region - bytes, ..self.plan(Some(extent.first(bytes)), steps, idle_before) })
    }

    /// Returns the largest region that `size` computes for some number of bytes, such that the system holds at most `limit_bytes`
    /// for it.
    fn held_within(&self, limit_bytes: u64, size: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        let mut within = limit_bytes;
        loop {
            let region = size(within)?;
            let over = self.held_bytes(region).saturating_sub(limit_bytes);
            if over == 0 {
                return Some(region);
            }
            within = region.checked_sub(over)?;
        }
    }

    /// Creates a plan with these steps, for `buffer` if there is one. All decommits must come before the commits.
    pub(super) fn plan(&mut self, buffer: Option<Extent>, steps: Vec<Step>, idle_before: Vec<IdleRun>) -> Plan {
        let (mut commits, mut decommits) = (0, 0);
        for step in &steps {
            match *step {
                Step::Commit { extent } => commits += self.held_bytes(extent.bytes()),
                Step::Decommit { extent } => decommits += self.held_bytes(extent.bytes()),
                Step::Remap { .. } => {}
            }
        }
        let claim_bytes = commits.saturating_sub(decommits);
        self.planned_bytes += claim_bytes;
        Plan { buffer, steps, idle_before, claim_bytes, surplus_bytes: 0 }
    }
}

/// The origins of the granules that a buffer lacks.
struct GranuleOrigins {
    by_size: Vec<SizeGroup>,
    /// Bytes of idle granules that are decommitted instead of remapped: to make room, or because they are spare.
    decommitted_bytes: u64,
}

/// Targets with granules of one size.
struct SizeGroup {
    targets: Vec<Extent>,
    /// Bytes of idle granules that are remapped to these targets.
    remapped_bytes: u64,
}

/// Plans to remap `sources` to the lowest of `targets`, and to commit the remaining targets.
pub(super) fn pair(targets: &[Extent], sources: Vec<Extent>, remaps: &mut Vec<Step>, commits: &mut Vec<Extent>) {
    let mut sources = sources.into_iter();
    let mut source = sources.next();
    for &target in targets {
        let mut rest = Some(target);
        while let (Some(to), Some(from)) = (rest, source) {
            let bytes = to.bytes().min(from.bytes());
            remaps.push(Step::Remap { from: from.first(bytes), to: to.first(bytes) });
            rest = Extent::between(to.start + bytes, to.end);
            source = Extent::between(from.start + bytes, from.end).or_else(|| sources.next());
        }
        commits.extend(rest);
    }
}
