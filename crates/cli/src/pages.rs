//! `pinpool completions` and `pinpool man`: what a package installs beside the tool, made from its own flags.

use std::error::Error;

use clap::{Args, Command};
use clap_complete::Shell;

use pinpool_cli::terminal::to_stdout;

/// Print the completions of a shell, to be put where the shell looks for them
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    shell: Shell,
}

/// Print a manual page: of the tool, or of one command
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
    Ok(to_stdout(&String::from_utf8(script)?)?)
}

pub(crate) fn man(args: &ManArgs, tool: Command) -> Result<(), Box<dyn Error>> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command(args, tool)?).render(&mut page)?;
    Ok(to_stdout(&String::from_utf8(page)?)?)
}

/// The command that the page is about, under the name of its page.
fn command(args: &ManArgs, mut tool: Command) -> Result<Command, String> {
    let Some(name) = &args.command else { return Ok(tool) };
    // Hands the flags of the tool on to its commands.
    tool.build();
    let found = tool.find_subcommand(name).ok_or_else(|| format!("man {name}: no such command of pinpool"))?;
    Ok(found.clone().display_name(format!("pinpool-{name}")))
}
