//! Converts errors of the crate to exceptions, which `pinpool/_errors.py` defines.

use pinpool::Error;
use pyo3::{PyErr, PyErrArguments};

mod python {
    #![allow(missing_docs)]
    use pyo3::import_exception;

    macro_rules! import {
        ($($name:ident)+) => { $(import_exception!(pinpool._errors, $name);)+ };
    }
    import! { PinpoolError BackendError DeviceError ForkError LimitError ReleasedError RequestError SettingError SharedError }
    import! { ClosedError TicketError TrainerUnavailableError TimeoutError }
}
pub(crate) use python::{BackendError, ClosedError, DeviceError, ForkError, ReleasedError, RequestError, TimeoutError};

/// A constructor of exceptions.
type NewErr<T> = fn(T) -> PyErr;

/// Returns the exception for `error`, with its text and its report.
pub(crate) fn exception(error: &Error) -> PyErr {
    with_text(error, (error.to_string(), error.report()))
}

/// Returns the exception for a pool error, with a different text.
pub(crate) fn with_text<T: PyErrArguments + 'static>(error: &Error, text: T) -> PyErr {
    // The first kind that applies.
    let kinds: [(bool, NewErr<T>); 8] = [
        (error.is_timeout(), python::TimeoutError::new_err),
        (error.is_limit(), python::LimitError::new_err),
        (error.is_backend(), python::BackendError::new_err),
        (error.is_invalid_request() || error.is_copy_refused() || error.is_unmapped(), python::RequestError::new_err),
        (error.is_setting(), python::SettingError::new_err),
        (error.is_forked(), python::ForkError::new_err),
        (error.is_closed(), python::ClosedError::new_err),
        (error.is_device_failed() || error.is_capturing_stream(), python::DeviceError::new_err),
    ];
    let kind = kinds.into_iter().find_map(|(applies, new_err)| applies.then_some(new_err));
    kind.unwrap_or(python::PinpoolError::new_err)(text)
}

/// Returns the exception for an error of shared memory.
pub(crate) fn shared_exception(error: pinpool_shared_buffers::Error) -> PyErr {
    let text = error.to_string();
    match error.pool_error() {
        Some(_) if error.is_backend() => python::SharedError::new_err(text),
        Some(error) => exception(error),
        None if error.is_limit() => python::LimitError::new_err(text),
        None if error.is_invalid_request() => python::RequestError::new_err(text),
        None if error.is_invalid_ticket() => python::TicketError::new_err(text),
        None if error.is_trainer_unavailable() => python::TrainerUnavailableError::new_err(text),
        None if error.is_forked() => python::ForkError::new_err(text),
        None => python::SharedError::new_err(text),
    }
}
