//! `pinpool keep`: holds memory for processes that are restarted.

use clap::Args;
use pinpool::config::text::{format_bytes, parse_bytes};

use crate::interrupt::stop_at_interrupt;
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;
use pinpool_shared::keep::Keeper;

/// Hold memory under a name, so that a restarted process finds its bytes again
///
/// Runs until Ctrl-C or SIGTERM; the memory is gone then, once no process holds it. A process takes it by its name
/// (`Kept::attach` in Rust, `pinpool.kept` in Python), one at a time, and page-locks it. The memory is taken as it is first used. Its
/// socket is in $XDG_RUNTIME_DIR, else in /tmp/pinpool-UID, for this user alone.
#[derive(Debug, Args)]
pub(crate) struct KeepArgs {
    /// Letters, digits, '-', '_' and '.'
    name: String,

    /// How much memory
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    bytes: u64,

    /// Pages that the administrator has set aside: only, or never [default: if there are enough]
    #[arg(long, value_name = "WHEN", value_parser = ["only", "never"])]
    hugetlb: Option<String>,
}

pub(crate) fn run(args: &KeepArgs, terminal: &Terminal) -> Result<(), ExitError> {
    let failed = |error: pinpool_shared::Error| {
        terminal.message(&error);
        ExitError::Failure
    };
    let hugetlb = args.hugetlb.as_deref().map(|when| when == "only");
    let stop = stop_at_interrupt(terminal);
    let bytes = usize::try_from(args.bytes).unwrap_or(usize::MAX);
    let keeper = Keeper::new(&args.name, bytes, hugetlb).map_err(failed)?;
    let (size, pages) = (format_bytes(args.bytes), if keeper.is_hugetlb() { " in hugetlb pages" } else { "" });
    terminal.message(format_args!("keeps {size}{pages} as {} at {}", args.name, keeper.path().display()));
    keeper.serve(|| stop.is_raised()).map_err(failed)
}
