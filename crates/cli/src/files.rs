//! Errors of file operations, with remedies.

use std::error::Error;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::path::Path;

/// Returns the error text for `path`, with a remedy for system errors.
pub(crate) fn in_file<E: Error + 'static>(path: &Path, error: &E) -> String {
    named(path, &io_error(error).map_or_else(|| error.to_string(), why))
}

/// Returns `why` after the name of its file.
pub(crate) fn named(path: &Path, why: &dyn Display) -> String {
    format!("{}: {why}", path.display())
}

/// Returns the text of a system error, and a remedy.
pub(crate) fn why(error: &io::Error) -> String {
    let remedy = match error.kind() {
        ErrorKind::NotFound => "check its name and that the directory exists",
        ErrorKind::PermissionDenied => "ask its owner for access, or name another (`ls -ld` shows who may do what)",
        ErrorKind::IsADirectory => "name a file",
        ErrorKind::NotADirectory => "a part of its path is a file: name a directory",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            "free space there, or name a file on another disk"
        }
        ErrorKind::ReadOnlyFilesystem => "name a file on another disk",
        ErrorKind::UnexpectedEof => "the compressed data is truncated; copy the file again",
        ErrorKind::InvalidInput if error.to_string().contains("corrupt") => {
            "the compressed data is damaged; copy the file again"
        }
        _ => return error.to_string(),
    };
    format!("{error}: {remedy}")
}

/// Returns the system error that caused `error`, if any.
fn io_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a io::Error> {
    std::iter::successors(Some(error), |&error| error.source()).find_map(|error| error.downcast_ref())
}

#[cfg(test)]
mod tests {
    use pinpool_replay::Trace;

    use super::*;

    #[test]
    fn system_errors_have_a_remedy() {
        for (path, words) in [("/nowhere/t.gz", "check its name"), ("/", "name a file")] {
            let path = Path::new(path);
            let text = in_file(path, &Trace::open(path).unwrap_err());
            assert!(text.starts_with(&format!("{}: ", path.display())) && text.contains(words), "{text}");
        }
    }
}
