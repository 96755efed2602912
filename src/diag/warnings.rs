//! What the user has to know of the machine: warnings and errors, also for a program that listens to no log.

use std::io::{self, Write};

use super::{PoolLog, log};
use crate::finding::{Finding, Level};
use pinpool_os::fork::OfProcess;
use pinpool_os::sync::plain;

impl PoolLog {
    /// Prints what the user has to know of the machine: warnings and errors.
    ///
    /// `the GPU is not used: ...`, `GPU N ... is here and not used ...` (warn): the line says what is wrong with the
    /// driver and what to do; `pinpool doctor` tells more.
    ///
    /// `memory is not page-locked: ...` (warn): raise `RLIMIT_MEMLOCK`, or say `PINPOOL_BACKEND=heap` if that is meant.
    pub(crate) fn found(&self, finding: &Finding) {
        match finding.level {
            Level::Ok | Level::Note => return,
            Level::Warning => log::warn!(machine, "{self}{finding}"),
            Level::Error => log::error!(machine, "{self}{finding}"),
        }
        if ::log::max_level() == ::log::LevelFilter::Off {
            self.tell(finding);
        }
    }

    /// Nobody listens to the log: one line on stderr for each case.
    fn tell(&self, finding: &Finding) {
        static TOLD: OfProcess<plain::Mutex<Vec<&'static str>>> = OfProcess::new(plain::Mutex::default);
        let mut told = TOLD.get().lock();
        let is_new = !told.contains(&finding.check);
        if is_new {
            told.push(finding.check);
        }
        drop(told);
        if is_new {
            let _ = writeln!(io::stderr(), "pinpool: {self}{finding}");
        }
    }
}
