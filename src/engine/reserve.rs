//! Memory pinned at once and kept, and pools that share memory.

use std::cell::Cell;
use std::sync::Arc;

use super::core::Core;
use super::supply::{Refusal, Supply};
use crate::budget::Budget;
use crate::error::{ErrorKind, Result};

/// Progress is reported so often.
const REPORTS: u64 = 4;

impl Core {
    /// Pins `bytes` and keeps them (rule 10). A slow call.
    pub(crate) fn prewarm(&self, bytes: u64) -> Result<()> {
        let Supply::Shared(ground) = &self.supply else {
            let why = "needs PINPOOL_PRESET=adaptive: under tensorflow each buffer is an allocation of its own";
            return Err(
                ErrorKind::Setting { name: "PINPOOL_RESERVE", value: bytes.to_string(), why: why.to_owned() }.into()
            );
        };
        if bytes == 0 {
            return Ok(());
        }
        let reported = Cell::new(0);
        let progress = |done_bytes: u64| {
            let part = u128::from(done_bytes) * u128::from(REPORTS) / u128::from(bytes);
            if part > reported.get() {
                reported.set(part);
                self.log.reserving(done_bytes, bytes);
            }
        };
        let mut added = ground.add_reserve(bytes, &progress);
        if let (Err(Refusal::Ceiling { needed_bytes }), Some(max_bytes)) = (&added, ground.max_bytes())
            && *needed_bytes <= max_bytes
        {
            // What is idle makes way.
            self.trim(max_bytes - needed_bytes);
            added = ground.add_reserve(bytes, &progress);
        }
        let (start, len) = added.map_err(|refusal| {
            let len = usize::try_from(bytes).unwrap_or(usize::MAX);
            self.refused(len, refusal)
        })?;
        self.log.reserved(bytes, || self.source().page_tiers(start, len), self.numa_node());
        Ok(())
    }

    /// A pool over the same `supply` with a ceiling of its own.
    pub(crate) fn partition(&self, name: &str, supply: Supply, share: Arc<Budget>) -> Arc<Self> {
        let stand_in = self.stand_in.as_ref().map(|_| crate::backend::HeapSource::new());
        let log = Arc::new(self.log.partition(name));
        Self::new(self.config.clone(), supply, share, stand_in, self.time.shared(), log)
    }
}
