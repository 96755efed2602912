//! The names of shared limits, and the location of their files.

use std::path::{Path, PathBuf};

/// The directory of the files.
const DIRECTORY: &str = "/dev/shm";

/// Returns why `name` is not a valid name of a shared limit, or `None` if it is valid.
pub fn problem_of(name: &str) -> Option<&'static str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let is_name = name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(is_plain);
    (!is_name || name.len() > 64).then_some(
        "not the name of a shared limit (none, auto, or up to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or digit)",
    )
}

/// Returns the path of the file of this user's shared limit `name`.
pub(super) fn path_of(name: &str) -> PathBuf {
    Path::new(DIRECTORY).join(format!("{}{name}", prefix()))
}

/// Returns the names of this user's shared limits, sorted. If the last member was killed, its file stays and its name is included.
pub fn names() -> Vec<String> {
    let prefix = prefix();
    let entries = std::fs::read_dir(DIRECTORY).into_iter().flatten().flatten();
    let name = |entry: std::fs::DirEntry| Some(entry.file_name().to_str()?.strip_prefix(&prefix)?.to_owned());
    let mut names: Vec<_> = entries.filter_map(name).collect();
    names.sort();
    names
}

fn prefix() -> String {
    format!("pinpool-limit.{}.", user())
}

#[allow(unsafe_code)]
pub(super) fn user() -> u32 {
    // SAFETY: the call has no arguments and cannot fail.
    unsafe { libc::geteuid() }
}
