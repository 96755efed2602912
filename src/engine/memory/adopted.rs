//! Memory that a user pinned, or did not: lent to the pool for one buffer, and returned by a call.

use std::fmt;
use std::ptr::NonNull;

use pinpool_os::unwind::caught;

/// Memory of a user for one buffer.
pub(crate) struct Adopted {
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
    pub(crate) is_pinned: bool,
    /// Called once no copy uses the memory; never if that cannot be known.
    pub(crate) on_return: Box<dyn FnOnce() + Send>,
}

impl Adopted {
    /// No copy uses the memory. The call is of the user's code, so no lock may be held.
    pub(in crate::engine) fn release(self) {
        let _panicked = caught(self.on_return);
    }
}

impl fmt::Debug for Adopted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adopted").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}
