//! Looks after a pool whose program may fall silent (`PINPOOL_POLL`): one thread that calls `poll` twice a second.
//!
//! It holds no handle, so it keeps neither the pool nor its memory: it sleeps on a channel whose other end hangs on the
//! door, and ends when that is gone.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use super::core::Core;

const EVERY: Duration = Duration::from_millis(500);

/// The end of the channel that the door keeps.
#[derive(Debug)]
pub(crate) struct Poller {
    _until_dropped: Sender<Infallible>,
}

impl Poller {
    /// Starts one for `core`; without a thread to be had the pool does without, and says so.
    pub(crate) fn start(core: &Arc<Core>) -> Option<Self> {
        let (until_dropped, sleep) = channel::<Infallible>();
        let (log, core) = (core.log.clone(), Arc::downgrade(core));
        let poll = move || {
            while matches!(sleep.recv_timeout(EVERY), Err(RecvTimeoutError::Timeout)) {
                let Some(core) = core.upgrade() else { return };
                core.poll();
            }
        };
        match thread::Builder::new().name("pinpool-poll".to_owned()).spawn(poll) {
            Ok(_) => Some(Self { _until_dropped: until_dropped }),
            Err(error) => {
                log.no_poller(&error);
                None
            }
        }
    }
}
