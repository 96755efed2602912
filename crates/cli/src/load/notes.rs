//! Notes about the files before they are loaded: skipped files, and containers that are loaded as plain bytes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pinpool_loader::{Catalog, DataFile, DataOrigin};

/// Names in a note.
const NAMED: usize = 3;
/// Extensions of containers that the loader cannot open.
const CLOSED: [&str; 9] = ["7z", "arrow", "bz2", "hdf5", "lz4", "parquet", "tfrecord", "xz", "zip"];
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
    let mut by_extension: BTreeMap<String, Vec<&Path>> = BTreeMap::new();
    for file in catalog.files() {
        if let Some((path, extension)) = plain_container(file) {
            by_extension.entry(extension).or_default().push(path);
        }
    }
    for (extension, paths) in by_extension {
        let hint = if OPENED.contains(&extension.as_str()) {
            "--containers loads what is in them"
        } else {
            "only .tar, .safetensors, .gz and .zst files can be opened"
        };
        let (count, names) = (paths.len(), names(paths.into_iter()));
        notes.push(format!("{count} .{extension} files are loaded as plain bytes ({names}): {hint}"));
    }
    notes
}

/// A container that is loaded as one sample, and its extension.
fn plain_container(file: &DataFile) -> Option<(&Path, String)> {
    let DataOrigin::File(path) = &file.origin else { return None };
    let extension = path.extension()?.to_str()?.to_ascii_lowercase();
    let is_opened = OPENED.contains(&extension.as_str());
    if !is_opened && !CLOSED.contains(&extension.as_str()) {
        return None;
    }
    (!is_opened || !(file.is_container || file.compression.is_some())).then_some((path, extension))
}

fn names<'a>(paths: impl ExactSizeIterator<Item = &'a Path>) -> String {
    let more = if paths.len() > NAMED { ", ..." } else { "" };
    let first: Vec<_> = paths.take(NAMED).map(|path| path.display().to_string()).collect();
    first.join(", ") + more
}
