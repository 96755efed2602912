//! Queues log lines for Python's `logging`; `pinpool/_log.py` forwards them.
//!
//! Any thread may log, with or without the GIL, so a line is only queued. Python forwards it at the end of a pool call, or on a
//! dedicated thread, where no lock of the pool is held.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use log::{Level, LevelFilter, Log, Metadata, Record};
use pinpool_os::fork::PerProcess;
use pyo3::prelude::*;

use crate::without_gil::{is_ending, set_ending};

/// Capacity of the queue. Lines that do not fit are dropped and counted.
const LINES_MAX: usize = 4096;

#[derive(Debug, Default)]
struct Queue {
    lines: VecDeque<(i32, String)>,
    dropped: u64,
}

#[derive(Debug, Default)]
struct Lines {
    queue: Mutex<Queue>,
    arrived: Condvar,
    is_waiting: AtomicBool,
}

/// The queue of this process.
static LINES: PerProcess<Lines> = PerProcess::new(Lines::default);

impl Lines {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all lines, as Python levels and texts.
    fn take(&self) -> Vec<(i32, String)> {
        let mut queue = self.queue();
        self.is_waiting.store(false, Ordering::Relaxed);
        let mut lines: Vec<_> = queue.lines.drain(..).collect();
        let dropped = std::mem::take(&mut queue.dropped);
        if dropped > 0 {
            let text = format!("log dropped: the queue for Python was full, so {dropped} lines were dropped");
            lines.push((python_level(Level::Warn), text));
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
        let lines = LINES.get();
        let text = record.args().to_string();
        // The exception contains this report as well, so it is logged at level debug.
        let is_raised = record.target() == "pinpool::out_of_memory";
        let line = (python_level(if is_raised { Level::Debug } else { record.level() }), text);
        let mut queue = lines.queue();
        if queue.lines.len() < LINES_MAX {
            queue.lines.push_back(line);
        } else {
            queue.dropped += 1;
        }
        lines.is_waiting.store(true, Ordering::Relaxed);
        drop(queue);
        lines.arrived.notify_one();
    }

    fn flush(&self) {}
}

/// From now on, lines are kept.
pub(crate) fn start() {
    static LOGGER: ToPython = ToPython;
    if log::set_logger(&LOGGER).is_ok() {
        log::set_max_level(LevelFilter::Debug);
    }
}

/// Returns whether this is the main thread, or in a forked child the thread that forked.
#[allow(unsafe_code)]
fn is_first_thread() -> bool {
    // SAFETY: the functions take no arguments and cannot fail.
    let thread = unsafe { libc::gettid() };
    // SAFETY: the function takes no arguments and cannot fail.
    thread == unsafe { libc::getpid() }
}

/// Forwards queued lines to Python if this is the main thread. During a call on another thread, the interpreter may exit.
/// Python before 3.14 then ends the thread, which must not be inside a Rust function. So the thread of `pinpool/_log.py`
/// forwards the lines of other threads.
pub(crate) fn flush(py: Python<'_>) -> PyResult<()> {
    let are_waiting = LINES.get().is_waiting.load(Ordering::Relaxed);
    if are_waiting && is_first_thread() {
        py.import("pinpool._log")?.call_method0("flush")?;
    }
    Ok(())
}

/// The queued lines, without waiting.
#[pyfunction]
pub(crate) fn _take_lines() -> Vec<(i32, String)> {
    LINES.get().take()
}

/// Waits until there are lines; False once the interpreter exits.
#[pyfunction]
pub(crate) fn _wait_for_lines(py: Python<'_>) -> bool {
    let lines = LINES.get();
    py.detach(|| {
        let mut queue = lines.queue();
        while queue.lines.is_empty() && !is_ending() {
            queue = lines.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        !is_ending()
    })
}

/// Called when the interpreter exits. From now on lines are dropped, and nothing calls Python.
#[pyfunction]
pub(crate) fn _stop_lines() {
    let lines = LINES.get();
    let queue = lines.queue();
    set_ending();
    drop(queue);
    lines.arrived.notify_all();
}

/// Selects whether trace lines are kept.
#[pyfunction]
pub(crate) fn _set_keeps_trace(keeps_trace: bool) {
    log::set_max_level(if keeps_trace { LevelFilter::Trace } else { LevelFilter::Debug });
}
