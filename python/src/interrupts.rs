//! Waits that signals such as Ctrl-C interrupt.

use std::time::{Duration, Instant};

use pyo3::{PyResult, Python};

use crate::log;

/// Longest wait without a check for signals.
pub(crate) const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Calls `step` without the GIL, each time with a part of `timeout`, until it returns a value or the timeout expires. Between
/// the calls, forwards log lines and checks for signals.
pub(crate) fn wait_interruptibly<T: Send, E: Send>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut step: impl FnMut(Duration) -> Result<Option<T>, E> + Send,
) -> PyResult<Result<Option<T>, E>> {
    let begun = Instant::now();
    loop {
        let remaining = timeout.map_or(SIGNAL_CHECK_INTERVAL, |timeout| timeout.saturating_sub(begun.elapsed()));
        let outcome = py.detach(|| step(remaining.min(SIGNAL_CHECK_INTERVAL)));
        log::flush(py)?;
        match outcome {
            Ok(None) if timeout.is_none_or(|timeout| begun.elapsed() < timeout) => py.check_signals()?,
            ended => return Ok(ended),
        }
    }
}
