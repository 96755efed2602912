//! What becomes of the device under a pool: a reset that takes its memory, a GPU that is refused access to it.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::Core;
use crate::backend::Source;

/// What the log has been told of the device.
#[derive(Debug)]
pub(super) struct DeviceWatch {
    findings: AtomicUsize,
}

impl DeviceWatch {
    /// The findings so far are logged by who made the source.
    pub(super) fn new(source: &dyn Source) -> Self {
        Self { findings: AtomicUsize::new(source.findings().len()) }
    }
}

impl Core {
    /// From the first call after a reset of the device on, no memory that the reset has taken is handed out. A slow call.
    pub(super) fn watch_device(&self, now_us: u64) {
        let source = self.backing().source();
        if !self.stock.is_gone()
            && let Some(why) = source.gone()
            && self.stock.give_up(why.clone(), now_us)
        {
            self.log.memory_gone(&why);
        }
        let findings = source.findings();
        // Relaxed: one tick at a time.
        let told = self.device.findings.swap(findings.len(), Ordering::Relaxed);
        findings.iter().skip(told).for_each(|finding| self.log.found(finding));
    }
}
