//! The exit statuses of the tool.

/// Exit status of a subcommand that did not succeed. clap itself exits with 2 for a wrong command line.
#[derive(Debug, Clone, Copy)]
pub enum ExitError {
    Failure = 1,
    /// Settings contradict each other or cannot be met.
    Settings = 2,
    /// `load --require-gpu` without a GPU, or with memory that is not pinned for it.
    NoGpu = 3,
    /// `load` without a file to load.
    NothingToLoad = 4,
    /// `run`: by the shells' convention, the program cannot be executed, or is not there.
    #[cfg(target_os = "linux")]
    NotExecutable = 126,
    #[cfg(target_os = "linux")]
    NotFound = 127,
    /// Ctrl-C, by the shells' convention: 128 plus the signal's number.
    Interrupted = 130,
}

impl ExitError {
    pub fn of(error: &pinpool::Error) -> Self {
        if error.is_setting() { Self::Settings } else { Self::Failure }
    }
}
