//! Notes about the files before they are loaded: skipped files, and containers that are loaded as plain bytes.

use std::path::{Path, PathBuf};

use pinpool_loader::{Catalog, DataFile, DataOrigin};

/// Names in a note.
const NAMED: usize = 3;
/// Extensions of containers that the loader opens with --containers.
const OPENED: [&str; 6] = ["gz", "safetensors", "tar", "tgz", "tzst", "zst"];

/// One note per line.
pub(crate) fn notes(catalog: &Catalog) -> Vec<String> {
    let mut notes = Vec::new();
    for path in catalog.cyclic_links() {
        notes.push(format!("{} leads back to a directory already entered: not followed", path.display()));
    }
    let special = catalog.special_files();
    if !special.is_empty() {
        let names = names(special.iter().map(PathBuf::as_path));
        notes.push(format!("skipped {} pipes, sockets or devices: {names}", special.len()));
    }
    let plain: Vec<_> = catalog.files().iter().filter_map(plain_container).collect();
    if !plain.is_empty() {
        let (count, names) = (plain.len(), names(plain.into_iter()));
        notes.push(format!(
            "{count} container files are loaded as plain bytes ({names}): --containers loads what is in them"
        ));
    }
    notes
}

/// A container that is loaded as one sample.
fn plain_container(file: &DataFile) -> Option<&Path> {
    let DataOrigin::File(path) = &file.origin else { return None };
    let extension = path.extension()?.to_str()?.to_ascii_lowercase();
    let is_plain = OPENED.contains(&&*extension) && !file.is_container && file.compression.is_none();
    is_plain.then_some(path)
}

fn names<'a>(paths: impl ExactSizeIterator<Item = &'a Path>) -> String {
    let more = if paths.len() > NAMED { ", ..." } else { "" };
    let first: Vec<_> = paths.take(NAMED).map(|path| path.display().to_string()).collect();
    first.join(", ") + more
}
