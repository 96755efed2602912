//! The failures of a load, grouped by cause: the first few of each cause are printed, the others are counted.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use pinpool_loader::{Failure, FailureCause};
use pinpool_os::host::limits::process_limits;

use pinpool_cli::terminal::Terminal;

/// Failures of one cause that are printed in full.
const PRINTED: u64 = 10;
/// Names in the summary of a cause.
const NAMED: usize = 3;

/// Failures by cause.
#[derive(Debug, Default)]
pub(crate) struct Failures {
    by_cause: BTreeMap<String, Group>,
    /// Print every failure.
    all: bool,
}

#[derive(Debug, Default)]
struct Group {
    count: u64,
    first_names: Vec<String>,
    remedy: Option<String>,
}

impl Failures {
    pub(crate) fn new(all: bool) -> Failures {
        Failures { by_cause: BTreeMap::new(), all }
    }

    pub(crate) fn add(&mut self, failure: &Failure, terminal: &Terminal) {
        let group = self.by_cause.entry(cause(&failure.cause)).or_default();
        group.count += 1;
        if group.first_names.len() < NAMED {
            group.first_names.push(failure.name.clone());
        }
        if group.count == 1 {
            group.remedy = remedy(&failure.cause);
        }
        if self.all || group.count <= PRINTED {
            terminal.message(failure);
        } else if group.count == PRINTED + 1 {
            terminal.message("further failures of this kind are counted, not printed (-v prints them)");
        }
    }

    /// Prints a summary of each cause with unprinted failures or with a remedy.
    pub(crate) fn summarize(&self, terminal: &Terminal) {
        for (cause, Group { count, first_names, remedy }) in &self.by_cause {
            if remedy.is_none() && (self.all || *count <= PRINTED) {
                continue;
            }
            let mut line = format!("{count} failed: {cause}");
            if *count > NAMED as u64 {
                line += &format!("; the first: {}", first_names.join(", "));
            }
            if let Some(remedy) = remedy {
                line += &format!("; {remedy}");
            }
            terminal.message(line);
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.by_cause.values().map(|group| group.count).sum()
    }

    /// The number of failures of each cause.
    pub(crate) fn by_cause(&self) -> impl Iterator<Item = (&str, u64)> {
        self.by_cause.iter().map(|(cause, group)| (cause.as_str(), group.count))
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

fn remedy(cause: &FailureCause) -> Option<String> {
    match cause {
        FailureCause::Io(error) => io_remedy(error),
        FailureCause::Pool(error) if error.is_limit() || error.is_backend() => {
            Some("lower --batch-bytes, or give the pool more memory".to_owned())
        }
        _ => None,
    }
}

fn io_remedy(error: &io::Error) -> Option<String> {
    match error.raw_os_error() {
        Some(libc::EMFILE) => {
            let limit = process_limits(Path::new("/")).open_files;
            let limit = limit.map_or_else(String::new, |limit| format!(", now {limit}"));
            Some(format!("raise the limit on open files (`ulimit -n`{limit}), or lower --workers and --streams"))
        }
        Some(libc::ENFILE) => Some("the system is out of file descriptors: raise fs.file-max".to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_descriptors_names_the_limit() {
        let too_many = FailureCause::Io(io::Error::from_raw_os_error(libc::EMFILE));
        let remedy = remedy(&too_many).unwrap();
        let limit = process_limits(Path::new("/")).open_files.unwrap();
        assert!(remedy.contains(&format!("`ulimit -n`, now {limit})")), "{remedy}");
        assert_eq!(cause(&too_many), "Too many open files (os error 24)");
        let missing = FailureCause::Io(io::Error::from_raw_os_error(libc::ENOENT));
        assert_eq!(super::remedy(&missing), None);
    }
}
