//! Makes a catalog from paths: the regular files under the paths, in a deterministic order, and the samples of archives.
//!
//! Reads only the headers of uncompressed archives. Compressed files are decompressed once.
//!
//! | found | result |
//! | --- | --- |
//! | regular file, empty or not | listed |
//! | symbolic link to a file | listed under the link's name |
//! | symbolic link to a directory | entered, unless this path has led to that directory before |
//! | cyclic symbolic link | not followed, kept in [`Catalog::skipped_links`] |
//! | dangling link, unreadable directory | a failure |
//! | pipe, socket, device | kept in [`Catalog::special_files`]; a failure if the caller named it |
//!
//! - **listing-I1**: no directory is entered twice under one path, so the traversal ends for all links.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use walkdir::WalkDir;

use crate::archive;
use crate::catalog::{Catalog, CatalogLists, DataOrigin, FileContent};
use crate::compressed::Compression;
use crate::failure::{Failure, FailureCause};
use crate::stop::StopFlag;

/// A regular file and its length when it was found.
struct FoundFile {
    path: PathBuf,
    len_bytes: u64,
    /// Whether the file is opened if it is an archive or compressed: the caller named it, or a directory of archives.
    is_opened: bool,
}

/// How files are listed. [`Catalog::from_paths`] uses the default.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct ListOptions {
    /// Open all archives and compressed files. Default: `false`.
    pub open_archives: bool,
    /// End the list early when this flag is raised.
    pub stop: StopFlag,
}

impl Catalog {
    /// Lists the regular files under `paths`, each a file or a directory, in the order of `paths` and by name within each.
    ///
    /// A `.tar` or `.safetensors` file is opened as an archive, and its samples are listed separately, if `paths` names the
    /// file or a directory that contains only archives, or with [`ListOptions::open_archives`]; otherwise it is one plain
    /// sample. The same applies to compressed files: the samples of a `.tar.gz`, `.tgz`, `.tar.zst` or `.tzst` file are listed,
    /// and the decompressed data of any other `.gz` or `.zst` file is one sample. These files are decompressed once, on several
    /// threads. Files that cannot be listed are in [`Catalog::failures`].
    pub fn from_paths<P: AsRef<Path>>(paths: &[P]) -> Self {
        ListOptions::default().from_paths(paths)
    }

    /// Returns the archives and compressed files that were listed as plain files.
    pub fn unopened_files(&self) -> impl Iterator<Item = &Path> {
        self.files().iter().filter_map(|file| {
            let DataOrigin::File(path) = &file.origin else { return None };
            let is_plain = !file.is_archive && file.compression.is_none();
            (is_plain && (archive::is_archive(path) || Compression::of(path).is_some())).then_some(&**path)
        })
    }
}

impl ListOptions {
    /// Lists files as [`Catalog::from_paths`] does, with these options.
    pub fn from_paths<P: AsRef<Path>>(&self, paths: &[P]) -> Catalog {
        let stop = &self.stop;
        let mut lists = CatalogLists::default();
        let found = lists.walk(paths, stop);
        let opened = open_all(&found, self.open_archives, stop);
        for (file, opened) in found.into_iter().zip(opened) {
            // After a stop the opened files may be incomplete.
            if stop.is_raised() {
                break;
            }
            let plain = || Ok(FileContent { len_bytes: file.len_bytes, ..FileContent::default() });
            match opened.into_inner().unwrap_or_else(plain) {
                Ok(content) => lists.push(DataOrigin::File(file.path), content),
                Err(cause) => lists.failures.push(Failure::new(file.path.display(), cause)),
            }
        }
        lists.finish()
    }
}

type Opened = Result<FileContent, FailureCause>;

/// Opens the archives, on one thread for each core. The result of a plain file stays unset.
fn open_all(found: &[FoundFile], open_archives: bool, stop: &StopFlag) -> Vec<OnceLock<Opened>> {
    let opened: Vec<_> = found.iter().map(|_| OnceLock::new()).collect();
    let next = AtomicUsize::new(0);
    let open_next = || {
        // Relaxed: the counter publishes no other data.
        while let at = next.fetch_add(1, Ordering::Relaxed)
            && let Some(file) = found.get(at)
            && !stop.is_raised()
        {
            if (file.is_opened || open_archives)
                && let Some(result) = archive::open(&file.path, stop)
            {
                let _ = opened[at].set(result);
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(found.len());
    thread::scope(|scope| {
        for _ in 1..threads {
            // If no thread can be started, this thread opens more files.
            let _ = thread::Builder::new().name("pinpool-list".to_owned()).spawn_scoped(scope, open_next);
        }
        open_next();
    });
    opened
}

impl CatalogLists {
    fn walk<P: AsRef<Path>>(&mut self, paths: &[P], stop: &StopFlag) -> Vec<FoundFile> {
        let mut found = Vec::new();
        for root in paths.iter().map(AsRef::as_ref) {
            match fs::metadata(root) {
                Err(error) => self.failures.push(Failure::new(root.display(), error)),
                Ok(meta) if meta.is_file() => {
                    found.push(FoundFile { path: root.into(), len_bytes: meta.len(), is_opened: true });
                }
                Ok(meta) if meta.is_dir() => self.walk_directory(root, stop, &mut found),
                Ok(_) => self.failures.push(Failure::new(root.display(), FailureCause::NotAFile)),
            }
        }
        found
    }

    fn walk_directory(&mut self, root: &Path, stop: &StopFlag, found: &mut Vec<FoundFile>) {
        let first = found.len();
        let mut entered = HashSet::new();
        let mut entered_again = Vec::new();
        let tree = WalkDir::new(root).follow_links(true).sort_by_file_name().into_iter().filter_entry(|entry| {
            if !entry.file_type().is_dir() {
                return true;
            }
            // A directory with unreadable metadata passes: walkdir then reports why.
            let is_new = entry.metadata().map_or(true, |meta| entered.insert((meta.dev(), meta.ino())));
            if !is_new {
                entered_again.push(entry.path().to_path_buf());
            }
            is_new
        });
        for entry in tree.take_while(|_| !stop.is_raised()) {
            let length = |entry: walkdir::DirEntry| {
                let kind = entry.file_type();
                let len_bytes = kind.is_file().then(|| entry.metadata().map(|meta| meta.len())).transpose()?;
                Ok((entry.into_path(), kind, len_bytes))
            };
            match entry.and_then(length) {
                Ok((path, _, Some(len_bytes))) => found.push(FoundFile { path, len_bytes, is_opened: false }),
                Ok((_, kind, None)) if kind.is_dir() => {}
                Ok((path, ..)) => self.special_files.push(path),
                Err(error) => self.walk_failed(root, error),
            }
        }
        self.skipped_links.append(&mut entered_again);
        let found = &mut found[first..];
        let is_of_archives = found.iter().all(|file| archive::is_archive(&file.path));
        found.iter_mut().for_each(|file| file.is_opened = is_of_archives);
    }

    fn walk_failed(&mut self, root: &Path, error: walkdir::Error) {
        let path = error.path().unwrap_or(root).to_path_buf();
        let is_cycle = error.loop_ancestor().is_some()
            || error.io_error().is_some_and(|error| error.raw_os_error() == Some(libc::ELOOP));
        if is_cycle {
            self.skipped_links.push(path);
        } else {
            // The failure contains the path already.
            let error = error.into_io_error().unwrap_or_else(|| io::Error::other("cannot be read"));
            self.failures.push(Failure::new(path.display(), error));
        }
    }
}
