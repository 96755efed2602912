//! Calls user code (listeners, log sinks, fences, wakers, backends) and catches its panics.
//!
//! Such calls are made during a request, a return or a drop of a buffer. An unwinding thread would leave uncounted buffers there.
//! The panic hook has reported the panic; the caller continues.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls `call`; `None` if it panicked.
///
/// After a panic, borrowed values are in whatever state that code left them, so pass nothing of the pool that could be left
/// inconsistent. For the same reason, user-defined fences are called through this function, between related steps.
pub fn caught<R>(call: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => Some(result),
        Err(payload) => {
            // The drop of any other payload than a message is the user's code too.
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
        assert_eq!(caught(|| 7), Some(7));
        assert_eq!(caught(|| std::panic::panic_any(Again)), None::<()>);
    }
}
