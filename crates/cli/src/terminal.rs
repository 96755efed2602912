//! The terminal: results on stdout, messages on stderr, a progress bar below the messages.
//!
//! Every write of the tool goes through here and never panics: a message that cannot be written is dropped, a result that cannot
//! be written is an error.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, BufWriter, Write};

use indicatif::{MultiProgress, ProgressBar, ProgressFinish, ProgressStyle};

use crate::exit::{ExitError, Reason};

/// The amount of output on stderr. `RUST_LOG` takes precedence for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verbosity {
    Quiet,
    Normal,
    Verbose,
}

/// A handle to the terminal. Clones share the terminal.
#[derive(Debug, Clone, Default)]
pub struct Terminal {
    /// Progress bars on stderr, shown only if stderr is a terminal.
    bars: MultiProgress,
}

impl Terminal {
    /// Creates a progress bar in bytes, which is cleared on drop and hidden if the verbosity is quiet.
    pub fn bar(&self, total_bytes: u64, verbosity: Verbosity) -> ProgressBar {
        const STYLE: &str = "{wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta} left {msg}";
        self.progress(ProgressBar::new(total_bytes), STYLE, verbosity)
    }

    /// Creates a line with a count of steps, which is cleared on drop and hidden if the verbosity is quiet.
    pub fn steps(&self, verbosity: Verbosity) -> ProgressBar {
        self.progress(ProgressBar::new_spinner(), "{spinner} {pos} {msg}, {elapsed}", verbosity)
    }

    fn progress(&self, bar: ProgressBar, style: &str, verbosity: Verbosity) -> ProgressBar {
        if verbosity == Verbosity::Quiet {
            return ProgressBar::hidden();
        }
        let bar = self.bars.add(bar.with_finish(ProgressFinish::AndClear));
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        bar
    }

    /// Prints a message of the tool itself on stderr.
    pub fn message(&self, line: impl Display) {
        self.write(format!("pinpool: {line}\n").as_bytes());
    }

    /// Prints each line of the text as a message.
    pub fn lines(&self, text: impl Display) {
        text.to_string().lines().for_each(|line| self.message(line));
    }

    /// Prints one line on stderr, above the bar.
    pub fn write(&self, line: &[u8]) {
        let line = one_line(String::from_utf8_lossy(line).trim_end_matches('\n')) + "\n";
        // A failed write to stderr cannot be reported.
        let _ = self.bars.suspend(|| io::stderr().lock().write_all(line.as_bytes()));
    }

    /// Prints an error of the pool and returns its exit status.
    pub fn refuse(&self, error: &pinpool::Error) -> ExitError {
        self.lines(error);
        ExitError::of(error)
    }

    /// Prints text and a line end on stdout.
    pub fn print(&self, text: impl Display) -> Result<(), ExitError> {
        self.report(write_stdout(|out| writeln!(out, "{text}")).map_err(Into::into))
    }

    /// Prints the error, unless it has been printed, and returns its exit status. A closed stdout is not an error, because its
    /// reader needs no more output.
    pub fn report(&self, result: Result<(), Box<dyn Error>>) -> Result<(), ExitError> {
        let Err(error) = result else { return Ok(()) };
        if let Some(printed) = error.downcast_ref::<ExitError>() {
            return Err(*printed);
        }
        if let Some(reason) = error.downcast_ref::<Reason>() {
            self.lines(reason);
            return Err(reason.status);
        }
        if let Some(error) = error.downcast_ref::<pinpool::Error>() {
            return Err(self.refuse(error));
        }
        if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
            return Ok(());
        }
        self.message(error);
        Err(ExitError::Failure)
    }
}

/// Writes to stdout through a buffer.
pub fn write_stdout(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    let written = write(&mut out).and_then(|()| out.flush());
    // The kind is kept, because `Terminal::report` ignores a closed pipe, but not a full disk.
    written.map_err(|error| io::Error::new(error.kind(), format!("stdout: {error}")))
}

/// Escapes control characters (colors, cursor moves, line ends): names of files, archive members, pools and variables are
/// untrusted.
pub fn one_line(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() && c != '\t' { c.escape_default().to_string() } else { c.to_string() })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::one_line;

    #[test]
    fn names_cannot_move_the_cursor_or_forge_a_line() {
        assert_eq!(one_line("a\x1b[31m\nb\u{9b}c\td é: gone"), "a\\u{1b}[31m\\nb\\u{9b}c\td é: gone");
    }
}
