//! `pinpool env`: every variable with its value, where that came from, its default and its meaning.

use std::error::Error;
use std::io::{self, Write};

use clap::Args;
use pinpool::config::env;

/// Lists the PINPOOL_* variables: value, origin, default, meaning
#[derive(Debug, Args)]
pub(crate) struct EnvArgs {}

pub(crate) fn run(_args: &EnvArgs) -> Result<(), Box<dyn Error>> {
    let (entries, warnings) = env::report()?;
    let mut out = io::stdout().lock();
    let widest = |column: fn(&env::Entry) -> &str, title: &str| {
        entries.iter().map(|entry| column(entry).len()).chain([title.len()]).max().unwrap_or(0)
    };
    let name = widest(|entry| entry.name, "variable");
    let value = widest(|entry| &entry.value, "value");
    let origin = widest(|entry| entry.origin, "from");
    let default = widest(|entry| entry.default, "default");
    writeln!(out, "{:name$}  {:value$}  {:origin$}  {:default$}  meaning", "variable", "value", "from", "default")?;
    for entry in &entries {
        let env::Entry { name: variable, value: holds, origin: from, default: else_, meaning } = entry;
        writeln!(out, "{variable:name$}  {holds:value$}  {from:origin$}  {else_:default$}  {meaning}")?;
    }
    out.flush()?;
    for warning in &warnings {
        writeln!(io::stderr(), "warning: {warning}")?;
    }
    Ok(())
}
