//! Log lines on their way to Python's `logging`: `pinpool/_log.py` takes them from here.
//!
//! A line is logged on any thread, which may hold the interpreter's lock or not, so it is only put into a queue. Python takes
//! it out at the end of a call of the pool, or on a thread of its own, and there the lock is held and no call of the pool runs.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use log::{Level, LevelFilter, Log, Metadata, Record};
use pyo3::prelude::*;

use crate::unlocked::{is_ending, set_ending};

/// Lines that wait for Python at most; more are counted and lost.
const LINES_MAX: usize = 4096;

#[derive(Debug, Default)]
struct Queue {
    lines: VecDeque<(i32, String)>,
    lost: u64,
}

#[derive(Debug, Default)]
struct Lines {
    queue: Mutex<Queue>,
    arrived: Condvar,
    is_waiting: AtomicBool,
}

/// Never freed; a child of fork has a new one, since the lock of the old one may be held by a thread that does not exist there.
static LINES: AtomicPtr<Lines> = AtomicPtr::new(std::ptr::null_mut());

impl Lines {
    fn replace() {
        LINES.store(Box::leak(Box::default()), Ordering::Release);
    }

    #[allow(unsafe_code)]
    fn of_process() -> Option<&'static Self> {
        // SAFETY: null, or leaked by `replace` and never freed.
        unsafe { LINES.load(Ordering::Acquire).as_ref() }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All lines, as levels of Python and texts.
    fn take(&self) -> Vec<(i32, String)> {
        let mut queue = self.queue();
        self.is_waiting.store(false, Ordering::Relaxed);
        let mut lines: Vec<_> = queue.lines.drain(..).collect();
        let lost = std::mem::take(&mut queue.lost);
        if lost > 0 {
            lines.push((python_level(Level::Warn), format!("{lost} log lines came too fast for Python and were lost")));
        }
        lines
    }
}

fn python_level(level: Level) -> i32 {
    match level {
        Level::Error => 40,
        Level::Warn => 30,
        Level::Info => 20,
        Level::Debug => 10,
        Level::Trace => 5,
    }
}

struct ToPython;

impl Log for ToPython {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("pinpool") && !is_ending()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let Some(lines) = Lines::of_process() else { return };
        let text = record.args().to_string();
        // The exception that is raised carries this report.
        let is_raised = text.contains("\nusage of device ");
        let line = (python_level(if is_raised { Level::Debug } else { record.level() }), text);
        let mut queue = lines.queue();
        match queue.lines.len() < LINES_MAX {
            true => queue.lines.push_back(line),
            false => queue.lost += 1,
        }
        lines.is_waiting.store(true, Ordering::Relaxed);
        drop(queue);
        lines.arrived.notify_one();
    }

    fn flush(&self) {}
}

/// Makes the queue, once. From then on lines are kept.
pub(crate) fn start() {
    static LOGGER: ToPython = ToPython;
    if Lines::of_process().is_none() {
        Lines::replace();
    }
    if log::set_logger(&LOGGER).is_ok() {
        log::set_max_level(LevelFilter::Debug);
    }
}

/// Whether this is the thread that the process began with, or what a child of fork has in its place.
#[allow(unsafe_code)]
fn is_first_thread() -> bool {
    // SAFETY: they take nothing and cannot fail.
    let thread = unsafe { libc::gettid() };
    // SAFETY: as above.
    thread == unsafe { libc::getpid() }
}

/// Passes the lines that wait to Python, at the end of a call on the first thread: there the interpreter's end cannot come
/// meanwhile. On another thread it may, and before Python 3.14 it ends the thread, which must not be inside a function of
/// Rust that called Python. Lines of those come by the thread of `pinpool/_log.py`.
pub(crate) fn flush(py: Python<'_>) -> PyResult<()> {
    let are_waiting = Lines::of_process().is_some_and(|lines| lines.is_waiting.load(Ordering::Relaxed));
    if are_waiting && is_first_thread() {
        py.import("pinpool._log")?.call_method0("flush")?;
    }
    Ok(())
}

/// The lines that wait, without waiting for any.
#[pyfunction]
pub(crate) fn _take_lines() -> Vec<(i32, String)> {
    Lines::of_process().map_or_else(Vec::new, Lines::take)
}

/// Waits until there are lines; False once the interpreter is ending.
#[pyfunction]
pub(crate) fn _next_lines(py: Python<'_>) -> bool {
    let Some(lines) = Lines::of_process() else { return false };
    py.detach(|| {
        let mut queue = lines.queue();
        while queue.lines.is_empty() && !is_ending() {
            queue = lines.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        !is_ending()
    })
}

/// The interpreter is ending: lines are dropped, and nothing calls Python from now on.
#[pyfunction]
pub(crate) fn _stop_lines() {
    let Some(lines) = Lines::of_process() else { return set_ending() };
    let queue = lines.queue();
    set_ending();
    drop(queue);
    lines.arrived.notify_all();
}

/// Whether lines of the level trace are wanted, which there are many of.
#[pyfunction]
pub(crate) fn _want_trace(is_wanted: bool) {
    log::set_max_level(if is_wanted { LevelFilter::Trace } else { LevelFilter::Debug });
}

/// In a child of fork.
#[pyfunction]
pub(crate) fn _lines_after_fork() {
    if Lines::of_process().is_some() {
        Lines::replace();
    }
}
