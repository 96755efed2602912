//! The cost of replays: the estimated driver time, and a table with one column for each group of settings.

use pinpool_observe::diagnosis::words::counted;
use pinpool_os::format::Size;
use pinpool_replay::{CallCost, Replay, ReplayReport, TimedCall, TraceError, Workload};
use serde::Serialize;

use pinpool_cli::table::{columns, grouped};

/// The estimated cost of driver calls, and its origin.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Costs {
    pin: CallCost,
    unpin: CallCost,
    /// Factor for the time of a remap on a device.
    move_scale: f64,
    /// Factor that scales `pin` to the shortest pin call of the trace.
    least_pin: f64,
    origin: String,
}

impl Costs {
    /// Returns costs that are fitted or scaled to the calls of the trace, or assumed costs if the trace has no calls.
    pub(super) fn of(workload: &Workload) -> Self {
        let (pins, unpins) = (&*workload.pins, &*workload.unpins);
        let (pin, unpin, origin) = match CallCost::fitted(pins, CallCost::ASSUMED_PIN) {
            Some(pin) => {
                let unpin = CallCost::fitted(unpins, CallCost::ASSUMED_UNPIN).unwrap_or(pin);
                (pin, unpin, format!("pins {}, releases {}", origin_of(pins), origin_of(unpins)))
            }
            None => (CallCost::ASSUMED_PIN, CallCost::ASSUMED_UNPIN, "assumed: the trace has no pin calls".to_owned()),
        };
        let share = |call: &TimedCall| call.took_ns as f64 / (pin.seconds(1, call.bytes) * 1e9).max(1.0);
        let least_pin = pins.iter().map(share).reduce(f64::min).unwrap_or(1.0);
        Self { pin, unpin, move_scale: workload.move_scale(), least_pin, origin }
    }

    /// Returns the seconds lost if each pin call were as short as the shortest pin call of the trace.
    pub(super) fn least_lost(&self, Column { outcome, .. }: &Column) -> f64 {
        let pin = CallCost { call_ns: self.pin.call_ns * self.least_pin, byte_ns: self.pin.byte_ns * self.least_pin };
        outcome.driver_seconds(pin, self.unpin, self.move_scale) + outcome.waited_us as f64 / 1e6
    }

    pub(super) fn line(&self) -> String {
        format!("costs of pins and releases: {}\n", self.origin)
    }
}

/// Describes the origin of the cost of `calls`.
fn origin_of(calls: &[TimedCall]) -> String {
    let count = counted(calls.len() as u64, "call");
    match CallCost::is_one_size(calls) {
        _ if calls.is_empty() => "as pins".to_owned(),
        false => format!("fitted to {count} in the trace"),
        true => format!("scaled to the mean of {count} of one size in the trace"),
    }
}

/// The costs of a replay under some settings.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Column {
    pub(super) set: String,
    #[serde(flatten)]
    pub(super) outcome: ReplayReport,
    pub(super) misses: u64,
    pub(super) driver_calls: u64,
    pub(super) driver_seconds: f64,
    pub(super) lost_seconds: f64,
    pub(super) waste_bytes: u64,
    pub(super) mean_requested_bytes: Option<u64>,
}

impl Column {
    pub(super) fn play(set: &str, workload: &Workload, replay: &Replay, costs: &Costs) -> Result<Self, TraceError> {
        let outcome = replay.play(workload)?;
        let driver_seconds = outcome.driver_seconds(costs.pin, costs.unpin, costs.move_scale);
        Ok(Self {
            set: set.to_owned(),
            misses: outcome.gets.saturating_sub(outcome.hits),
            driver_calls: outcome.pin_calls + outcome.releases,
            driver_seconds,
            lost_seconds: driver_seconds + outcome.waited_us as f64 / 1e6,
            waste_bytes: outcome.peak_pinned_bytes.saturating_sub(outcome.asked_at_peak_bytes),
            mean_requested_bytes: workload.mean_requested_bytes(),
            outcome,
        })
    }
}

type Cell = fn(&Column) -> String;

fn size(bytes: u64) -> String {
    Size(bytes).to_string()
}

const ROWS: [(&str, Cell); 12] = [
    ("seconds lost", |c| format!("{:.6}", c.lost_seconds)),
    ("seconds waited", |c| format!("{:.6}", c.outcome.waited_us as f64 / 1e6)),
    ("driver seconds", |c| format!("{:.6}", c.driver_seconds)),
    ("ends after seconds", |c| format!("{:.1}", c.outcome.ended_us as f64 / 1e6)),
    ("requests", |c| grouped(c.outcome.gets)),
    ("misses", |c| grouped(c.misses)),
    ("pins", |c| grouped(c.outcome.pin_calls)),
    ("waits", |c| grouped(c.outcome.waits)),
    ("not served in time", |c| grouped(c.outcome.timeouts)),
    ("most held", |c| size(c.outcome.peak_pinned_bytes)),
    ("mean held", |c| size(c.outcome.mean_pinned_bytes)),
    ("limit", |c| c.outcome.max_bytes.map_or("none".to_owned(), size)),
];

/// Returns a table with one column for each of the settings.
pub(super) fn table(of: &[&Column]) -> String {
    let row = |head: &str, cell: Cell| std::iter::once(head.to_owned()).chain(of.iter().map(|c| cell(c))).collect();
    let heads = std::iter::once(&("", (|c| c.set.clone()) as Cell));
    columns(&heads.chain(&ROWS).map(|&(head, cell)| row(head, cell)).collect::<Vec<_>>())
}
