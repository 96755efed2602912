//! The logger of a test binary: keeps the lines of each thread for that thread.

use std::cell::{Cell, RefCell};
use std::sync::Once;

use log::{Level, LevelFilter, Log, Metadata, Record};

thread_local! {
    static LINES: RefCell<Vec<(Level, String)>> = const { RefCell::new(Vec::new()) };
    /// File and line of the record that this thread has logged last.
    static PLACE: RefCell<(String, u32)> = const { RefCell::new((String::new(), 0)) };
    /// Lines above this level are not kept.
    static LEVEL: Cell<LevelFilter> = const { Cell::new(LevelFilter::Info) };
    static PANIC_AT: Cell<&'static str> = const { Cell::new("") };
    static PANICS: Cell<u64> = const { Cell::new(0) };
}

struct LinesByThread;

impl Log for LinesByThread {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let (at, line) = (PANIC_AT.try_with(Cell::get).unwrap_or(""), record.args().to_string());
        if !at.is_empty() && line.contains(at) {
            PANICS.set(PANICS.get() + 1);
            panic!("the log sink panics at: {line}");
        }
        if record.level() > LEVEL.try_with(Cell::get).unwrap_or(LevelFilter::Off) {
            return;
        }
        let place = (record.file().unwrap_or_default().to_owned(), record.line().unwrap_or(0));
        let _ = PLACE.try_with(|last| last.replace(place));
        // Fails if the thread is ending.
        let _ = LINES.try_with(|lines| lines.borrow_mut().push((record.level(), line)));
    }

    fn flush(&self) {}
}

/// Installs the logger once, keeps this thread's lines from `info` on, and forgets what it has logged so far.
pub fn listen() {
    listen_from(LevelFilter::Info);
}

/// Keeps this thread's lines as [`listen`] does, from `level` on.
pub fn listen_from(level: LevelFilter) {
    LEVEL.set(level);
    static ONCE: Once = Once::new();
    ONCE.call_once(|| log::set_logger(&LinesByThread).map(|()| log::set_max_level(LevelFilter::Trace)).unwrap());
    LINES.take();
}

/// Level and text of each line that this thread has logged since the last call.
pub fn lines_with_levels() -> Vec<(Level, String)> {
    LINES.take()
}

/// The lines that this thread has logged since the last call.
pub fn lines() -> Vec<String> {
    LINES.take().into_iter().map(|(_, line)| line).collect()
}

/// File and line in the last record of this thread.
pub fn last_place() -> (String, u32) {
    PLACE.with_borrow(Clone::clone)
}

/// How many of `lines` contain `part`.
pub fn count(lines: &[String], part: &str) -> usize {
    lines.iter().filter(|line| line.contains(part)).count()
}

/// Makes the logger panic at this thread's lines that contain `part`, or at none if it is empty.
pub fn panic_at(part: &'static str) {
    PANIC_AT.set(part);
    PANICS.set(0);
}

/// How often the logger has panicked since [`panic_at`].
pub fn panics() -> u64 {
    PANICS.get()
}
