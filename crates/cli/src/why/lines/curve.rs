//! A log's messages as a series of snapshots.

use pinpool_cli::table::grouped;

use super::history::{History, PoolHistory};
use super::message::LogContent;
use super::trend::{THRASHING, trend};
use crate::diagnosis::DiagnosisText;
use crate::series::{PoolSeries, Series};
use crate::served::mark_unpinned;

const NOTE: &str = "The counters in a log restart at each raise, and requests between the printed lines are not counted: the x axis is \
                    a lower bound, and unprinted raises are spread evenly. A log has no bytes and no times: PINPOOL_TRACE records them.";

/// Returns the diagnoses in the log. If there are none, derives them from TensorFlow's lines. Alarms come first.
pub(super) fn diagnoses(found: &LogContent, history: &History) -> Vec<DiagnosisText> {
    let of_trend = |pool: &PoolHistory| {
        let (name, advice) = trend(pool);
        let lines = format!("{name}: {}", advice.join("\n  ")).lines().map(str::to_owned).collect();
        let origin = pool.origin.as_ref().map_or_else(String::new, |origin| format!(" ({origin})"));
        let (pool, cause) = (format!("pool {}{origin}", pool.number), name.to_owned());
        DiagnosisText { pool, cause, is_alarm: name == THRASHING, lines, ..DiagnosisText::default() }
    };
    let mut all: Vec<_> = match found.diagnoses.is_empty() {
        true => history.pools.iter().map(of_trend).collect(),
        false => found.diagnoses.values().cloned().collect(),
    };
    mark_unpinned(&mut all, found.has_pinned, |one| &one.cause, |one| one.is_alarm = true);
    all.sort_by_key(|one| !one.is_alarm);
    all
}

/// Returns each pool over the requests that its messages show, or over its messages if they show no requests.
pub(super) fn series(found: LogContent, history: History) -> Series {
    let diagnoses = diagnoses(&found, &history);
    let pool = |PoolHistory { number, points, checks, .. }: PoolHistory| {
        let x = |at: usize, requests: u64| if checks.is_empty() { at as f64 + 1.0 } else { requests as f64 };
        let points = points.into_iter().enumerate().map(|(at, of)| (x(at, of.requests), of)).collect();
        PoolSeries { name: format!("pool {number}"), points, ..PoolSeries::default() }
    };
    let [messages, lines] = [found.messages.len() as u64, found.lines].map(grouped);
    let cut = (found.cut > 0).then(|| format!("{} truncated or damaged messages are not used.", grouped(found.cut)));
    Series {
        pools: history.pools.into_iter().map(pool).collect(),
        diagnoses,
        source: format!("{messages} messages in {lines} lines"),
        notes: [NOTE.to_owned()].into_iter().chain(cut).collect(),
        warning: found.stopped,
        ..Series::default()
    }
}
