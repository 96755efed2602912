//! The names of host ledgers, and where their files are.

use std::path::{Path, PathBuf};

use crate::file::DIRECTORY;

/// What is wrong with `name` as the name of a ledger.
pub fn problem_of(name: &str) -> Option<&'static str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let is_name = name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(is_plain);
    (!is_name || name.len() > 64).then_some(
        "not the name of a ledger (none, auto, or up to 64 letters, digits, `.`, `_` and `-`, of which the first is a letter or \
         a digit)",
    )
}

/// Where the ledger `name` of this user is.
pub(super) fn path_of(name: &str) -> PathBuf {
    Path::new(DIRECTORY).join(format!("{}{name}", prefix()))
}

/// What the files of this user's ledgers begin with.
#[allow(unsafe_code)]
pub(super) fn prefix() -> String {
    // SAFETY: reads a number of this process.
    let user = unsafe { libc::geteuid() };
    format!("pinpool-ledger.{user}.")
}
