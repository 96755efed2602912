//! `pinpool completions` and `pinpool man`: files that a package installs together with the tool.

use std::error::Error;

use clap::{Args, Command};
use clap_complete::Shell;

use pinpool_cli::terminal::write_stdout;

/// Print shell completions
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    shell: Shell,
}

/// Print the manual page of the tool or of one command
///
/// `pinpool man load > pinpool-load.1`
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// A command of the tool
    command: Option<String>,
}

pub(crate) fn completions(args: &CompletionsArgs, mut tool: Command) -> Result<(), Box<dyn Error>> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut tool, "pinpool", &mut script);
    Ok(write_stdout(|out| out.write_all(&script))?)
}

pub(crate) fn man(args: &ManArgs, tool: Command) -> Result<(), Box<dyn Error>> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command(args, tool)?).render(&mut page)?;
    Ok(write_stdout(|out| out.write_all(&page))?)
}

/// Returns the command, with the name of its manual page.
fn command(args: &ManArgs, mut tool: Command) -> Result<Command, String> {
    let Some(name) = &args.command else { return Ok(tool) };
    // Adds the global flags to the commands.
    tool.build();
    let found = tool.find_subcommand(name).ok_or_else(|| format!("man {name}: unknown command"))?;
    Ok(found.clone().display_name(format!("pinpool-{name}")))
}
