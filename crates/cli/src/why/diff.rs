//! What changed between two recordings, in seconds.

use std::error::Error;
use std::path::Path;

use pinpool_observe::judge::words::{percent, seconds};
use pinpool_observe::judge::{Lost, PoolJudgement, judge_recording};
use pinpool_replay::Recording;
use serde::Serialize;

use crate::files::{in_file, named};
use crate::input::{self, Kind};
use pinpool_cli::exit::ExitError;
use pinpool_cli::table::{columns, grouped};
use pinpool_cli::terminal::Terminal;

/// Less of the time of a recording is no change.
const SHOWN_SHARE: f64 = 0.001;

/// One pool in one recording.
#[derive(Debug, Clone, Serialize)]
struct Side {
    cause: &'static str,
    seconds: f64,
    lost_seconds: f64,
    waiting_seconds: f64,
    page_locking_seconds: f64,
    moving_seconds: f64,
    gets: u64,
    /// Gets that waited, page-locked or moved memory.
    slow_gets: u64,
    #[serde(skip)]
    lost: Lost,
}

#[derive(Debug, Serialize)]
struct Change {
    pool: String,
    /// `None` where the recording has no such pool, or too few gets of it.
    before: Option<Side>,
    after: Option<Side>,
    /// Variables that differ: name, before, after.
    settings: Vec<(String, Option<String>, Option<String>)>,
}

#[derive(Debug, Serialize)]
struct Changes {
    /// Seconds lost of each second, of all pools.
    before_share: f64,
    after_share: f64,
    pools: Vec<Change>,
}

/// Pools are the same if they have the same name, or without names the same number.
pub(super) fn run(before: &Path, after: &Path, is_json: bool, terminal: &Terminal) -> Result<(), ExitError> {
    let mut warnings = Vec::new();
    let read = |path: &Path, warnings: &mut Vec<String>| -> Result<Recording, Box<dyn Error>> {
        let input = input::open(path)?;
        if input::kind(input.first()) != Kind::Recording {
            return Err(
                named(path, &"not a recording: two targets are compared only if PINPOOL_TRACE recorded both").into()
            );
        }
        let recording = Recording::read(input.into_bytes()).map_err(|error| in_file(path, &error))?;
        warnings.extend(recording.warning.as_ref().map(|warning| named(path, warning)));
        Ok(recording)
    };
    let both = read(before, &mut warnings).and_then(|before| Ok((before, read(after, &mut warnings)?)));
    let (before, after) = match both {
        Ok(both) => both,
        Err(error) => return terminal.report(Err(error)),
    };
    let changes = changes(&before, &after);
    let text = if is_json { serde_json::json!(changes).to_string() } else { in_words(&changes) };
    terminal.print(text.trim_end())?;
    warnings.iter().for_each(|warning| terminal.message(warning));
    let is_worse = changes.after_share > changes.before_share + SHOWN_SHARE;
    if is_worse || !warnings.is_empty() { Err(ExitError::Failure) } else { Ok(()) }
}

fn side(judged: &PoolJudgement) -> Side {
    let lost = judged.judgement.lost;
    let in_seconds = |ns: u64| ns as f64 / 1e9;
    Side {
        cause: judged.judgement.cause.name(),
        seconds: lost.of_us as f64 / 1e6,
        lost_seconds: in_seconds(lost.total_ns()),
        waiting_seconds: in_seconds(lost.waiting_ns),
        page_locking_seconds: in_seconds(lost.page_locking_ns),
        moving_seconds: in_seconds(lost.moving_ns),
        gets: judged.gets,
        slow_gets: judged.slow_gets,
        lost,
    }
}

