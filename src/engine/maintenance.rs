//! What time brings: copies that do not end are told, idle buffers age, the limit comes down, idle memory goes back, sooner when memory is short.
//!
//! Done by whichever thread looks at the clock, one at a time; the others pass by.

use super::core::Core;
use super::idle::Idle;
use super::supply::Supply;
use crate::host::{Pressure, PressureGauge, PressureSource};
use crate::in_flight::PendingGroup;
use crate::sync::plain::Mutex;
use crate::sync::process::{AtomicU64, Ordering};

/// Between two looks: much shorter than any time in the rules, long against what a look costs.
const LOOK_EVERY_US: u64 = 10_000;
/// Between two looks at the kernel's signs, which cost system calls.
const GAUGE_EVERY_US: u64 = 1_000_000;
/// Under some pressure idle memory stays this much shorter.
const HURRY: u64 = 4;
/// Pinned memory is reported each time that it has doubled since the last report, from here on.
const FIRST_REPORT_BYTES: u64 = 64 << 20;

/// When the next look is due.
#[derive(Debug)]
pub(super) struct Upkeep {
    next_look_us: AtomicU64,
    watch: Mutex<Watch>,
}

#[derive(Debug)]
struct Watch {
    gauge: Option<PressureGauge>,
    next_gauge_us: u64,
    pressure: Pressure,
    reported_bytes: u64,
}

impl Upkeep {
    pub(super) fn new(from: &PressureSource) -> Self {
        let gauge = PressureGauge::open(from);
        let watch = Watch { gauge, next_gauge_us: 0, pressure: Pressure::Calm, reported_bytes: FIRST_REPORT_BYTES / 2 };
        Self { next_look_us: AtomicU64::new(0), watch: Mutex::new(watch) }
    }
}

impl Core {
    /// Reads the clock and does what is due. Returns the time. What is due may be a slow call: the watch is a sign that
    /// somebody is at it, on which nobody waits.
    pub(super) fn look_after(&self) -> u64 {
        let now_us = self.time.now_us();
        // Relaxed: who comes second finds the lock taken, or nothing due.
        if now_us >= self.upkeep.next_look_us.load(Ordering::Relaxed)
            && let Some(mut watch) = self.upkeep.watch.try_lock()
        {
            self.upkeep.next_look_us.store(now_us + LOOK_EVERY_US, Ordering::Relaxed);
            self.do_what_is_due(&mut watch, now_us);
        }
        now_us
    }

    fn do_what_is_due(&self, watch: &mut Watch, now_us: u64) {
        self.episode.over(&self.log, now_us);
        if self.in_flight.count() > 0 {
            let stuck = self.in_flight.newly_stuck(now_us, self.config.stuck_after);
            stuck
                .into_iter()
                .for_each(|PendingGroup { buffers, age, stream, bytes }| self.log.stuck(buffers, bytes, age, stream));
        }
        let Supply::Shared(ground) = &self.supply else { return };
        // A partition that has fallen silent ages with the others.
        let tenants = ground.tenants();
        tenants.iter().for_each(|tenant| tenant.grow_old(now_us));
        if let Some(pressure) = watch.look(now_us) {
            ground.hurry((pressure != Pressure::Calm).then_some(HURRY));
            self.log.pressure_changed(pressure == Pressure::Calm);
        }
        // Severe pressure takes what is idle at once, for as long as it lasts.
        if watch.pressure == Pressure::Severe {
            tenants.iter().for_each(|tenant| while tenant.give_back_oldest() {});
            self.trim(0);
        }
        self.log.release_error(ground.release_due(now_us));
        let holding = ground.holding();
        if !self.is_partition() && holding.held_bytes >= watch.reported_bytes.saturating_mul(2) {
            watch.reported_bytes = holding.held_bytes;
            self.log.grown(holding.held_bytes, holding.calls.allocs, holding.max_bytes);
        }
    }

    /// What has been idle for too long leaves the front, and the limit comes down.
    pub(super) fn age(&self, now_us: u64) {
        let Idle::Adaptive(idle) = &self.idle else { return };
        self.time.told(now_us);
        idle.aged(now_us).into_iter().for_each(|block| self.give_up(block));
        if let Some((from, to, pushed_out)) = idle.lower(now_us) {
            pushed_out.into_iter().for_each(|block| self.give_up(block));
            self.log.limit_lowered(from, to);
        }
    }
}

impl Watch {
    /// The pressure, if it changed.
    fn look(&mut self, now_us: u64) -> Option<Pressure> {
        let gauge = self.gauge.as_mut()?;
        if now_us < self.next_gauge_us {
            return None;
        }
        self.next_gauge_us = now_us + GAUGE_EVERY_US;
        let pressure = gauge.read();
        let changed = pressure != self.pressure;
        self.pressure = pressure;
        changed.then_some(pressure)
    }
}
