//! A time without room: said once when it begins and once when it is over, not at every get.

use std::time::Instant;

use crate::diag;
use crate::error::Holdings;
use crate::sync::plain::Mutex;
use crate::sync::process::{AtomicBool, Ordering};

/// Is there one, and what happened in it?
#[derive(Debug, Default)]
pub(super) struct Episode {
    /// Lets a miss that finds room pass without the lock.
    on: AtomicBool,
    tally: Mutex<Option<Tally>>,
}

#[derive(Debug)]
struct Tally {
    begun: Instant,
    gets: u64,
    fallbacks: u64,
}

impl Episode {
    /// A get of `len_bytes` found no room.
    pub(super) fn begun(&self, len_bytes: u64, why: impl FnOnce() -> String, holdings: &Holdings) {
        let mut tally = self.tally.lock();
        if let Some(tally) = &mut *tally {
            tally.gets += 1;
            return;
        }
        *tally = Some(Tally { begun: Instant::now(), gets: 1, fallbacks: 0 });
        // Relaxed: a hint; the lock decides.
        self.on.store(true, Ordering::Relaxed);
        drop(tally);
        diag::no_room(len_bytes, &why(), holdings);
    }

    /// A get was given memory that is not pinned.
    pub(super) fn fell_back(&self) {
        if let Some(tally) = &mut *self.tally.lock() {
            tally.fallbacks += 1;
        }
    }

    /// A miss found room at once.
    pub(super) fn over(&self) {
        // Relaxed, as above.
        if !self.on.load(Ordering::Relaxed) {
            return;
        }
        let Some(Tally { begun, gets, fallbacks }) = self.tally.lock().take() else { return };
        self.on.store(false, Ordering::Relaxed);
        diag::room_again(begun.elapsed(), gets, fallbacks);
    }
}
