//! A trace under one or several choices of settings, a column each.

use pinpool::unstable::config::text::{ParseError, parse_duration};
use pinpool_replay::{CallCost, Replay, ReplayOutcome, TimedCall, Workload};
use serde::Serialize;

use pinpool_cli::table::{columns, grouped};

/// What calls of a back-end take, and where that is from.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Costs {
    pin: CallCost,
    unpin: CallCost,
    /// Times what a move takes on a device.
    move_scale: f64,
    /// What the shortest page-lock of the trace took, of what `pin` says, and the longest.
    pin_range: Option<(f64, f64)>,
    origin: String,
}

impl Costs {
    /// Returns the costs that were given; else those fitted to the calls of the trace, or scaled to those of one size; else
    /// assumed ones.
    pub(crate) fn of(workload: &Workload, given: Option<CallCost>) -> Self {
        let move_scale = workload.move_scale();
        if let Some(cost) = given {
            return Self { pin: cost, unpin: cost, move_scale, pin_range: None, origin: "as given".to_owned() };
        }
        let (pins, unpins) = (workload.pins(), workload.unpins());
        let pin = CallCost::fitted(pins, CallCost::ASSUMED_PIN);
        let pin_range = pin.and_then(|pin| {
            let of_fitted =
                |call: &TimedCall| call.took_ns as f64 / (pin.call_ns + pin.byte_ns * call.bytes as f64).max(1.0);
            let shares = || pins.iter().map(of_fitted);
            shares().reduce(f64::min).zip(shares().reduce(f64::max))
        });
        match (pin, CallCost::fitted(unpins, CallCost::ASSUMED_UNPIN)) {
            (Some(pin), Some(unpin)) => {
                let origin = match (CallCost::is_one_size(pins), CallCost::is_one_size(unpins)) {
                    (false, false) => {
                        format!("fitted to {} pins and {} releases of the trace", pins.len(), unpins.len())
                    }
                    _ => format!("pins {}, releases {}", origin_of(pins), origin_of(unpins)),
                };
                Self { pin, unpin, move_scale, pin_range, origin }
            }
            (Some(pin), None) => Self {
                pin,
                unpin: pin,
                move_scale,
                pin_range,
                origin: format!("pins {}, releases as pins", origin_of(pins)),
            },
            (None, _) => Self {
                pin: CallCost::ASSUMED_PIN,
                unpin: CallCost::ASSUMED_UNPIN,
                move_scale,
                pin_range,
                origin: "assumed, since the trace has no pins (--pin-cost gives others)".to_owned(),
            },
        }
    }

    /// Seconds of the calls and moves of a replay.
    pub(crate) fn driver_seconds(&self, outcome: &ReplayOutcome) -> f64 {
        outcome.driver_seconds(self.pin, self.unpin, self.move_scale)
    }

    /// The same with each pin call as short as the shortest of the trace, and as long as the longest.
    pub(crate) fn driver_seconds_range(&self, outcome: &ReplayOutcome) -> (f64, f64) {
        let (least, most) = self.pin_range.unwrap_or((1.0, 1.0));
        let seconds = |share: f64| {
            let pin = CallCost { call_ns: self.pin.call_ns * share, byte_ns: self.pin.byte_ns * share };
            outcome.driver_seconds(pin, self.unpin, self.move_scale)
        };
        (seconds(least), seconds(most))
    }

    fn line(&self) -> String {
        let cost = |cost: &CallCost| {
            let gib_ms = cost.byte_ns * f64::from(1 << 30) / 1e6;
            format!("{:.1} us a call and {gib_ms:.1} ms a GiB", cost.call_ns / 1e3)
        };
        let moves = match self.move_scale {
            1.0 => String::new(),
            scale => format!("; of a move: {scale:.1} times that of a device, as in the trace"),
        };
        format!("cost of a pin: {}; of a release: {}; {}{moves}", cost(&self.pin), cost(&self.unpin), self.origin)
    }
}

/// Where the cost of `calls` is from.
fn origin_of(calls: &[TimedCall]) -> String {
    let count = calls.len();
    if CallCost::is_one_size(calls) {
        return format!(
            "scaled to the mean of the {count} of the trace, not fitted: these have one size, which does not tell a call from \
             its bytes, so the ratio of the two is assumed (--pin-cost gives others)"
        );
    }
    format!("fitted to the {count} of the trace")
}

/// `TIME,TIME`: of a call, and of each GiB.
pub(crate) fn pin_cost(text: &str) -> Result<CallCost, ParseError> {
    let (call, gib) = text
        .split_once(',')
        .ok_or_else(|| ParseError::new(text, "not two times, of a call and of a GiB (like 100us,400ms)"))?;
    let ns = |text: &str| parse_duration(text.trim()).map(|time| time.as_nanos() as f64);
    Ok(CallCost { call_ns: ns(call)?, byte_ns: ns(gib)? / f64::from(1 << 30) })
}

fn in_mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

pub(crate) fn mib(bytes: u64) -> String {
    format!("{:.1}", in_mib(bytes))
}

/// One column.
#[derive(Debug, Serialize)]
pub(super) struct Column {
    pub(super) set: String,
    #[serde(flatten)]
    pub(super) outcome: ReplayOutcome,
    misses: u64,
    driver_calls: u64,
    driver_seconds: f64,
    lost_seconds: f64,
    waste_bytes: u64,
    mean_requested_bytes: Option<u64>,
}

