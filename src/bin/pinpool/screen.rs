//! The terminal: one progress bar at its foot, lines above it, results on stdout.
//!
//! Owns every write of the tool. A pipe that was closed, or a stderr that is gone, is no reason to panic: what cannot be
//! said is left unsaid, and a result that cannot be written is an error like any other.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, Write};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::Failed;

/// A handle; clones share the terminal.
#[derive(Debug, Clone)]
pub(crate) struct Screen(MultiProgress);

impl Screen {
    pub(crate) fn new() -> Screen {
        // Draws on a terminal alone: in a pipe there is no bar.
        Screen(MultiProgress::with_draw_target(ProgressDrawTarget::stderr()))
    }

    /// A bar that counts bytes; it is wiped when it is dropped.
    pub(crate) fn bar(&self, total_bytes: u64) -> Bar {
        let bar = self.0.add(ProgressBar::new(total_bytes));
        let style = ProgressStyle::with_template("{bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta} left {msg}");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        Bar(bar)
    }

    /// A line of the tool's own on stderr.
    pub(crate) fn say(&self, line: impl Display) {
        self.write(format!("pinpool: {line}\n").as_bytes());
    }

    /// A line on stderr, above the bar. It stays one line whatever the names in it hold.
    pub(crate) fn write(&self, line: &[u8]) {
        let line = harmless(&String::from_utf8_lossy(line));
        // A stderr that is gone can not be told so.
        let _ = self.0.suspend(|| io::stderr().lock().write_all(line.as_bytes()));
    }

    /// Text on stdout.
    pub(crate) fn print(&self, text: impl Display) -> Result<(), Failed> {
        self.report(to_stdout(&format!("{text}\n")).map_err(Into::into))
    }

    /// Says what went wrong, if anything did. A reader of stdout who left has seen enough: nothing went wrong.
    pub(crate) fn report(&self, result: Result<(), Box<dyn Error>>) -> Result<(), Failed> {
        let Err(error) = result else { return Ok(()) };
        let io_error = error.downcast_ref::<io::Error>();
        if io_error.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
            return Ok(());
        }
        self.say(error);
        Err(Failed::Work)
    }
}

/// Writes `text` to stdout, all of it.
pub(crate) fn to_stdout(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    // The kind stays: it tells a reader who left from a disk that is full.
    written.map_err(|error| io::Error::new(error.kind(), format!("stdout: {error}")))
}

/// The line with what a terminal would obey (colours, cursor moves, line ends inside) spelled out: names of files, members
/// of archives and variables are other people's.
fn harmless(line: &str) -> String {
    let spelled = |c: char| if c.is_control() && c != '\t' { c.escape_default().to_string() } else { c.to_string() };
    let mut safe: String = line.trim_end_matches('\n').chars().map(spelled).collect();
    safe.push('\n');
    safe
}

/// A progress bar that leaves the screen as it found it.
#[derive(Debug)]
pub(crate) struct Bar(ProgressBar);

impl Bar {
    pub(crate) fn advance(&self, bytes: u64) {
        self.0.inc(bytes);
    }

    pub(crate) fn note(&self, note: String) {
        self.0.set_message(note);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::harmless;

    #[test]
    fn names_cannot_move_the_cursor_or_forge_a_line() {
        assert_eq!(harmless("a\x1b[31m\nb\u{9b}c\td é: gone\n"), "a\\u{1b}[31m\\nb\\u{9b}c\td é: gone\n");
        assert_eq!(harmless("no end"), "no end\n");
    }
}
