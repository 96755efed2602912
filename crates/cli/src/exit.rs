//! The exit statuses of the tool.

use std::error::Error;
use std::fmt::Display;

/// Exit status of a command that has printed why it failed. clap exits with 2 for an invalid command line.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("the reason is printed above")]
pub enum ExitError {
    Failure = 1,
    /// Settings contradict each other or cannot be met.
    Settings = 2,
    /// `load --require-gpu` found no GPU, or no memory that is pinned for a GPU.
    NoGpu = 3,
    /// `load` found no file.
    NothingToLoad = 4,
    /// `run` cannot execute the program (126) or does not find it (127), by the shells' convention.
    #[cfg(target_os = "linux")]
    NotExecutable = 126,
    #[cfg(target_os = "linux")]
    NotFound = 127,
    /// The command was ended by Ctrl-C. By the shells' convention, the status is 128 plus the signal's number.
    Interrupted = 130,
}

/// The reason for a failure, and the exit status.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Reason {
    pub(crate) status: ExitError,
    text: String,
}

impl ExitError {
    pub fn because(self, why: impl Display) -> Box<dyn Error> {
        Box::new(Reason { status: self, text: why.to_string() })
    }

    pub fn of(error: &pinpool::Error) -> Self {
        if error.is_setting() { Self::Settings } else { Self::Failure }
    }
}