/// Plays `workload` under each of `sets`, and under the ceiling in place of theirs if there is one.
pub(super) fn play(
    workload: &Workload,
    sets: &[(String, Replay)],
    ceiling_bytes: Option<u64>,
    costs: &Costs,
) -> Result<Vec<Column>, pinpool_replay::TraceError> {
    let column = |(set, replay): &(String, Replay)| {
        let replay = Replay { max_bytes: ceiling_bytes.or(replay.max_bytes), ..replay.clone() };
        let outcome = replay.play_with_lines(workload)?;
        let report = &outcome.report;
        let driver_seconds = costs.driver_seconds(&outcome);
        Ok(Column {
            set: set.clone(),
            misses: outcome.misses(),
            driver_calls: report.page_locks + outcome.releases,
            driver_seconds,
            lost_seconds: driver_seconds + outcome.waited_us as f64 / 1e6,
            waste_bytes: report.peak_pinned_bytes.saturating_sub(outcome.asked_at_peak_bytes),
            mean_requested_bytes: workload.mean_requested_bytes(),
            outcome,
        })
    };
    sets.iter().map(column).collect()
}

/// The columns as text.
pub(super) fn table(name: &str, workload: &Workload, columns_of: &[Column], costs: &Costs) -> String {
    let share =
        |part: u64, of: u64| if of == 0 { "-".to_owned() } else { format!("{:.3} %", 100.0 * part as f64 / of as f64) };
    type Cell = Box<dyn Fn(&Column) -> String>;
    let row = |cell: fn(&Column) -> String| -> Cell { Box::new(cell) };
    let rows: Vec<(&str, Cell)> = vec![
        ("rules", row(|c| format!("{}, {}", c.outcome.report.preset, c.outcome.report.rounding))),
        ("ceiling MiB", row(|c| c.outcome.report.max_bytes.map_or("none".to_owned(), mib))),
        ("gets", row(|c| grouped(c.outcome.report.gets))),
        ("hits", row(|c| grouped(c.outcome.report.front_hits))),
        ("misses", row(|c| grouped(c.misses))),
        ("miss rate", Box::new(move |c: &Column| share(c.misses, c.outcome.report.gets))),
        ("pins", row(|c| grouped(c.outcome.report.page_locks))),
        ("pins after half of the gets", row(|c| grouped(c.outcome.report.late_page_locks))),
        ("releases", row(|c| grouped(c.outcome.releases))),
        ("driver seconds", row(|c| format!("{:.6}", c.driver_seconds))),
        ("seconds lost", row(|c| format!("{:.6}", c.lost_seconds))),
        ("peak pinned MiB", row(|c| mib(c.outcome.report.peak_pinned_bytes))),
        ("waste at peak MiB", row(|c| mib(c.waste_bytes))),
        ("mean pinned MiB", row(|c| mib(c.outcome.report.mean_pinned_bytes))),
        ("pinned after 60 s MiB", row(|c| mib(c.outcome.report.pinned_after_60s_bytes))),
        ("slow gets", row(|c| grouped(c.outcome.report.slow_gets))),
        ("moved by gets MiB", row(|c| mib(c.outcome.report.moved_bytes))),
        ("moved ahead MiB", row(|c| mib(c.outcome.report.prepared_bytes))),
        ("waits", row(|c| grouped(c.outcome.report.waits))),
        ("not served in time", row(|c| grouped(c.outcome.report.fallbacks))),
        ("evictions", row(|c| grouped(c.outcome.report.evicted))),
        ("reclaimed", row(|c| grouped(c.outcome.report.reclaimed))),
        ("TensorFlow checks", row(|c| grouped(c.outcome.checks))),
        ("raises", row(|c| grouped(c.outcome.report.raises))),
        ("limit at the end", row(|c| grouped(c.outcome.report.pool_size_limit))),
    ];
    let mut lines =
        vec![std::iter::once(String::new()).chain(columns_of.iter().map(|c| c.set.clone())).collect::<Vec<_>>()];
    lines.extend(
        rows.iter()
            .map(|(head, cell)| std::iter::once((*head).to_owned()).chain(columns_of.iter().map(cell)).collect()),
    );
    let mean = workload
        .mean_requested_bytes()
        .map_or_else(String::new, |mean| format!(", {:.1} MiB on average", in_mib(mean)));
    let mut text = format!(
        "{name}: requested at most {:.1} MiB at once{mean}\n{}{}\n",
        in_mib(workload.peak_requested_bytes()),
        columns(&lines),
        costs.line()
    );
    columns_of.iter().for_each(|column| text += &last_lines(column));
    text
}

fn last_lines(column: &Column) -> String {
    match &column.outcome.last_lines {
        Some(last) => format!("{}: TensorFlow's last lines would be\n{last}\n", column.set),
        None => format!("{}: TensorFlow would print no line: fewer than 1000 evictions\n", column.set),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cost_that_is_scaled_and_not_fitted_is_told_so() {
        let call = |bytes| TimedCall { bytes, took_ns: 1_000_000 };
        assert_eq!(origin_of(&[call(1 << 20), call(2 << 20)]), "fitted to the 2 of the trace");
        let one = origin_of(&[call(1 << 20), call(1 << 20)]);
        assert!(one.contains("scaled to the mean of the 2 of the trace, not fitted"), "{one}");
    }
}
