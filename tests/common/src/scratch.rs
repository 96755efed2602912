//! Files that are removed at the end of their test.

use std::path::PathBuf;

use tempfile::TempDir;

/// A path in a new folder, which the first value removes.
pub fn scratch(name: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    (dir, path)
}
