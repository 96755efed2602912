//! Converts Python arguments to the types of the crate.

use std::time::Duration;

use pinpool::unstable::config::text::{parse_bytes, parse_duration};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt, PyString};

use crate::errors::RequestError;

/// A wait without a limit: 30 years.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(1_000_000_000);

/// Returns the argument `name` as text.
pub(crate) fn text(name: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    value.extract().map_err(|_| PyTypeError::new_err(format!("{name} must be a str, not {}", shown(value))))
}

fn shown(value: &Bound<'_, PyAny>) -> String {
    value.repr().map_or_else(|_| "this".to_owned(), |text| text.to_string())
}

/// Parses the argument `name`, a number of bytes: an int, or text such as "64MiB".
#[pyfunction(name = "_size")]
pub(crate) fn size(name: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    let wrong = || {
        let text = shown(value);
        PyTypeError::new_err(format!("invalid size {name}={text}: must be an int, or text such as \"64MiB\""))
    };
    if value.is_instance_of::<PyBool>() {
        return Err(wrong());
    }
    if let Ok(int) = value.cast::<PyInt>()
        && let Ok(size) = int.extract()
    {
        return Ok(size);
    }
    let too_many =
        || RequestError::new_err(format!("invalid size {name}={value}: must be at most {} bytes", isize::MAX));
    if let Ok(text) = value.cast::<PyString>() {
        let bytes =
            parse_bytes(&text.to_string()).map_err(|error| RequestError::new_err(format!("{name}: {error}")))?;
        return usize::try_from(bytes).map_err(|_| too_many());
    }
    let index = value.py().import("operator")?.call_method1("index", (value,)).map_err(|_| wrong())?;
    if index.lt(0)? {
        return Err(RequestError::new_err(format!("invalid size {name}={index}: must be 0 or more")));
    }
    index.extract().map_err(|_| too_many())
}

/// The seconds of a time.
#[pyfunction]
pub(crate) fn _seconds(time: &Bound<'_, PyAny>) -> PyResult<f64> {
    seconds(time).map(|time| time.as_secs_f64())
}

/// Parses the `timeout` of a request. Returns `None` for "wait", which selects the setting `wait` of the pool.
pub(crate) fn request_timeout(value: &Bound<'_, PyAny>) -> PyResult<Option<Duration>> {
    let is_wait = value.cast::<PyString>().is_ok_and(|text| text == "wait");
    if is_wait { Ok(None) } else { seconds(value).map(Some) }
}

/// Parses a time: seconds, a timedelta, text such as "500ms", or None or "none" for no limit.
pub(crate) fn seconds(value: &Bound<'_, PyAny>) -> PyResult<Duration> {
    if value.is_none() {
        return Ok(LONGEST_WAIT);
    }
    if let Ok(text) = value.cast::<PyString>() {
        let text = text.to_string();
        let wait = if text.trim().eq_ignore_ascii_case("none") { Ok(LONGEST_WAIT) } else { parse_duration(&text) };
        let wait = wait.map_err(|error| RequestError::new_err(format!("timeout: {error}")))?;
        return Ok(wait.min(LONGEST_WAIT));
    }
    let total = value.getattr_opt("total_seconds")?.map(|total| total.call0()).transpose()?;
    let seconds = total.as_ref().unwrap_or(value).extract::<f64>().ok();
    let seconds = seconds.filter(|_| !value.is_instance_of::<PyBool>()).ok_or_else(|| {
        let text = shown(value);
        PyTypeError::new_err(format!(
            "timeout must be a number of seconds, a timedelta or text such as \"500ms\", not {text}"
        ))
    })?;
    if seconds.is_nan() || seconds < 0.0 {
        return Err(RequestError::new_err(format!("timeout must be 0 or more seconds, not {seconds}")));
    }
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(LONGEST_WAIT).min(LONGEST_WAIT))
}
