//! Calls user code (listeners, log sinks, fences, wakers, backends) and catches its panics.
//!
//! Pools make such calls in the middle of a request, a return or a drop of a buffer, and unwinding from there would leave buffers
//! uncounted. The panic hook reports the panic, and the caller continues.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls `call` and returns its result, or `None` if `call` panicked.
///
/// After a panic, the values that `call` borrows are in whatever state `call` left them in, so it must not borrow anything of the
/// pool that could be left inconsistent. The pool also queries user-defined fences through this function, because a panic between
/// related steps would leave the pool inconsistent. A panic in a wait that a user requested unwinds into the user's call.
pub fn catch_panic<R>(call: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => Some(result),
        Err(payload) => {
            // A payload other than a message is leaked, since dropping it runs user code, which may panic again.
            if !payload.is::<&'static str>() && !payload.is::<String>() {
                std::mem::forget(payload);
            }
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A payload that panics again when it is dropped.
    struct Again;

    impl Drop for Again {
        fn drop(&mut self) {
            panic!("again");
        }
    }

    #[test]
    fn a_panic_is_a_missing_result_and_its_payload_is_not_dropped() {
        assert_eq!(catch_panic(|| 7), Some(7));
        assert_eq!(catch_panic(|| std::panic::panic_any(Again)), None::<()>);
    }
}
