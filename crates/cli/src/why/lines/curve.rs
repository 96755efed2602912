//! A log's messages as a series of snapshots.
//!
//! Counters restart at each raise, so the requests of the windows before are added. Requests of windows that the log does not show
//! are not counted: the position of a message is a lower bound.

use pinpool_cli::table::grouped;
use pinpool_observe::diagnosis::Snapshot;

use super::history::{Entry, History, PoolHistory};
use super::message::{LogContent, Message, Numbers};
use super::trend::Trend;
use crate::diagnosis::DiagnosisText;
use crate::series::{PoolSeries, Series};

const NOTE: &str = "The counters in a log restart at each raise, and requests between the printed lines are not counted: the x axis is \
                    a lower bound, and unprinted raises are spread evenly. A log has no bytes and no times: PINPOOL_TRACE records them.";

/// The diagnoses in the log; without any, those from TensorFlow's lines. Alarms come first.
pub(super) fn diagnoses(found: &LogContent, history: &History) -> Vec<DiagnosisText> {
    let of_trend = |(pool, number): (&PoolHistory, u64)| {
        let trend = Trend::of(pool);
        let cause = trend.name().to_owned();
        let advice = trend.advice(pool).join("\n  ");
        let lines = format!("{cause}: {advice}").lines().map(str::to_owned).collect();
        let origin = pool.origin.as_ref().map_or_else(String::new, |origin| format!(" ({origin})"));
        DiagnosisText {
            pool: format!("pool {number}{origin}"),
            cause,
            is_alarm: trend == Trend::Thrashing,
            lines,
            ..DiagnosisText::default()
        }
    };
    let mut all: Vec<_> = match found.diagnoses.is_empty() {
        true => history.pools.iter().zip(1..).map(of_trend).collect(),
        false => found.diagnoses.values().cloned().collect(),
    };
    all.sort_by_key(|one| !one.is_alarm);
    all
}

/// Each pool of `history`, over the requests that its messages show, or over its messages if they show none.
pub(super) fn series(found: LogContent, history: &History) -> Series {
    let mut curves: Vec<_> = history.pools.iter().map(|_| Curve::default()).collect();
    for (message, entry) in found.messages.iter().zip(&history.entries) {
        curves[entry.pool].add(message, entry);
    }
    let pool = |(at, curve): (usize, Curve)| {
        let x = |at: usize, of: &Snapshot| if curve.has_requests { of.requests as f64 } else { at as f64 + 1.0 };
        let points = curve.points.into_iter().enumerate().map(|(at, of)| (x(at, &of), of)).collect();
        PoolSeries { name: format!("pool {}", at + 1), points, ..PoolSeries::default() }
    };
    let [messages, lines] = [found.messages.len() as u64, found.lines].map(grouped);
    let cut = (found.cut > 0).then(|| format!("{} truncated or damaged messages are not used.", grouped(found.cut)));
    let diagnoses = diagnoses(&found, history);
    Series {
        pools: curves.into_iter().enumerate().map(pool).collect(),
        diagnoses,
        source: format!("{messages} messages in {lines} lines"),
        notes: [NOTE.to_owned()].into_iter().chain(cut).collect(),
        warning: found.stopped,
        ..Series::default()
    }
}

/// The messages of one pool.
#[derive(Default)]
struct Curve {
    /// One for each message: requests, misses, evictions and the limit so far.
    points: Vec<Snapshot>,
    /// Without `After` messages the requests are unknown.
    has_requests: bool,
    /// Requests and evictions of the windows before, and of this one.
    before: (u64, u64),
    window: (u64, u64),
}

impl Curve {
    fn add(&mut self, message: &Message, entry: &Entry) {
        let last = self.points.last().cloned().unwrap_or_default();
        let point = match message.numbers {
            Numbers::After(counters) => {
                // If the number of requests is lost, the number of returns is close to it.
                let window = (counters.get.unwrap_or(counters.put), counters.evicted);
                if entry.silent_raises > 0 || window.0 < self.window.0 || window.1 < self.window.1 {
                    self.close_window();
                }
                (self.window, self.has_requests) = (window, true);
                let requests = self.before.0.saturating_add(window.0);
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 0; saturates.
                let misses = (counters.unsatisfied_rate * requests as f64) as u64;
                let evicted = self.before.1.saturating_add(window.1);
                Snapshot { requests, misses, evicted, pool_size_limit: entry.limit.or(last.pool_size_limit), ..last }
            }
            Numbers::Raise { to, .. } => {
                self.close_window();
                Snapshot { requests: self.before.0, pool_size_limit: Some(to), ..last }
            }
        };
        self.points.push(point);
    }

    fn close_window(&mut self) {
        let (requests, evicted) = std::mem::take(&mut self.window);
        self.before = (self.before.0.saturating_add(requests), self.before.1.saturating_add(evicted));
    }
}
