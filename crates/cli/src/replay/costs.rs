//! What replays cost: driver calls priced, and a table with a column for each of the settings.

use pinpool::unstable::config::text::{ParseError, parse_duration};
use pinpool_replay::{CallCost, Replay, ReplayReport, TimedCall, TraceError, Workload};
use serde::Serialize;

use pinpool_cli::table::{columns, grouped};

/// What driver calls cost, and where that comes from.
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
    /// The given costs, costs fitted or scaled to the calls of the trace, or assumed ones.
    pub(crate) fn of(workload: &Workload, given: Option<CallCost>) -> Self {
        let (pins, unpins) = (workload.pins(), workload.unpins());
        let fitted = CallCost::fitted(pins, CallCost::ASSUMED_PIN).filter(|_| given.is_none());
        let (pin, unpin, origin) = match (given, fitted) {
            (Some(cost), _) => (cost, cost, "as given".to_owned()),
            (None, Some(pin)) => {
                let unpin = CallCost::fitted(unpins, CallCost::ASSUMED_UNPIN).unwrap_or(pin);
                (pin, unpin, format!("pins {}, releases {}", origin_of(pins), origin_of(unpins)))
            }
            (None, None) => {
                let origin = "assumed, since the trace has no pins (--pin-cost gives others)".to_owned();
                (CallCost::ASSUMED_PIN, CallCost::ASSUMED_UNPIN, origin)
            }
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
        (count, true) => format!(
            "scaled to the mean of the {count} of the trace, not fitted: one size does not separate a call from its bytes \
             (--pin-cost gives others)"
        ),
    }
}

/// `TIME,TIME`: of a call, and of each GiB.
pub(crate) fn pin_cost(text: &str) -> Result<CallCost, ParseError> {
    let (call, gib) = text
        .split_once(',')
        .ok_or_else(|| ParseError::new(text, "not two times, of a call and of a GiB (like 100us,400ms)"))?;
    let ns = |text: &str| parse_duration(text.trim()).map(|time| time.as_nanos() as f64);
    Ok(CallCost { call_ns: ns(call)?, byte_ns: ns(gib)? / f64::from(1 << 30) })
}

pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
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

/// The first of these rows decide between settings.
const ROWS: [(&str, Cell); 26] = [
    ("seconds lost", |c| format!("{:.6}", c.lost_seconds)),
    ("seconds waited", |c| format!("{:.6}", c.outcome.waited_us as f64 / 1e6)),
    ("ends after seconds", |c| format!("{:.1}", c.outcome.ended_us as f64 / 1e6)),
    ("pins", |c| grouped(c.outcome.page_locks)),
    ("waits", |c| grouped(c.outcome.waits)),
    ("not served in time", |c| grouped(c.outcome.fallbacks)),
    ("peak pinned MiB", |c| mib(c.outcome.peak_pinned_bytes)),
    ("mean pinned MiB", |c| mib(c.outcome.mean_pinned_bytes)),
    ("policy", |c| format!("{}, {}", c.outcome.preset, c.outcome.rounding)),
    ("limit MiB", |c| c.outcome.max_bytes.map_or("none".to_owned(), mib)),
    ("requests", |c| grouped(c.outcome.gets)),
    ("hits", |c| grouped(c.outcome.front_hits)),
    ("misses", |c| grouped(c.misses)),
    ("pins after half of the requests", |c| grouped(c.outcome.late_page_locks)),
    ("releases", |c| grouped(c.outcome.releases)),
    ("driver seconds", |c| format!("{:.6}", c.driver_seconds)),
    ("waste at peak MiB", |c| mib(c.waste_bytes)),
    ("pinned after 60 s MiB", |c| mib(c.outcome.pinned_after_60s_bytes)),
    ("slow requests", |c| grouped(c.outcome.slow_gets)),
    ("remapped by requests MiB", |c| mib(c.outcome.moved_bytes)),
    ("remapped ahead MiB", |c| mib(c.outcome.prepared_bytes)),
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
