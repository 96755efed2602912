//! What time brings: idle buffers age, the limit comes down, idle memory goes back, sooner when memory is short.
//!
//! Done by whichever thread looks at the clock, one at a time; the others pass by.

use std::path::Path;

use super::core::Core;
use super::idle::Idle;
use super::supply::Supply;
use crate::config::PressureFrom;
use crate::diag;
use crate::machine::{Gauge, Pressure};
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
    gauge: Option<Gauge>,
    next_gauge_us: u64,
    pressure: Pressure,
    reported_bytes: u64,
}

impl Upkeep {
    pub(super) fn new(from: &PressureFrom) -> Self {
        let gauge = match from {
            PressureFrom::Kernel => Gauge::open(Path::new("/")),
            PressureFrom::File(path) => Some(Gauge::of_file(path)),
            PressureFrom::Off => None,
        };
        let watch = Watch { gauge, next_gauge_us: 0, pressure: Pressure::Calm, reported_bytes: FIRST_REPORT_BYTES / 2 };
        Self { next_look_us: AtomicU64::new(0), watch: Mutex::new(watch) }
    }
}

impl Core {
    /// Reads the clock and does what is due. Returns the time.
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
        let (Idle::Threads(idle), Supply::Ground(ground)) = (&self.idle, &self.supply) else { return };
        idle.aged(now_us).into_iter().for_each(|block| self.give_up(block));
        if let Some((from, to, pushed_out)) = idle.lower(now_us) {
            pushed_out.into_iter().for_each(|block| self.give_up(block));
            diag::lowering(from, to);
        }
        if let Some(pressure) = watch.look(now_us) {
            ground.hurry((pressure != Pressure::Calm).then_some(HURRY));
            diag::pressure(pressure == Pressure::Calm);
        }
        // Severe pressure takes what is idle at once, for as long as it lasts.
        if watch.pressure == Pressure::Severe {
            self.trim(0);
        }
        if let Err(error) = ground.release_due(now_us) {
            diag::release_failed(0, &error);
        }
        let holding = ground.holding();
        if holding.held_bytes >= watch.reported_bytes.saturating_mul(2) {
            watch.reported_bytes = holding.held_bytes;
            diag::grown(holding.held_bytes, holding.calls.allocs, holding.max_bytes);
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
