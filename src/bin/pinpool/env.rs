//! `pinpool env`: every variable with its value, its origin, its default and its meaning; and the warnings and errors of
//! building a pool with them.

use std::error::Error;

use clap::Args;
use pinpool::Pool;
use pinpool::config::Warning;
use pinpool::config::env::{self, VariableReport};

use crate::ExitError;
use crate::table::columns_left;
use crate::terminal::{Terminal, to_stdout};

/// Lists the PINPOOL_* variables: value, origin, default, meaning
///
/// Exits with 2 if no pool could be built because a setting cannot be read or settings contradict each other. `pinpool
/// doctor` says what this machine makes of them.
#[derive(Debug, Args)]
pub(crate) struct EnvArgs {}

pub(crate) fn run(_args: &EnvArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let (entries, warnings) = env::report().map_err(|error| terminal.refuse(&error))?;
    terminal.report(list(&entries))?;
    for warning in &warnings {
        let word = if warning.is_error() { "error" } else { "warning" };
        terminal.write(format!("{word}: {warning}\n").as_bytes());
    }
    if warnings.iter().any(Warning::is_error) {
        return Err(ExitError::Settings);
    }
    // Building would pin the reserve, begin a recording and open a socket; `report` has already checked these settings.
    match Pool::builder().reserve_bytes(0).background_poll(false).trace(None).socket(None).build() {
        Err(error) if error.is_setting() => Err(terminal.refuse(&error)),
        // The settings may be meant for another machine.
        Err(error) => {
            terminal.write(format!("warning: {error}\n").as_bytes());
            Ok(())
        }
        Ok(_) => Ok(()),
    }
}

fn list(reports: &[VariableReport]) -> Result<(), Box<dyn Error>> {
    let title = ["variable", "value", "from", "default", "meaning"];
    let rows =
        reports.iter().map(|report| [report.name, &report.value, report.origin, &report.default, report.meaning]);
    let rows: Vec<_> = std::iter::once(title).chain(rows).map(|row| row.map(str::to_owned).to_vec()).collect();
    Ok(to_stdout(&columns_left(&rows))?)
}
