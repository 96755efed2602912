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

    /// Bytes on stderr, above the bar.
    pub(crate) fn write(&self, bytes: &[u8]) {
        // A stderr that is gone can not be told so.
        let _ = self.0.suspend(|| io::stderr().lock().write_all(bytes));
    }

    /// Text on stdout.
    pub(crate) fn print(&self, text: impl Display) -> Result<(), Failed> {
        let mut stdout = io::stdout().lock();
        let printed = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
        // The kind stays: it tells a reader who left from a disk that is full.
        let named = |error: io::Error| io::Error::new(error.kind(), format!("stdout: {error}"));
        self.report(printed.map_err(|error| named(error).into()))
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
