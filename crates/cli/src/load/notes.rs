//! Notes about the files before they are loaded: skipped files, and archives that are loaded as plain bytes.

use std::path::{Path, PathBuf};

use pinpool_loader::Catalog;
use pinpool_observe::diagnosis::words::counted;

/// Maximum number of names in a note.
const NAMED: usize = 3;

/// Returns the notes, one per line.
pub(crate) fn notes(catalog: &Catalog) -> Vec<String> {
    let cyclic = |path: &PathBuf| format!("{} leads back to a directory already entered: not followed", path.display());
    let mut notes: Vec<_> = catalog.skipped_links().iter().map(cyclic).collect();
    let special = catalog.special_files();
    if !special.is_empty() {
        let names = names(special.iter().map(PathBuf::as_path));
        let count = counted(special.len() as u64, "special file");
        notes.push(format!("skipped {count} (pipes, sockets or devices): {names}"));
    }
    let plain: Vec<_> = catalog.unopened_files().collect();
    if !plain.is_empty() {
        let (count, names) = (counted(plain.len() as u64, "archive file"), names(plain.into_iter()));
        notes.push(format!("{count} loaded as plain bytes ({names}): --archives loads the samples inside"));
    }
    notes
}

fn names<'a>(paths: impl ExactSizeIterator<Item = &'a Path>) -> String {
    let more = if paths.len() > NAMED { ", ..." } else { "" };
    let first: Vec<_> = paths.take(NAMED).map(|path| path.display().to_string()).collect();
    first.join(", ") + more
}
