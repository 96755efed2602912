//! How far a reserve has come that is pinned while the pool is in use.

use std::thread::ThreadId;
use std::time::Instant;

use crate::backend::SourceError;
use crate::shared_limit::Want;
use pinpool_os::sync::plain::{Condvar, Mutex};

/// The pinning of a reserve while the pool is in use.
#[derive(Debug, Default)]
pub(super) struct Reserve {
    pub(super) progress: Mutex<Progress>,
    /// Notified when the progress changes.
    pub(super) changed: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct Progress {
    pub(super) has_thread: bool,
    /// Who is in a step.
    pub(super) stepper: Option<ThreadId>,
    pub(super) is_cancelled: bool,
    /// Why it stopped.
    pub(super) stopped: Option<SourceError>,
    /// Bytes that the next step needs and the limit had no room for.
    pub(super) lacks_bytes: Option<u64>,
    /// Of what is to come, what the shared limit says that this arena wants of other owners.
    pub(super) want: Want,
    /// The log has said so.
    pub(super) has_told_lack: bool,
    pub(super) begun: Option<Begin>,
    /// Quarters of what was asked for that the log has named.
    pub(super) reported: u128,
}

/// When the pinning began, on two clocks, and what was there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Begin {
    pub(super) at: Instant,
    pub(super) now_us: u64,
    pub(super) pinned_bytes: u64,
}

impl Progress {
    /// No step is due.
    pub(super) fn is_over(&self) -> bool {
        self.is_cancelled || self.stopped.is_some() || self.lacks_bytes.is_some()
    }
}
