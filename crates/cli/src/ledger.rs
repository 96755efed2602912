//! `pinpool ledger`: who holds what in the host ledgers of this user.

use std::error::Error;

use clap::Args;
use pinpool::unstable::ledger::{self, LedgerOwner, LedgerReport};

use pinpool_cli::exit::ExitError;
use pinpool_cli::table::{columns, format_about};
use pinpool_cli::terminal::{Terminal, to_stdout};

/// Shows a host ledger: its ceiling, and what the pools of all processes hold, keep idle and want
///
/// Attaches nothing and changes nothing. Exits with 1 if there is no such ledger, with 2 if its name is none or its file cannot
/// be read. Without a name a file that cannot be read is named on stderr, and the others are shown.
#[derive(Debug, Args)]
pub(crate) struct LedgerArgs {
    /// Name of the ledger (PINPOOL_LEDGER); all of this user if it is left out
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// One JSON object for each ledger
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &LedgerArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let names = args.name.clone().map_or_else(ledger::names, |name| vec![name]);
    let mut reports = Vec::new();
    for name in names {
        match ledger::report(&name) {
            // What a killed owner left is no ledger until it is used again.
            Ok(report) => reports.extend(report.filter(|report| !report.owners.is_empty())),
            Err(error) if args.name.is_some() => return Err(terminal.refuse(&error)),
            // No reason to hide the others.
            Err(error) => terminal.lines(&error),
        }
    }
    if reports.is_empty() {
        let name =
            args.name.as_ref().map_or_else(|| "no ledger of this user".to_owned(), |name| format!("no ledger {name}"));
        terminal.message(format_args!(
            "{name} has an owner: pools with PINPOOL_LEDGER=NAME share one while their processes live"
        ));
        return Err(ExitError::Failure);
    }
    reports.iter().try_for_each(|report| {
        terminal.report(if args.json { json(report) } else { to_stdout(&text(report)).map_err(Into::into) })
    })
}

/// All ledgers that have an owner, each behind an empty line.
pub(crate) fn all_in_words() -> String {
    let reports = ledger::names().into_iter().filter_map(|name| ledger::report(&name).ok().flatten());
    reports.filter(|report| !report.owners.is_empty()).map(|report| format!("\n{}", text(&report))).collect()
}

fn json(report: &LedgerReport) -> Result<(), Box<dyn Error>> {
    Ok(to_stdout(&format!("{}\n", serde_json::to_string(report)?))?)
}

fn text(report: &LedgerReport) -> String {
    let ceiling = report.max_bytes.map_or_else(|| "none".to_owned(), format_about);
    let title = ["pool", "process", "held", "idle", "wanted"].map(str::to_owned).to_vec();
    let row = |owner: &LedgerOwner| {
        let pool = if owner.pool.is_empty() { "-" } else { &owner.pool };
        let away = if owner.is_elsewhere { " (another namespace)" } else { "" };
        let bytes = [owner.held_bytes, owner.idle_bytes, owner.wanted_bytes].map(format_about);
        [vec![pool.to_owned(), format!("{}{away}", owner.pid)], bytes.to_vec()].concat()
    };
    let rows: Vec<_> = std::iter::once(title).chain(report.owners.iter().map(row)).collect();
    let head = format!("ledger {}: ceiling {ceiling}, held {}\n", report.name, format_about(report.held_bytes));
    head + &columns(&rows)
}
