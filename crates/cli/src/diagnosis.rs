//! The diagnosis of a pool as text, from the pool itself, a process or a recording.

use pinpool::{Diagnosis, Pool};
use pinpool_observe::judge::PoolJudgement;
use serde_json::Value;

use crate::served::name_of;
use pinpool_cli::table::grouped;

/// An alarm counts for the whole trace if at least one in this many diagnoses shows it.
const ALARM_PART: usize = 10;

/// The diagnosis of one pool.
#[derive(Debug, Clone, serde::Serialize)]
pub(crate) struct Said {
    pub(crate) pool: String,
    pub(crate) cause: String,
    pub(crate) is_alarm: bool,
    /// The cause and its finding, the seconds lost, the evidence and the advice.
    pub(crate) lines: Vec<String>,
}

/// Repeated diagnoses of the pool of a replay.
#[derive(Debug, Default)]
pub(crate) struct Judged(Vec<Diagnosis>);

impl Judged {
    pub(crate) fn look(&mut self, pool: &Pool) {
        self.0.push(pool.diagnose());
    }

    /// The most frequent alarm in at least a tenth of the diagnoses, else the last diagnosis; `None` if there is none.
    pub(crate) fn worst(&self, pool: &str) -> Option<Said> {
        let alarms = || self.0.iter().filter(|why| why.is_alarm);
        let times = |cause: &str| alarms().filter(|why| why.cause.name() == cause).count();
        let alarms = alarms().filter(|why| times(why.cause.name()) * ALARM_PART >= self.0.len());
        let why = alarms.max_by_key(|why| (times(why.cause.name()), why.lost)).or(self.0.last())?;
        let lines = why.to_string().lines().map(str::to_owned).collect();
        Some(Said { pool: pool.to_owned(), cause: why.cause.name().to_owned(), is_alarm: why.is_alarm, lines })
    }
}

/// The diagnosis in the statistics of a process.
pub(crate) fn of_object(pool: &Value) -> Said {
    let said = &pool["why"];
    let text =
        |value: &Value| value.as_str().unwrap_or_default().chars().filter(|c| !c.is_control()).collect::<String>();
    let lines = said["lines"].as_array().map_or(&[][..], Vec::as_slice);
    let lines: Vec<_> = lines.iter().map(text).collect();
    let unknown = || vec!["the process runs a pinpool that does not say why: start it with this one".to_owned()];
    Said {
        pool: name_of(pool),
        cause: text(&said["cause"]),
        is_alarm: said["is_alarm"].as_bool().unwrap_or(false),
        lines: if lines.is_empty() { unknown() } else { lines },
    }
}

/// The diagnosis of a recorded pool.
pub(crate) fn of_judgement(judged: &PoolJudgement, has_ended: bool) -> Said {
    let PoolJudgement { name, judgement, gets, short_gets, .. } = judged;
    let mut lines = judgement.lines();
    let (waited, gets) = (grouped(*short_gets), grouped(*gets));
    lines.insert(1, format!("  over the recording {waited} of {gets} requests waited"));
    if !has_ended {
        lines.insert(1, "  no end of the pool is recorded: its process was ended before, or still runs".to_owned());
    }
    Said { pool: name.clone(), cause: judgement.cause.name().to_owned(), is_alarm: judgement.is_alarm, lines }
}
