//! The diagnosis of a pool as text: of a process, a recording, a replay or a line of a log.

use pinpool_observe::judge::{Cause, Judgement, PoolJudgement};
use serde_json::Value;

use crate::served::name_of;
use pinpool_cli::table::grouped;
use pinpool_cli::terminal::one_line;

/// The diagnosis of one pool.
#[derive(Debug, Clone, serde::Serialize)]
pub(crate) struct Said {
    pub(crate) pool: String,
    pub(crate) cause: String,
    pub(crate) is_alarm: bool,
    /// The cause and its finding, the seconds lost, the evidence and the advice.
    pub(crate) lines: Vec<String>,
}

/// The diagnosis in the statistics of a process.
pub(crate) fn of_object(pool: &Value) -> Said {
    let said = &pool["why"];
    let text = |value: &Value| one_line(value.as_str().unwrap_or_default());
    let lines = said["lines"].as_array().map_or(&[][..], Vec::as_slice);
    let lines: Vec<_> = lines.iter().map(text).collect();
    let unknown = || vec!["the process runs a version of pinpool without diagnoses".to_owned()];
    Said {
        pool: name_of(pool),
        cause: text(&said["cause"]),
        is_alarm: said["is_alarm"].as_bool().unwrap_or(false),
        lines: if lines.is_empty() { unknown() } else { lines },
    }
}

/// The diagnosis in a line of pinpool's log.
pub(crate) fn of_line(line: &[u8]) -> Option<Said> {
    let text = String::from_utf8_lossy(line);
    let (before, diagnosis) = text.split_once("diagnosis: ")?;
    let cause = Cause::ALL.iter().find(|cause| diagnosis.starts_with(cause.name()))?;
    let name = before.rsplit_once("pool[").and_then(|(_, name)| name.trim_end().strip_suffix(']'));
    let lines: Vec<_> = diagnosis.trim_end().split("; ").map(one_line).collect();
    // Sizes that cost nothing come without a recommendation.
    let is_alarm = *cause >= Cause::Thrashing || (*cause == Cause::SizesNeverRecur && lines.len() > 1);
    Some(Said { pool: name.unwrap_or("the pool").to_owned(), cause: cause.name().to_owned(), is_alarm, lines })
}

/// A diagnosis of a pool of this name.
pub(crate) fn of_judgement(pool: &str, judgement: &Judgement) -> Said {
    let (cause, is_alarm) = (judgement.cause.name().to_owned(), judgement.is_alarm);
    Said { pool: pool.to_owned(), cause, is_alarm, lines: judgement.lines() }
}

/// The diagnosis of a recorded pool.
pub(crate) fn of_recorded(judged: &PoolJudgement, has_ended: bool) -> Said {
    let mut said = of_judgement(&judged.name, &judged.judgement);
    let (waited, all) = (grouped(judged.short_gets), grouped(judged.gets));
    said.lines.insert(1, format!("  in the whole recording, {waited} of {all} requests waited"));
    if !has_ended {
        said.lines
            .insert(1, "  the end of the pool is not recorded: its process was killed, or is still running".to_owned());
    }
    said
}
