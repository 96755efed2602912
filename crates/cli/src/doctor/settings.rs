//! `pinpool doctor --settings`: the variables with their values, origins, defaults and meanings, and all that is wrong with them.

use std::error::Error;

use pinpool::Pool;
use pinpool::unstable::config::env::{self, VariableReport};

use pinpool_cli::exit::ExitError;
use pinpool_cli::table::columns_left;
use pinpool_cli::terminal::{Terminal, to_stdout};

use super::unmet::unmet;

/// The variables that most programs need.
const COMMON: [&str; 8] = [
    "PINPOOL_MAX_BYTES",
    "PINPOOL_RESERVE",
    "PINPOOL_WAIT",
    "PINPOOL_ON_FULL",
    "PINPOOL_IDLE_TIMEOUT",
    "PINPOOL_LEDGER",
    "PINPOOL_TRACE",
    "PINPOOL_SOCKET",
];

/// Exits with 2 if no pool can be built with the settings, and with 1 if this machine lacks something they require.
pub(super) fn run(all: bool, terminal: &Terminal) -> Result<(), ExitError> {
    let report = env::report();
    let is_listed = |variable: &&VariableReport| all || COMMON.contains(&variable.name) || variable.origin != "default";
    let listed: Vec<_> = report.variables.iter().filter(is_listed).collect();
    terminal.report(list(&listed))?;
    let left_out = report.variables.len() - listed.len();
    if left_out > 0 {
        terminal.write(
            format!("{left_out} more have their defaults: `pinpool doctor --settings --all` lists them\n").as_bytes(),
        );
    }
    for warning in &report.warnings {
        terminal.write(format!("warning: {warning}\n").as_bytes());
    }
    for error in &report.errors {
        terminal.write(format!("error: {error}\n").as_bytes());
    }
    if !report.errors.is_empty() {
        return Err(ExitError::Settings);
    }
    let unmet = unmet(&report);
    for finding in &unmet {
        terminal.write(format!("{}: {}: {finding}\n", finding.level, finding.check).as_bytes());
    }
    // What `unmet` looks at is left out: a reserve would be pinned, a trace or a socket opened.
    let builder = Pool::builder().reserve_bytes(0).background_thread(false).trace(None).setting("socket", "none");
    match builder.build() {
        Err(error) if error.is_setting() => Err(terminal.refuse(&error)),
        Err(error) => {
            terminal.write(format!("warning: {error}\n").as_bytes());
            Err(ExitError::Failure)
        }
        Ok(_) if unmet.is_empty() => Ok(()),
        Ok(_) => Err(ExitError::Failure),
    }
}

fn list(reports: &[&VariableReport]) -> Result<(), Box<dyn Error>> {
    let title = ["variable", "value", "from", "default", "meaning"];
    let rows =
        reports.iter().map(|report| [report.name, &report.value, report.origin, &report.default, report.meaning]);
    let rows: Vec<_> = std::iter::once(title).chain(rows).map(|row| row.map(str::to_owned).to_vec()).collect();
    Ok(to_stdout(&columns_left(&rows))?)
}