fn changes(before: &Recording, after: &Recording) -> Changes {
    let [old, new] = [before, after].map(judge_recording);
    let mut names: Vec<&str> = Vec::new();
    for judged in old.iter().chain(&new) {
        if !names.contains(&judged.name.as_str()) {
            names.push(&judged.name);
        }
    }
    let change = |name: &str| {
        let of = |judged: &[PoolJudgement]| judged.iter().find(|judged| judged.name == name).map(side);
        let number =
            |judged: &[PoolJudgement]| judged.iter().find(|judged| judged.name == name).map(|judged| judged.pool);
        let settings = number(&old).zip(number(&new)).map(|(old, new)| settings(before, old, after, new));
        Change { pool: name.to_owned(), before: of(&old), after: of(&new), settings: settings.unwrap_or_default() }
    };
    let mut pools: Vec<_> = names.into_iter().map(change).collect();
    // What got worse by most comes first.
    pools.sort_by(|one, other| more_lost(other).total_cmp(&more_lost(one)));
    let total =
        |of: fn(&Change) -> &Option<Side>| pools.iter().filter_map(|change| of(change).as_ref()).map(share).sum();
    let (before_share, after_share) = (total(|change| &change.before), total(|change| &change.after));
    Changes { before_share, after_share, pools }
}

fn share(side: &Side) -> f64 {
    if side.seconds > 0.0 { side.lost_seconds / side.seconds } else { 0.0 }
}

fn more_lost(change: &Change) -> f64 {
    change.after.as_ref().map_or(0.0, share) - change.before.as_ref().map_or(0.0, share)
}

/// Variables with another value.
fn settings(
    before: &Recording,
    old: u32,
    after: &Recording,
    new: u32,
) -> Vec<(String, Option<String>, Option<String>)> {
    let facts =
        |recording: &Recording, number: u32| recording.pool(number).map(|pool| pool.facts.clone()).unwrap_or_default();
    let (old, new) = (facts(before, old), facts(after, new));
    let value = |facts: &[(String, String)], name: &str| {
        facts.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone())
    };
    let mut names: Vec<_> =
        old.iter().chain(&new).map(|(name, _)| name).filter(|name| name.starts_with("PINPOOL_")).collect();
    names.sort();
    names.dedup();
    // Where the recording itself lies is no difference.
    names.retain(|name| *name != "PINPOOL_TRACE");
    let both = names.into_iter().map(|name| (name.clone(), value(&old, name), value(&new, name)));
    both.filter(|(_, old, new)| old != new).collect()
}

fn in_words(changes: &Changes) -> String {
    let Changes { before_share, after_share, pools } = changes;
    let parts = |share: f64| percent(share_in_parts(share), 1_000_000);
    let verdict = match after_share - before_share {
        more if more > SHOWN_SHARE => "more is lost",
        more if more < -SHOWN_SHARE => "less is lost",
        _ => "no change",
    };
    let mut text =
        format!("{verdict}: {} of the time of a thread before, {} after\n", parts(*before_share), parts(*after_share));
    for Change { pool, before, after, settings } in pools {
        text += &format!("\n{pool}\n");
        let head = ["", "before", "after"].map(str::to_owned).to_vec();
        let row = |name: &str, of: &dyn Fn(&Side) -> String| {
            let cell = |side: &Option<Side>| side.as_ref().map_or_else(|| "-".to_owned(), of);
            vec![name.to_owned(), cell(before), cell(after)]
        };
        let mut rows = vec![
            head,
            row("cause", &|side| side.cause.to_owned()),
            row("seconds", &|side| seconds(side.lost.of_us.saturating_mul(1000))),
            row("lost", &|side| seconds(side.lost.total_ns())),
            row("  waiting", &|side| seconds(side.lost.waiting_ns)),
            row("  page-locking", &|side| seconds(side.lost.page_locking_ns)),
            row("  moving", &|side| seconds(side.lost.moving_ns)),
            row("gets", &|side| grouped(side.gets)),
            row("  waited, locked or moved", &|side| grouped(side.slow_gets)),
        ];
        let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
        rows.extend(settings.iter().map(|(name, old, new)| vec![name.clone(), value(old), value(new)]));
        text += &columns(&rows);
    }
    text
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 0; saturates.
fn share_in_parts(share: f64) -> u64 {
    (share * 1e6).round() as u64
}
