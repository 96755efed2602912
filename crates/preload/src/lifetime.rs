//! Whether a context still exists. Running calls that use the context complete first: its end waits for them.

use pinpool_os::sync::unmodeled::{Condvar, Mutex};

/// The uses of a context, and whether it has ended.
#[derive(Debug, Default)]
pub(crate) struct Lifetime {
    state: Mutex<LifetimeState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct LifetimeState {
    users: usize,
    is_exclusive: bool,
    is_gone: bool,
}

/// A use of a context. The use ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Use<'context>(&'context Lifetime);

/// The use of a context by the thread that ends it. While this exists, nothing else uses the context, and new uses wait.
#[derive(Debug)]
pub(crate) struct ExclusiveUse<'context>(&'context Lifetime);

impl Lifetime {
    /// Begins a use of the context. Returns `None` if the context is gone. A thread that uses the context may enter again
    /// while another thread waits to end it, since a driver call may call a hook.
    pub(crate) fn enter(&self) -> Option<Use<'_>> {
        let mut state = self.state.lock();
        while state.is_exclusive {
            state = self.changed.wait(state);
        }
        if state.is_gone {
            return None;
        }
        state.users += 1;
        Some(Use(self))
    }

    /// Waits until no call uses the context and no other thread is ending it. Then new uses wait until the result is dropped.
    pub(crate) fn begin_exclusive(&self) -> ExclusiveUse<'_> {
        let mut state = self.state.lock();
        while state.users > 0 || state.is_exclusive {
            state = self.changed.wait(state);
        }
        state.is_exclusive = true;
        ExclusiveUse(self)
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.state.lock().is_gone
    }
}

impl ExclusiveUse<'_> {
    /// Records that the context has ended.
    pub(crate) fn mark_gone(&self) {
        self.0.state.lock().is_gone = true;
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        self.0.state.lock().users -= 1;
        self.0.changed.notify_all();
    }
}

impl Drop for ExclusiveUse<'_> {
    fn drop(&mut self) {
        self.0.state.lock().is_exclusive = false;
        self.0.changed.notify_all();
    }
}
