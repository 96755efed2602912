//! What changed between two recordings, in seconds.

use std::error::Error;
use std::path::Path;

use pinpool_observe::diagnosis::words::{percent, seconds};
use pinpool_observe::diagnosis::{Lost, PoolDiagnosis, diagnose_recording};
use pinpool_replay::Recording;
use serde_json::{Value, json};

use crate::files::named;
use crate::input;
use pinpool_cli::exit::ExitError;
use pinpool_cli::table::{columns, grouped};
use pinpool_cli::terminal::Terminal;

/// A smaller share of the time is no change.
const SHOWN_SHARE: f64 = 0.001;

/// A pool before and after; `None` if the recording does not have it, or has too few of its requests.
struct Change {
    pool: String,
    sides: [Option<PoolDiagnosis>; 2],
    /// Variables that differ: name, before, after.
    settings: Vec<[Option<String>; 3]>,
}

/// Pools are matched by name, or by number if they have no name.
pub(super) fn run(before: &Path, after: &Path, is_json: bool, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let both = [read(before)?, read(after)?];
    let changes = changes(&both);
    let shares = [0, 1].map(|side| changes.iter().map(|change| share(change.sides[side].as_ref())).sum::<f64>());
    let text = if is_json { in_json(&changes, shares).to_string() } else { in_words(&changes, shares) };
    terminal.print(text.trim_end())?;
    let warnings =
        [before, after].into_iter().zip(&both).filter_map(|(path, of)| Some(named(path, of.warning.as_ref()?)));
    let warnings: Vec<_> = warnings.collect();
    warnings.iter().for_each(|warning| terminal.message(warning));
    if shares[1] > shares[0] + SHOWN_SHARE || !warnings.is_empty() { Err(ExitError::Failure.into()) } else { Ok(()) }
}

fn read(path: &Path) -> Result<Recording, String> {
    input::read_recording(path, input::open(path)?)
}

/// The pools, the largest increase in lost time first.
fn changes(both: &[Recording; 2]) -> Vec<Change> {
    let diagnoses = both.each_ref().map(diagnose_recording);
    let mut names: Vec<_> = diagnoses.iter().flatten().map(|one| one.name.clone()).collect();
    names.sort();
    names.dedup();
    let change = |pool: String| {
        let sides = diagnoses.each_ref().map(|all| all.iter().find(|one| one.name == pool).cloned());
        let settings = match &sides {
            [Some(old), Some(new)] => settings(both, [old.pool, new.pool]),
            _ => Vec::new(),
        };
        Change { pool, sides, settings }
    };
    let mut changes: Vec<_> = names.into_iter().map(change).collect();
    let more_lost = |change: &Change| share(change.sides[1].as_ref()) - share(change.sides[0].as_ref());
    changes.sort_by(|one, other| more_lost(other).total_cmp(&more_lost(one)));
    changes
}

/// Lost time as a share.
fn share(side: Option<&PoolDiagnosis>) -> f64 {
    let lost = side.map(|side| side.diagnosis.lost).filter(|lost| lost.of_us > 0);
    lost.map_or(0.0, |lost| lost.total_ns() as f64 / 1e3 / lost.of_us as f64)
}

/// Variables with different values.
fn settings(both: &[Recording; 2], pools: [u32; 2]) -> Vec<[Option<String>; 3]> {
    let [old, new] = [0, 1].map(|side| both[side].pool(pools[side]).cloned().unwrap_or_default());
    let mut names: Vec<_> = old.facts.iter().chain(&new.facts).map(|(name, _)| name.clone()).collect();
    // The path of the recording always differs.
    names.retain(|name| name.starts_with("PINPOOL_") && name != "PINPOOL_TRACE");
    names.sort();
    names.dedup();
    let values = |name: String| [&old, &new].map(|pool| pool.fact(&name).map(str::to_owned));
    let all = names.into_iter().map(|name| (name.clone(), values(name)));
    all.filter(|(_, [old, new])| old != new).map(|(name, [old, new])| [Some(name), old, new]).collect()
}

/// Name in the table, key in JSON, nanoseconds.
type TimeRow = (&'static str, &'static str, fn(&Lost) -> u64);
const TIMES: [TimeRow; 5] = [
    ("seconds", "seconds", |lost| lost.of_us.saturating_mul(1000)),
    ("lost", "lost_seconds", Lost::total_ns),
    ("  waiting", "waiting_seconds", |lost| lost.waiting_ns),
    ("  pinning", "pinning_seconds", |lost| lost.pinning_ns),
    ("  remapping", "moving_seconds", |lost| lost.moving_ns),
];

fn in_json(changes: &[Change], [before_share, after_share]: [f64; 2]) -> Value {
    let side = |side: &Option<PoolDiagnosis>| {
        let PoolDiagnosis { diagnosis, gets, short_gets, .. } = side.as_ref()?;
        let mut object = json!({ "cause": diagnosis.cause.name(), "gets": gets, "short_gets": short_gets });
        for (_, key, ns) in TIMES {
            object[key] = (ns(&diagnosis.lost) as f64 / 1e9).into();
        }
        Some(object)
    };
    let pool = |Change { pool, sides: [before, after], settings }: &Change| json!({ "pool": pool, "before": side(before), "after": side(after), "settings": settings });
    let pools: Vec<_> = changes.iter().map(pool).collect();
    json!({ "before_share": before_share, "after_share": after_share, "pools": pools })
}

fn in_words(changes: &[Change], [before, after]: [f64; 2]) -> String {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // Not below 0; saturates.
    let parts = |share: f64| percent((share * 1e6).round() as u64, 1_000_000);
    let trend = match after - before {
        more if more > SHOWN_SHARE => "more is lost",
        more if more < -SHOWN_SHARE => "less is lost",
        _ => "no change",
    };
    let mut text = format!("{trend}: {} of the time of a thread before, {} after\n", parts(before), parts(after));
    for Change { pool, sides, settings } in changes {
        let row = |name: &str, of: &dyn Fn(&PoolDiagnosis) -> String| {
            let cell = |side: &Option<PoolDiagnosis>| side.as_ref().map_or_else(|| "-".to_owned(), of);
            vec![name.to_owned(), cell(&sides[0]), cell(&sides[1])]
        };
        let mut rows = vec![["", "before", "after"].map(str::to_owned).to_vec()];
        rows.push(row("cause", &|side| side.diagnosis.cause.name().to_owned()));
        rows.extend(TIMES.map(|(name, _, ns)| row(name, &|side| seconds(ns(&side.diagnosis.lost)))));
        rows.push(row("requests", &|side| grouped(side.gets)));
        rows.push(row("  waited", &|side| grouped(side.short_gets)));
        let cell = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
        rows.extend(settings.iter().map(|setting| setting.iter().map(cell).collect()));
        text += &format!("\n{pool}\n{}", columns(&rows));
    }
    text
}
