//! The failures of a load, counted by cause: the first few of each cause are printed.

use std::collections::BTreeMap;

use pinpool_loader::{Failure, FailureCause};

use pinpool_cli::terminal::Terminal;

/// Number of failures printed for each cause.
const PRINTED: u64 = 10;

/// Failures by cause.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    pub(crate) by_cause: BTreeMap<String, u64>,
    /// Print every failure.
    pub(crate) all: bool,
}

impl Failures {
    pub(crate) fn add(&mut self, failure: &Failure, terminal: &Terminal) {
        let count = self.by_cause.entry(cause(&failure.cause)).or_default();
        *count += 1;
        if self.all || *count <= PRINTED {
            terminal.message(failure);
        }
        if *count == 1 {
            remedy(&failure.cause).iter().for_each(|remedy| terminal.message(remedy));
        }
        if !self.all && *count == PRINTED + 1 {
            terminal.message("further failures of this kind are counted, not printed (-v prints them)");
        }
    }

    /// Prints the number of failures for each cause with unprinted failures.
    pub(crate) fn summarize(&self, terminal: &Terminal) {
        for (cause, count) in self.by_cause.iter().filter(|(_, count)| !self.all && **count > PRINTED) {
            terminal.message(format_args!("{count} failed: {cause}"));
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.by_cause.values().sum()
    }
}

/// The cause without the numbers of the failure.
fn cause(cause: &FailureCause) -> String {
    match cause {
        FailureCause::Io(error) => return error.to_string(),
        FailureCause::NotAFile => "neither a regular file nor a directory",
        FailureCause::Truncated { .. } => "truncated while it was read",
        FailureCause::Grown { .. } => "grew while it was read",
        FailureCause::Tar(_) => "broken tar",
        FailureCause::Safetensors(_) => "broken safetensors",
        FailureCause::Corrupted { .. } => "differs at the destination",
        FailureCause::Pool(error) if error.is_limit() => "the batch exceeds the pool limit",
        FailureCause::Pool(error) if error.is_backend() => "no memory for the batch",
        FailureCause::Pool(_) => "the batch was not copied",
        other => return other.to_string(),
    }
    .to_owned()
}

fn remedy(cause: &FailureCause) -> Option<&'static str> {
    match cause {
        FailureCause::Io(error) if error.raw_os_error() == Some(libc::EMFILE) => {
            Some("raise the limit on open files (`ulimit -n`), or lower --workers and --streams")
        }
        FailureCause::Pool(error) if error.is_limit() || error.is_backend() => {
            Some("lower --batch-bytes, or give the pool more memory")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn a_lack_of_descriptors_has_a_remedy() {
        let too_many = FailureCause::Io(io::Error::from_raw_os_error(libc::EMFILE));
        assert!(remedy(&too_many).is_some_and(|remedy| remedy.contains("`ulimit -n`")));
    }
}
