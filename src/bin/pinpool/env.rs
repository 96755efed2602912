//! `pinpool env`: every variable with its value, its origin, its default and its meaning; and the warnings and errors of
//! building a pool with them.

use std::error::Error;
use std::io::{self, Write};

use clap::Args;
use pinpool::Pool;
use pinpool::config::env::{self, VariableReport};

use crate::ExitError;
use crate::terminal::Terminal;

/// Lists the PINPOOL_* variables: value, origin, default, meaning
///
/// Exits with 2 if no pool could be built because settings contradict each other.
#[derive(Debug, Args)]
pub(crate) struct EnvArgs {}

pub(crate) fn run(_args: &EnvArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let (entries, warnings) = env::report().map_err(|error| terminal.refuse(&error))?;
    terminal.report(list(&entries))?;
    for warning in &warnings {
        terminal.write(format!("warning: {warning}\n").as_bytes());
    }
    // Building would pin the reserve; `report` has already checked that it fits the other settings.
    match Pool::builder().reserve_bytes(0).background_poll(false).build() {
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
    let mut out = io::stdout().lock();
    let title = ["variable", "value", "from", "default", "meaning"];
    let rows =
        reports.iter().map(|report| [report.name, &report.value, report.origin, &report.default, report.meaning]);
    let rows: Vec<_> = std::iter::once(title).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let [name_width, value_width, origin_width, default_width] = [0, 1, 2, 3].map(width);
    for [name, value, origin, default, meaning] in &rows {
        write!(out, "{name:name_width$}  {value:value_width$}  {origin:origin_width$}  ")?;
        writeln!(out, "{default:default_width$}  {meaning}")?;
    }
    Ok(out.flush()?)
}
