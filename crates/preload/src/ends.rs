//! The end of a context: its memory ends with it, and its pool is not used any more (preload-I4).

use std::ffi::c_int;

use crate::contexts::{self, Context};
use crate::driver::{Code, Driver};
use crate::{buffers, captures, log, source};

/// Ends the context with this handle by `end`.
pub(crate) fn destroy(handle: usize, end: impl FnOnce() -> Code) -> Code {
    end_by(|context| context.handle() == handle, end, |code| code == 0)
}

/// Resets a device by `reset`. Its primary context ends, and a later context with the same handle counts as a new context.
pub(crate) fn reset(device: c_int, reset: impl FnOnce() -> Code) -> Code {
    end_by(|context| context.may_be_primary_of(device), reset, |code| code == 0)
}

/// Releases the primary context of a device by `release`. The context ends with its last release.
pub(crate) fn release(device: c_int, release: impl FnOnce() -> Code) -> Code {
    let is_gone = |code| code == 0 && Driver::get().is_ok_and(|driver| !driver.has_primary(device));
    end_by(|context| context.may_be_primary_of(device), release, is_gone)
}

fn end_by(ends: impl Fn(&Context) -> bool, end: impl FnOnce() -> Code, is_gone: impl FnOnce(Code) -> bool) -> Code {
    let (code, ended) = contexts::end_by(ends, end, is_gone);
    for context in &ended {
        if let Some(pool) = context.take_pool() {
            log::context_ended(context.handle());
            log::statistics(&pool);
            // The pool is not dropped, since that would release its memory, but closed, so that it does not also log the loss.
            pool.close();
            std::mem::forget(pool);
        }
        captures::forget(context.number());
        buffers::forget(context);
        source::forget_blocks(context.number());
    }
    code
}
