//! The wrapper of every function: turns failures into a status and a text, and catches panics.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use crate::status::{self, pp_status};

/// The reason that a call failed: a status and a text.
#[derive(Debug)]
pub(crate) struct Failure {
    status: pp_status,
    text: String,
}

impl Failure {
    pub(crate) fn new(status: pp_status, text: impl Into<String>) -> Self {
        Self { status, text: text.into() }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(pp_status::PP_INVALID_ARGUMENT, text)
    }
}

impl From<pinpool::Error> for Failure {
    fn from(error: pinpool::Error) -> Self {
        Self::new(status::status_of(&error), error.report())
    }
}

thread_local! {
    /// The last failure of this thread.
    static LAST: RefCell<Option<(pp_status, CString)>> = const { RefCell::new(None) };
}

/// Runs the body of a C function. Stores a failure or a panic as the last error of this thread, and returns the status.
#[inline]
pub(crate) fn guarded(run: impl FnOnce() -> Result<pp_status, Failure>) -> pp_status {
    guarded_with(pp_status::PP_INTERNAL, run)
}

/// As [`guarded`], with the status after a panic.
#[inline]
pub(crate) fn guarded_with(after_panic: pp_status, run: impl FnOnce() -> Result<pp_status, Failure>) -> pp_status {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(status)) => status,
        Ok(Err(failure)) => set_last_error(failure),
        Err(payload) => {
            let text = payload.downcast_ref::<&'static str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
            let failure = Failure::new(after_panic, format!("internal error, please report it: {text}"));
            // Dropping the payload may panic too.
            std::mem::forget(payload);
            set_last_error(failure)
        }
    }
}

/// Stores the failure as the last error of this thread, and returns its status.
#[cold]
fn set_last_error(failure: Failure) -> pp_status {
    let Failure { status, text } = failure;
    let text = text_for_c(&text);
    // A thread that is exiting stores no last error.
    let _ = LAST.try_with(|last| last.try_borrow_mut().map(|mut last| *last = Some((status, text))));
    status
}

/// Returns the text as a C string, without its NUL bytes.
pub(crate) fn text_for_c(text: &str) -> CString {
    CString::new(text.bytes().filter(|&byte| byte != 0).collect::<Vec<_>>()).unwrap_or_default()
}

/// The error text of the last failed call on this thread (UTF-8, one or more lines), or "" if none has failed. Successful calls
/// do not change it. If `status` is not NULL, stores the code of that call there, or PP_OK.
///
/// Never NULL. Valid until the next failed call on this thread, or the thread's end.
///
/// # Safety
///
/// Each pointer is null, or valid as its type and the header say (capi-P1).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pp_last_error(status: *mut pp_status) -> *const c_char {
    let found = LAST.try_with(|last| last.try_borrow().ok()?.as_ref().map(|(code, text)| (*code, text.as_ptr())));
    let (code, text) = found.ok().flatten().unwrap_or((pp_status::PP_OK, c"".as_ptr()));
    if let Some(status) = NonNull::new(status) {
        // SAFETY: capi-P1.
        unsafe { status.write(code) };
    }
    text
}

/// Writes a result to the out-pointer that the caller passed.
pub(crate) fn store<T>(out: NonNull<T>, value: T) {
    // SAFETY: capi-P1.
    unsafe { out.write(value) };
}

/// Returns the argument `name`, or fails if it is null.
pub(crate) fn non_null<T>(pointer: *mut T, name: &str) -> Result<NonNull<T>, Failure> {
    NonNull::new(pointer).ok_or_else(|| Failure::argument(format!("the argument `{name}` is NULL")))
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    fn last_text() -> String {
        // SAFETY: NULL is allowed.
        let text = unsafe { pp_last_error(ptr::null_mut()) };
        // SAFETY: never null, and ends in 0.
        unsafe { std::ffi::CStr::from_ptr(text) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn a_panic_becomes_a_status_with_its_message() {
        assert_eq!(guarded(|| panic!("number {}", 7)), pp_status::PP_INTERNAL);
        assert!(last_text().ends_with("number 7"), "{}", last_text());
        assert_eq!(guarded(|| std::panic::panic_any(7)), pp_status::PP_INTERNAL);
        assert!(last_text().ends_with("no message"), "{}", last_text());
        assert_eq!(guarded(|| Ok(pp_status::PP_OK)), pp_status::PP_OK);
    }

    #[test]
    fn a_nul_byte_does_not_truncate_a_text() {
        assert_eq!(guarded(|| Err(Failure::argument("a\0b"))), pp_status::PP_INVALID_ARGUMENT);
        assert_eq!(last_text(), "ab");
    }
}
