//! The changes between two recordings, in seconds.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::Path;

use pinpool_observe::diagnosis::words::{percent, seconds};
use pinpool_observe::diagnosis::{PoolDiagnosis, diagnose_recording};
use pinpool_replay::Recording;
use serde_json::{Value, json};

use crate::files::named;
use crate::input;
use pinpool_cli::exit::ExitError;
use pinpool_cli::table::{columns, grouped};
use pinpool_cli::terminal::Terminal;

/// A change by a smaller share of the time counts as no change.
const SHOWN_SHARE: f64 = 0.001;

/// The rows of a pool: the name in the table, and the key in JSON.
const ROWS: [(&str, &str); 8] = [
    ("cause", "cause"),
    ("seconds", "seconds"),
    ("lost", "lost_seconds"),
    ("  waiting", "waiting_seconds"),
    ("  pinning", "pinning_seconds"),
    ("  remapping", "remapping_seconds"),
    ("requests", "requests"),
    ("  delayed", "requests_waited"),
];

/// Compares two recordings. Pools are matched by name, or by number if they have no name.
pub(super) fn run(before: &Path, after: &Path, is_json: bool, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let read = |path| input::read_recording(path, input::open(path)?);
    let both = [read(before)?, read(after)?];
    let pools = changes(&both);
    if ["before", "after"].iter().any(|side| pools.iter().all(|pool| pool[*side].is_null())) {
        return Err("too few requests to compare: each recording needs a pool with at least 20".into());
    }
    let [old, new] = ["before", "after"].map(|side| pools.iter().map(|pool| share(&pool[side])).sum::<f64>());
    let text = match is_json {
        true => json!({ "before_share": old, "after_share": new, "pools": pools }).to_string(),
        false => in_words(&pools, old, new),
    };
    terminal.print(text.trim_end())?;
    let warnings = [before, after].into_iter().zip(&both);
    let warnings: Vec<_> = warnings.filter_map(|(path, of)| Some(named(path, of.warning.as_ref()?))).collect();
    warnings.iter().for_each(|warning| terminal.message(warning));
    if new > old + SHOWN_SHARE || !warnings.is_empty() { Err(ExitError::Failure.into()) } else { Ok(()) }
}

/// Returns an object for each pool, the largest increase in the share of lost time first. A side is null if its recording does
/// not have the pool, or has too few requests of the pool.
fn changes(both: &[Recording; 2]) -> Vec<Value> {
    let diagnoses = both.each_ref().map(diagnose_recording);
    let names: BTreeSet<_> = diagnoses.iter().flatten().map(|one| &one.name).collect();
    let change = |name: &String| {
        let sides = diagnoses.each_ref().map(|all| all.iter().find(|one| one.name == *name));
        let settings = match sides {
            [Some(old), Some(new)] => settings(both, [old.pool, new.pool]),
            _ => Vec::new(),
        };
        let [before, after] = sides.map(|side| side.map(numbers));
        json!({ "pool": name, "before": before, "after": after, "settings": settings })
    };
    let mut changes: Vec<_> = names.into_iter().map(change).collect();
    let more_lost = |change: &Value| share(&change["after"]) - share(&change["before"]);
    changes.sort_by(|one, other| more_lost(other).total_cmp(&more_lost(one)));
    changes
}

fn numbers(of: &PoolDiagnosis) -> Value {
    let lost = &of.diagnosis.lost;
    let [total, waiting, pinning, moving] =
        [lost.total_ns(), lost.waiting_ns, lost.pinning_ns, lost.moving_ns].map(|ns| ns as f64 / 1e9);
    json!({
        "cause": of.diagnosis.cause.name(), "requests": of.requests, "requests_waited": of.delayed_requests, "seconds": lost.window_us as f64 / 1e6,
        "lost_seconds": total, "waiting_seconds": waiting, "pinning_seconds": pinning, "remapping_seconds": moving,
    })
}

/// Returns the lost time as a share of the recorded time.
fn share(side: &Value) -> f64 {
    let seconds = |name: &str| side[name].as_f64().unwrap_or(0.0);
    if seconds("seconds") > 0.0 { seconds("lost_seconds") / seconds("seconds") } else { 0.0 }
}

/// Returns the variables with different values: name, before, after.
fn settings(both: &[Recording; 2], pools: [u32; 2]) -> Vec<[Option<String>; 3]> {
    let sides = [0, 1].map(|side| both[side].pool(pools[side]).cloned().unwrap_or_default());
    let names: BTreeSet<_> = sides.iter().flat_map(|pool| &pool.facts).map(|(name, _)| name).collect();
    // The path of the recording always differs.
    let settings = names.into_iter().filter(|name| name.starts_with("PINPOOL_") && *name != "PINPOOL_TRACE");
    let value = |side: usize, name: &str| sides[side].fact(name).map(str::to_owned);
    settings
        .map(|name| [Some(name.clone()), value(0, name), value(1, name)])
        .filter(|[_, old, new]| old != new)
        .collect()
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 0; saturates.
fn in_words(changes: &[Value], before: f64, after: f64) -> String {
    let parts = |share: f64| percent((share * 1e6).round() as u64, 1_000_000);
    let trend = match after - before {
        more if more > SHOWN_SHARE => "more is lost",
        more if more < -SHOWN_SHARE => "less is lost",
        _ => "no change",
    };
    let cell = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Number(count) if count.is_u64() => grouped(count.as_u64().unwrap_or(0)),
        Value::Number(time) => seconds((time.as_f64().unwrap_or(0.0) * 1e9).round() as u64),
        _ => "-".to_owned(),
    };
    let mut text = format!(
        "{trend}: {} of the running time before, {} after, all threads together\n",
        parts(before),
        parts(after)
    );
    for change in changes {
        let mut rows = vec![["", "before", "after"].map(str::to_owned).to_vec()];
        let sides = |key: &str| ["before", "after"].map(|side| cell(&change[side][key]));
        rows.extend(ROWS.map(|(name, key)| [vec![name.to_owned()], sides(key).to_vec()].concat()));
        let settings = change["settings"].as_array().into_iter().flatten();
        rows.extend(settings.map(|row| [0, 1, 2].map(|at| cell(&row[at])).to_vec()));
        text += &format!("\n{}\n{}", change["pool"].as_str().unwrap_or_default(), columns(&rows));
    }
    text
}
