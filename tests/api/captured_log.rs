//! The logger of this binary: keeps the lines of each thread for that thread.

use std::cell::RefCell;
use std::sync::Once;

use log::{Level, LevelFilter, Log, Metadata, Record};

thread_local! {
    static LINES: RefCell<Vec<(Level, String)>> = const { RefCell::new(Vec::new()) };
}

struct LinesByThread;

impl Log for LinesByThread {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        // Fails where the thread is ending.
        let _ = LINES.try_with(|lines| lines.borrow_mut().push((record.level(), record.args().to_string())));
    }

    fn flush(&self) {}
}

/// Installs the logger once and forgets what this thread has logged so far.
pub(crate) fn listen() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| log::set_logger(&LinesByThread).map(|()| log::set_max_level(LevelFilter::Trace)).unwrap());
    LINES.take();
}

/// Level and text of each line that this thread has logged since the last call.
pub(crate) fn lines_with_levels() -> Vec<(Level, String)> {
    LINES.take()
}

/// The lines that this thread has logged since the last call.
pub(crate) fn lines() -> Vec<String> {
    LINES.take().into_iter().map(|(_, line)| line).collect()
}

/// How many of `lines` contain `part`.
pub(crate) fn count(lines: &[String], part: &str) -> usize {
    lines.iter().filter(|line| line.contains(part)).count()
}
