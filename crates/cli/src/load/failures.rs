//! The progress of a load, and its failures, counted by cause: the first few of each cause are printed.

use std::collections::BTreeMap;

use indicatif::ProgressBar;
use pinpool_cli::terminal::{Terminal, Verbosity};
use pinpool_loader::{ArrivedBatch, Failure, FailureCause, Observer};

/// Number of failures printed for each cause. If the tool is verbose, all are printed.
const PRINTED: u64 = 10;

/// Advances the bar and collects failures.
pub(super) struct Reporter<'a> {
    pub(super) terminal: &'a Terminal,
    pub(super) bar: ProgressBar,
    pub(super) is_verbose: bool,
    pub(super) by_cause: BTreeMap<String, u64>,
}

impl<'a> Reporter<'a> {
    pub(super) fn new(terminal: &'a Terminal, total_bytes: u64, verbosity: Verbosity) -> Self {
        let (bar, is_verbose) = (terminal.bar(total_bytes, verbosity), verbosity == Verbosity::Verbose);
        Self { terminal, bar, is_verbose, by_cause: BTreeMap::new() }
    }

    /// Clears the bar, prints the number of failures for each cause with unprinted failures, and returns all numbers.
    pub(super) fn end(self) -> BTreeMap<String, u64> {
        let Self { terminal, bar, is_verbose, by_cause } = self;
        drop(bar);
        for (cause, count) in by_cause.iter().filter(|(_, count)| !is_verbose && **count > PRINTED) {
            terminal.message(format_args!("{count} failed: {cause}"));
        }
        by_cause
    }
}

impl Observer for Reporter<'_> {
    fn on_batch(&mut self, batch: &ArrivedBatch) {
        self.bar.inc(batch.bytes);
        if self.is_verbose {
            let ArrivedBatch { index_overall, samples, bytes, .. } = batch;
            self.terminal.message(format_args!("batch {index_overall}: {bytes} bytes, {samples} samples complete"));
        }
    }

    fn on_failure(&mut self, failure: &Failure) {
        let count = self.by_cause.entry(cause(&failure.cause)).or_default();
        *count += 1;
        if self.is_verbose || *count <= PRINTED {
            self.terminal.message(failure);
        }
        if *count == 1 {
            remedy(&failure.cause).iter().for_each(|remedy| self.terminal.message(remedy));
        }
        if !self.is_verbose && *count == PRINTED + 1 {
            self.terminal.message("further failures of this kind are counted, not printed (-v prints them)");
        }
        self.bar.set_message(format!("{} failed", self.by_cause.values().sum::<u64>()));
    }
}

/// Returns the cause without the numbers of the failure.
fn cause(cause: &FailureCause) -> String {
    match cause {
        FailureCause::Io(error) => return error.to_string(),
        FailureCause::NotAFile => "neither a regular file nor a directory",
        FailureCause::Truncated { .. } => "truncated while it was read",
        FailureCause::Grown { .. } => "grew while it was read",
        FailureCause::Tar(_) => "broken tar",
        FailureCause::Safetensors(_) => "broken safetensors",
        FailureCause::Corrupted { .. } => "differs at the destination",
        FailureCause::Pool(error) if error.is_limit() => "no room for the batch within the limit",
        FailureCause::Pool(error) if error.is_backend() => "no memory for the batch",
        FailureCause::Pool(_) => "the batch was not copied",
        other => return other.to_string(),
    }
    .to_owned()
}

fn remedy(cause: &FailureCause) -> Option<&'static str> {
    match cause {
        FailureCause::Io(error) if error.raw_os_error() == Some(libc::EMFILE) => {
            Some("raise the limit on open files (`ulimit -n`), or lower --threads and --streams")
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
