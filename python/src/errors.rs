//! Converts errors of the crate to exceptions, which `pinpool/_errors.py` defines.

use pinpool::Error;
use pyo3::{PyErr, PyErrArguments};

mod python {
    #![allow(missing_docs)]
    use pyo3::import_exception;

    import_exception!(pinpool._errors, PinpoolError);
    import_exception!(pinpool._errors, BackendError);
    import_exception!(pinpool._errors, DeviceError);
    import_exception!(pinpool._errors, ForkError);
    import_exception!(pinpool._errors, LimitError);
    import_exception!(pinpool._errors, ReleasedError);
    import_exception!(pinpool._errors, RequestError);
    import_exception!(pinpool._errors, SettingError);
    import_exception!(pinpool._errors, SharedError);
    import_exception!(pinpool._errors, TicketError);
    import_exception!(pinpool._errors, PeerError);
    import_exception!(pinpool._errors, TimeoutError);
}
pub(crate) use python::{BackendError, DeviceError, ForkError, ReleasedError, RequestError, TimeoutError};

/// Returns the exception for `error`, with its text and its report.
pub(crate) fn exception(error: &Error) -> PyErr {
    with_text(error, (error.to_string(), error.report()))
}

/// Returns the exception for a pool error, with a different text.
pub(crate) fn with_text(error: &Error, text: impl PyErrArguments + 'static) -> PyErr {
    match () {
        () if error.is_timeout() => python::TimeoutError::new_err(text),
        () if error.is_limit() => python::LimitError::new_err(text),
        () if error.is_backend() => python::BackendError::new_err(text),
        () if error.is_invalid_request() || error.is_copy() => python::RequestError::new_err(text),
        () if error.is_setting() => python::SettingError::new_err(text),
        () if error.is_forked() => python::ForkError::new_err(text),
        () if error.is_closed() => python::ReleasedError::new_err(text),
        () if error.is_device() || error.is_capture() => python::DeviceError::new_err(text),
        () => python::PinpoolError::new_err(text),
    }
}

/// Returns the exception for an error of shared memory.
pub(crate) fn for_shared(error: &pinpool_shared_buffers::Error) -> PyErr {
    let text = error.to_string();
    match error.pool_error() {
        Some(_) if error.is_backend() => python::SharedError::new_err(text),
        Some(error) => exception(error),
        None if error.is_limit() => python::LimitError::new_err(text),
        None if error.is_invalid_request() => python::RequestError::new_err(text),
        None if error.is_invalid_ticket() => python::TicketError::new_err(text),
        None if error.is_trainer_gone() => python::PeerError::new_err(text),
        None if error.is_forked() => python::ForkError::new_err(text),
        None => python::SharedError::new_err(text),
    }
}
