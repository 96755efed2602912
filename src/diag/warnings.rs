//! Problems of the machine: warnings and errors, also for a program without a logger.

use std::io::{self, Write};

use super::{PoolLog, log};
use crate::finding::{Finding, Level};
use pinpool_os::fork::OfProcess;
use pinpool_os::sync::plain;

impl PoolLog {
    /// Logs problems of the machine; without a logger, once for each kind to standard error.
    pub(crate) fn found(&self, finding: &Finding) {
        match finding.level {
            Level::Ok | Level::Note => return,
            Level::Warning => self.found_warning(finding),
            Level::Error => self.found_error(finding),
        }
        if ::log::max_level() == ::log::LevelFilter::Off {
            self.tell(finding);
        }
    }

    /// The GPU is not used, memory is not pinned, or similar. To do: see `pinpool doctor`.
    fn found_warning(&self, finding: &Finding) {
        log::warn!(machine, "{self}machine: {finding}");
    }

    /// The requested GPU or backend cannot be used. To do: see `pinpool doctor`.
    fn found_error(&self, finding: &Finding) {
        log::error!(machine, "{self}machine: {finding}");
    }

    /// One line on standard error for each kind of problem.
    fn tell(&self, finding: &Finding) {
        static TOLD: OfProcess<plain::Mutex<Vec<&'static str>>> = OfProcess::new(plain::Mutex::default);
        let mut told = TOLD.get().lock();
        let is_new = !told.contains(&finding.check);
        if is_new {
            told.push(finding.check);
        }
        drop(told);
        if is_new {
            let _ = writeln!(io::stderr(), "pinpool: {self}machine: {finding}");
        }
    }
}
