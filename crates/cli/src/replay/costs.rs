//! What replays cost: driver calls priced, and a table with a column for each of the settings.

use pinpool_os::words::Size;
use pinpool_replay::{CallCost, Replay, ReplayReport, TimedCall, TraceError, Workload};
use serde::Serialize;

use pinpool_cli::table::{columns, grouped};

/// What driver calls cost, and the origin of these numbers.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Costs {
    pin: CallCost,
    unpin: CallCost,
    /// Factor on the time of a remap on a device.
    move_scale: f64,
    /// Factors on `pin` of the shortest and of the longest pin call of the trace.
    pin_range: Option<(f64, f64)>,
    origin: String,
}

impl Costs {
    /// Costs fitted or scaled to the calls of the trace, or assumed ones.
    pub(crate) fn of(workload: &Workload) -> Self {
        let (pins, unpins) = (workload.pins(), workload.unpins());
        let fitted = CallCost::fitted(pins, CallCost::ASSUMED_PIN);
        let (pin, unpin, origin) = match fitted {
            Some(pin) => {
                let unpin = CallCost::fitted(unpins, CallCost::ASSUMED_UNPIN).unwrap_or(pin);
                (pin, unpin, format!("pins {}, releases {}", origin_of(pins), origin_of(unpins)))
            }
            None => (CallCost::ASSUMED_PIN, CallCost::ASSUMED_UNPIN, "assumed: the trace has no pin calls".to_owned()),
        };
        let pin_range = fitted.and_then(|pin| {
            let share = |call: &TimedCall| call.took_ns as f64 / (pin.seconds(1, call.bytes) * 1e9).max(1.0);
            let shares = || pins.iter().map(share);
            shares().reduce(f64::min).zip(shares().reduce(f64::max))
        });
        Self { pin, unpin, move_scale: workload.move_scale(), pin_range, origin }
    }

    /// Seconds lost if each pin call were as short as the shortest of the trace, and as long as the longest.
    pub(crate) fn lost_range(&self, Column { outcome, .. }: &Column) -> (f64, f64) {
        let (least, most) = self.pin_range.unwrap_or((1.0, 1.0));
        let seconds = |share: f64| {
            let pin = CallCost { call_ns: self.pin.call_ns * share, byte_ns: self.pin.byte_ns * share };
            outcome.driver_seconds(pin, self.unpin, self.move_scale) + outcome.waited_us as f64 / 1e6
        };
        (seconds(least), seconds(most))
    }

    pub(super) fn line(&self) -> String {
        let cost = |cost: &CallCost| {
            let gib_ms = cost.byte_ns * f64::from(1 << 30) / 1e6;
            format!("{:.1} us a call and {gib_ms:.1} ms a GiB", cost.call_ns / 1e3)
        };
        let moves = match self.move_scale {
            1.0 => String::new(),
            scale => format!("; a remap takes {scale:.1} times as long as on an H200, as in the trace"),
        };
        format!("a pin costs {}; a release {}; {}{moves}\n", cost(&self.pin), cost(&self.unpin), self.origin)
    }
}

/// Where the cost of `calls` comes from.
fn origin_of(calls: &[TimedCall]) -> String {
    match (calls.len(), CallCost::is_one_size(calls)) {
        (0, _) => "as pins".to_owned(),
        (count, false) => format!("fitted to the {count} of the trace"),
        (count, true) => format!("scaled to the mean of the {count} of the trace, which have one size"),
    }
}

/// What a replay under some settings costs.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Column {
    pub(crate) set: String,
    #[serde(flatten)]
    pub(crate) outcome: ReplayReport,
    pub(crate) misses: u64,
    pub(crate) driver_calls: u64,
    pub(crate) driver_seconds: f64,
    pub(crate) lost_seconds: f64,
    pub(crate) waste_bytes: u64,
    pub(crate) mean_requested_bytes: Option<u64>,
}

impl Column {
    pub(crate) fn play(set: &str, workload: &Workload, replay: &Replay, costs: &Costs) -> Result<Self, TraceError> {
        let outcome = replay.play(workload)?;
        let driver_seconds = outcome.driver_seconds(costs.pin, costs.unpin, costs.move_scale);
        Ok(Self {
            set: set.to_owned(),
            misses: outcome.misses(),
            driver_calls: outcome.page_locks + outcome.releases,
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

/// The first of these rows decide between settings.
const ROWS: [(&str, Cell); 26] = [
    ("seconds lost", |c| format!("{:.6}", c.lost_seconds)),
    ("seconds waited", |c| format!("{:.6}", c.outcome.waited_us as f64 / 1e6)),
    ("ends after seconds", |c| format!("{:.1}", c.outcome.ended_us as f64 / 1e6)),
    ("pins", |c| grouped(c.outcome.page_locks)),
    ("waits", |c| grouped(c.outcome.waits)),
    ("not served in time", |c| grouped(c.outcome.fallbacks)),
    ("most held", |c| size(c.outcome.peak_pinned_bytes)),
    ("mean held", |c| size(c.outcome.mean_pinned_bytes)),
    ("policy", |c| format!("{}, {}", c.outcome.preset, c.outcome.rounding)),
    ("limit", |c| c.outcome.max_bytes.map_or("none".to_owned(), size)),
    ("requests", |c| grouped(c.outcome.gets)),
    ("hits", |c| grouped(c.outcome.front_hits)),
    ("misses", |c| grouped(c.misses)),
    ("pins after half of the requests", |c| grouped(c.outcome.late_page_locks)),
    ("releases", |c| grouped(c.outcome.releases)),
    ("driver seconds", |c| format!("{:.6}", c.driver_seconds)),
    ("waste at the peak", |c| size(c.waste_bytes)),
    ("held after 60 s", |c| size(c.outcome.pinned_after_60s_bytes)),
    ("slow requests", |c| grouped(c.outcome.slow_gets)),
    ("remapped by requests", |c| size(c.outcome.moved_bytes)),
    ("remapped ahead", |c| size(c.outcome.prepared_bytes)),
    ("evictions", |c| grouped(c.outcome.evicted)),
    ("reclaimed", |c| grouped(c.outcome.reclaimed)),
    ("TensorFlow checks", |c| grouped(c.outcome.checks)),
    ("raises", |c| grouped(c.outcome.raises)),
    ("buffer limit at the end", |c| grouped(c.outcome.pool_size_limit)),
];
pub(crate) const DECISIVE_ROWS: usize = 8;

/// The first `rows` rows, with a column for each of the settings.
pub(crate) fn table(of: &[&Column], rows: usize) -> String {
    let row = |head: &str, cell: Cell| std::iter::once(head.to_owned()).chain(of.iter().map(|c| cell(c))).collect();
    let heads = std::iter::once(&("", (|c| c.set.clone()) as Cell));
    columns(&heads.chain(&ROWS).take(rows.saturating_add(1)).map(|&(head, cell)| row(head, cell)).collect::<Vec<_>>())
}
