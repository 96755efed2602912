//! The diagnosis of a pool as text, from a process, a recording or a log line.

use std::cmp::Ordering;

use pinpool_observe::diagnosis::{Cause, PoolDiagnosis, diagnose_recording};
use pinpool_replay::Recording;
use serde_json::Value;

use crate::served::mark_unpinned;
use pinpool_cli::table::grouped;
use pinpool_cli::terminal::one_line;

/// The reason that a recording has no diagnosis.
pub(crate) const TOO_SHORT: &str = "too short for a diagnosis: at least 20 requests and 0.1 s are needed";

/// The diagnosis of one pool.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub(crate) struct DiagnosisText {
    pub(crate) pool: String,
    pub(crate) cause: String,
    pub(crate) is_alarm: bool,
    /// Seconds lost per second in the last window, summed over threads; `None` if unknown.
    #[serde(skip)]
    pub(crate) lost_share: Option<f64>,
    #[serde(skip)]
    pub(crate) held_bytes: u64,
    /// The cause and its finding, the seconds lost, the evidence and the advice.
    pub(crate) lines: Vec<String>,
}

impl DiagnosisText {
    /// Orders alarms first, then by time lost, then by bytes held, the largest first.
    pub(crate) fn worst_first(&self, other: &Self) -> Ordering {
        let lost = |of: &Self| of.lost_share.unwrap_or(-1.0);
        let by_alarm = other.is_alarm.cmp(&self.is_alarm);
        by_alarm.then(lost(other).total_cmp(&lost(self))).then(other.held_bytes.cmp(&self.held_bytes))
    }
}

/// Returns the diagnoses of a recording, alarms first.
pub(crate) fn recorded(recording: &Recording) -> Vec<PoolDiagnosis> {
    let mut all = diagnose_recording(recording);
    let has_pinned = recording.snapshots.iter().any(|taken| taken.snapshot.is_pinned);
    mark_unpinned(&mut all, has_pinned, |one| one.diagnosis.cause.name(), |one| one.diagnosis.is_alarm = true);
    all.sort_by_key(|one| !one.diagnosis.is_alarm);
    all
}

/// Returns the diagnosis in the statistics of a process.
pub(crate) fn from_process(name: String, pool: &Value) -> DiagnosisText {
    let why = &pool["why"];
    let text = |value: &Value| one_line(value.as_str().unwrap_or_default());
    let mut lines: Vec<_> = why["lines"].as_array().into_iter().flatten().map(text).collect();
    if lines.is_empty() {
        lines.push("the process runs another version of pinpool".to_owned());
    }
    let is_alarm = why["is_alarm"].as_bool().unwrap_or(false);
    let [lost, of] = ["lost_seconds", "window_seconds"].map(|name| why[name].as_f64());
    let lost_share = lost.zip(of).map(|(lost, of)| if of > 0.0 { lost / of } else { 0.0 });
    let held_bytes = pool["snapshot"]["held_bytes"].as_u64().unwrap_or(0);
    DiagnosisText { pool: name, cause: text(&why["cause"]), is_alarm, lost_share, held_bytes, lines }
}

/// Returns the diagnosis in a line of pinpool's log.
pub(crate) fn from_log_line(line: &[u8]) -> Option<DiagnosisText> {
    let text = String::from_utf8_lossy(line);
    // Loggers print the target `pinpool::diagnosis: ` before the message.
    let (before, diagnosis) = text.split_once("] diagnosis: ")?;
    let cause = Cause::ALL.iter().find(|cause| diagnosis.starts_with(cause.name()))?;
    let name = before.rsplit_once("pool[").map(|(_, name)| name);
    let pool = match name {
        Some(number) if number.bytes().all(|byte| byte.is_ascii_digit()) => format!("pool {number}"),
        name => name.unwrap_or("the pool").to_owned(),
    };
    let parts = diagnosis.trim_end().splitn(2, "; ").map(one_line).enumerate();
    let lines: Vec<_> = parts.map(|(at, part)| if at == 0 { part } else { format!("  to do: {part}") }).collect();
    // A diagnosis of sizes that cost nothing has no recommendation.
    let is_alarm = *cause >= Cause::Thrashing || (*cause == Cause::SizesNeverRecur && lines.len() > 1);
    Some(DiagnosisText { pool, cause: cause.name().to_owned(), is_alarm, lines, ..DiagnosisText::default() })
}

/// Returns the diagnosis of a recorded pool.
pub(crate) fn from_recording(of_pool: &PoolDiagnosis, has_ended: bool) -> DiagnosisText {
    let PoolDiagnosis { name, diagnosis, requests, delayed_requests, .. } = of_pool;
    let mut lines = diagnosis.lines();
    let (delayed, requests) = (grouped(*delayed_requests), grouped(*requests));
    let all = format!("  in the whole recording, {delayed} of {requests} requests waited or failed");
    let killed = "  the end of the pool is not recorded: its process was killed, or is still running".to_owned();
    lines.splice(1..1, (!has_ended).then_some(killed).into_iter().chain([all]));
    let (cause, is_alarm) = (diagnosis.cause.name().to_owned(), diagnosis.is_alarm);
    DiagnosisText { pool: name.clone(), cause, is_alarm, lines, ..DiagnosisText::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_behind_the_target_of_any_logger() {
        // Older versions wrote the lost time like this.
        for prefix in ["", "10:12:13 WARN pinpool::diagnosis: ", "[WARN  pinpool::diagnosis] "] {
            let line = format!(
                "{prefix}pool[loader] diagnosis: leak: tag a holds 2 buffers (14.1s of 10.0s lost); return them\n"
            );
            let read = from_log_line(line.as_bytes()).unwrap();
            assert_eq!((&*read.pool, &*read.cause, read.is_alarm), ("loader", "leak", true), "{line}");
            assert_eq!(read.lines[1], "  to do: return them");
        }
    }
}
