//! `pinpool env`: every variable with its value, where that came from, its default and its meaning; and what a pool would
//! say of them.

use std::error::Error;
use std::io::{self, Write};

use clap::Args;
use pinpool::Pool;
use pinpool::config::env;

use crate::ExitError;
use crate::terminal::Terminal;

/// Lists the PINPOOL_* variables: value, origin, default, meaning
///
/// Exits with 2 if no pool could be built because settings contradict each other.
#[derive(Debug, Args)]
pub(crate) struct EnvArgs {}

pub(crate) fn run(_args: &EnvArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let refused = |error: pinpool::Error| {
        terminal.message(&error);
        ExitError::from(&error)
    };
    let (entries, warnings) = env::report().map_err(refused)?;
    terminal.report(list(&entries))?;
    for warning in &warnings {
        terminal.write(format!("warning: {warning}\n").as_bytes());
    }
    // The reserve alone would be pinned by this; whether it goes with the rest has been asked above.
    match Pool::builder().reserve(0).background_poll(false).build() {
        Err(error) if error.is_setting() => Err(refused(error)),
        // The settings may be meant for another machine.
        Err(error) => {
            terminal.write(format!("warning: {error}\n").as_bytes());
            Ok(())
        }
        Ok(_) => Ok(()),
    }
}

fn list(entries: &[env::Entry]) -> Result<(), Box<dyn Error>> {
    let mut out = io::stdout().lock();
    let widest = |column: fn(&env::Entry) -> &str, title: &str| {
        entries.iter().map(|entry| column(entry).len()).chain([title.len()]).max().unwrap_or(0)
    };
    let name = widest(|entry| entry.name, "variable");
    let value = widest(|entry| &entry.value, "value");
    let origin = widest(|entry| entry.origin, "from");
    let default = widest(|entry| entry.default, "default");
    writeln!(out, "{:name$}  {:value$}  {:origin$}  {:default$}  meaning", "variable", "value", "from", "default")?;
    for entry in entries {
        let env::Entry { name: variable, value: holds, origin: from, default: else_, meaning } = entry;
        writeln!(out, "{variable:name$}  {holds:value$}  {from:origin$}  {else_:default$}  {meaning}")?;
    }
    Ok(out.flush()?)
}
