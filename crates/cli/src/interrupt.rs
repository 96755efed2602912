//! Handles Ctrl-C.

use std::time::{Duration, Instant};

use pinpool_loader::StopFlag;

use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;

/// Signals within this time are one interrupt, because two key presses take longer.
const SAME_INTERRUPT: Duration = Duration::from_millis(150);

/// Installs a handler: the first Ctrl-C ends the run cleanly, the second ends it immediately. `timeout` and a shell's job
/// control signal both the process and its group, so a second signal right after the first belongs to the same interrupt.
pub(crate) fn stop_at_interrupt(terminal: &Terminal) -> StopFlag {
    let stop = StopFlag::new();
    let flag = stop.clone();
    let mut first = None;
    let handler = ctrlc::set_handler(move || {
        let at = *first.get_or_insert_with(Instant::now);
        if flag.raise() && at.elapsed() > SAME_INTERRUPT {
            crate::top::restore();
            std::process::exit(ExitError::Interrupted as i32);
        }
    });
    if let Err(error) = handler {
        terminal.message(format_args!("Ctrl-C will end the run without its statistics: {error}"));
    }
    stop
}
