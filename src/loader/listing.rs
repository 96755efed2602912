//! From paths to a catalog: the regular files under them, in an order that is the same each time, and the samples of
//! containers.
//!
//! Owns the rules of the walk and the choice of the files that are opened as containers. Reads nothing but containers'
//! headers.
//!
//! | found | result |
//! | --- | --- |
//! | regular file, empty or not | listed |
//! | symbolic link to a file | listed under the link's name |
//! | symbolic link to a directory | entered, unless this path has led to that directory before |
//! | symbolic link in a circle | not followed, kept in [`Catalog::cyclic_links`] |
//! | dangling link, unreadable directory | a failure |
//! | pipe, socket, device | ignored; a failure if the caller named it |
//!
//! - **listing-I1**: no directory is entered twice under one path, so the walk ends whatever the links are.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use super::catalog::{Catalog, DataOrigin};
use super::container::ContainerFormat;
use super::failure::{Failure, FailureCause};
use super::run::StopFlag;

/// A regular file and its length when it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FoundFile {
    path: PathBuf,
    len_bytes: u64,
    /// Whether the caller named this very file.
    is_named: bool,
}

impl Catalog {
    /// Lists the regular files under `paths`, each a file or a directory, in the order of `paths` and by name within each.
    ///
    /// A `.tar` or `.safetensors` file is opened as a container, and its samples are listed one by one, if `paths` names the
    /// file itself or `open_containers` is set; otherwise it is one plain sample. What cannot be listed is in
    /// [`Catalog::failures`]. The list ends early when `stop` is raised.
    #[must_use]
    pub fn from_paths<P: AsRef<Path>>(paths: &[P], open_containers: bool, stop: &StopFlag) -> Catalog {
        let mut catalog = Catalog::default();
        let found = catalog.walk(paths, stop);
        for file in found.into_iter().take_while(|_| !stop.is_raised()) {
            catalog.list(file, open_containers);
        }
        catalog
    }

    fn list(&mut self, file: FoundFile, open_containers: bool) {
        let format = if file.is_named || open_containers { ContainerFormat::of(&file.path) } else { None };
        match format.map(|format| format.index(&file.path)) {
            None => self.push_plain(DataOrigin::File(file.path), file.len_bytes),
            Some(Ok(members)) => self.push_container(file.path, members),
            Some(Err(cause)) => self.failures.push(Failure::new(file.path.display(), cause)),
        }
    }

    fn walk<P: AsRef<Path>>(&mut self, paths: &[P], stop: &StopFlag) -> Vec<FoundFile> {
        let mut found = Vec::new();
        for root in paths.iter().map(AsRef::as_ref) {
            match fs::metadata(root) {
                Err(error) => self.failures.push(Failure::new(root.display(), error)),
                Ok(meta) if meta.is_file() => {
                    found.push(FoundFile { path: root.into(), len_bytes: meta.len(), is_named: true });
                }
                Ok(meta) if meta.is_dir() => self.walk_directory(root, stop, &mut found),
                Ok(_) => self.failures.push(Failure::new(root.display(), FailureCause::NotAFile)),
            }
        }
        found
    }

    fn walk_directory(&mut self, root: &Path, stop: &StopFlag, found: &mut Vec<FoundFile>) {
        let mut entered = HashSet::new();
        let mut entered_again = Vec::new();
        let tree = WalkDir::new(root).follow_links(true).sort_by_file_name().into_iter().filter_entry(|entry| {
            if !entry.file_type().is_dir() {
                return true;
            }
            // A directory whose metadata cannot be read passes: walkdir then reports why.
            let is_new = entry.metadata().map_or(true, |meta| entered.insert((meta.dev(), meta.ino())));
            if !is_new {
                entered_again.push(entry.path().to_path_buf());
            }
            is_new
        });
        for entry in tree.take_while(|_| !stop.is_raised()) {
            let file = entry.and_then(|entry| {
                let len_bytes =
                    entry.file_type().is_file().then(|| entry.metadata().map(|meta| meta.len())).transpose()?;
                Ok(len_bytes.map(|len_bytes| FoundFile { path: entry.into_path(), len_bytes, is_named: false }))
            });
            match file {
                Ok(file) => found.extend(file),
                Err(error) => self.walk_failed(root, error),
            }
        }
        self.cyclic_links.append(&mut entered_again);
    }

    fn walk_failed(&mut self, root: &Path, error: walkdir::Error) {
        let path = error.path().unwrap_or(root).to_path_buf();
        let is_cycle = error.loop_ancestor().is_some()
            || error.io_error().is_some_and(|error| error.raw_os_error() == Some(libc::ELOOP));
        if is_cycle {
            self.cyclic_links.push(path);
        } else {
            // The text of walkdir's error names the path, which the failure does already.
            let error = error.into_io_error().unwrap_or_else(|| io::Error::other("cannot be read"));
            self.failures.push(Failure::new(path.display(), error));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::super::container::testing::{safetensors_file, tar_file};
    use super::*;

    fn walk<P: AsRef<Path>>(paths: &[P]) -> (Vec<FoundFile>, Catalog) {
        let mut catalog = Catalog::default();
        (catalog.walk(paths, &StopFlag::new()), catalog)
    }

    fn names(found: &[FoundFile], root: &Path) -> Vec<String> {
        let name = |found: &FoundFile| found.path.strip_prefix(root).unwrap().display().to_string();
        found.iter().map(name).collect()
    }

    #[test]
    fn files_come_sorted_and_empty_ones_count() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("b")).unwrap();
        for (name, len) in [("c", 3), ("b/2", 2), ("b/1", 0), ("a", 1)] {
            fs::write(dir.path().join(name), vec![0; len]).unwrap();
        }
        let (found, catalog) = walk(&[dir.path()]);
        assert_eq!(names(&found, dir.path()), ["a", "b/1", "b/2", "c"]);
        assert_eq!(found.iter().map(|found| found.len_bytes).collect::<Vec<_>>(), [1, 0, 2, 3]);
        assert!(found.iter().all(|found| !found.is_named));
        assert!(catalog.failures.is_empty());
    }

    #[test]
    fn links_to_files_are_followed_and_circles_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("real/deep")).unwrap();
        fs::write(at("real/deep/file"), b"12345").unwrap();
        symlink(at("real/deep/file"), at("link")).unwrap();
        symlink("..", at("real/deep/up")).unwrap();
        symlink(dir.path(), at("real/top")).unwrap();
        symlink("self", at("self")).unwrap();
        let (found, catalog) = walk(&[dir.path()]);
        assert_eq!(names(&found, dir.path()), ["link", "real/deep/file"]);
        assert_eq!(found[0].len_bytes, 5);
        assert!(catalog.failures.is_empty(), "{:?}", catalog.failures);
        assert_eq!(catalog.cyclic_links.len(), 3, "{:?}", catalog.cyclic_links);
    }

    #[test]
    fn directories_that_link_to_each_other_are_entered_once() {
        let dir = tempfile::tempdir().unwrap();
        let names_of_dirs: Vec<_> = (0..12).map(|i| format!("d{i:02}")).collect();
        for name in &names_of_dirs {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("file"), b"x").unwrap();
        }
        for from in &names_of_dirs {
            for to in names_of_dirs.iter().filter(|to| *to != from) {
                symlink(dir.path().join(to), dir.path().join(from).join(to)).unwrap();
            }
        }
        // Followed along every path without a circle, there would be more than 12! files.
        let (found, catalog) = walk(&[dir.path()]);
        assert_eq!(found.len(), 12);
        assert!(catalog.failures.is_empty());
    }

    #[test]
    fn missing_paths_and_dangling_links_are_failures() {
        let dir = tempfile::tempdir().unwrap();
        symlink("nowhere", dir.path().join("dangling")).unwrap();
        fs::write(dir.path().join("good"), b"x").unwrap();
        let missing = dir.path().join("missing");
        let (found, catalog) = walk(&[missing.as_path(), dir.path()]);
        assert_eq!(names(&found, dir.path()), ["good"]);
        let failed: Vec<_> = catalog.failures.iter().map(|failure| failure.name.clone()).collect();
        assert_eq!(failed, [missing.display().to_string(), dir.path().join("dangling").display().to_string()]);
        assert_eq!(catalog.failures[1].to_string().matches("dangling").count(), 1, "{}", catalog.failures[1]);
    }

    #[test]
    fn a_socket_is_ignored_and_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        let (found, inside) = walk(&[dir.path()]);
        assert!(found.is_empty() && inside.failures.is_empty());
        let (_, named) = walk(&[&socket]);
        assert!(matches!(named.failures[0].cause, FailureCause::NotAFile));
    }

    #[test]
    fn a_named_file_is_marked_so() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"xyz").unwrap();
        assert_eq!(walk(&[&file]).0, [FoundFile { path: file, len_bytes: 3, is_named: true }]);
    }

    #[test]
    fn a_container_is_opened_when_named_or_asked_for_and_else_read_plain() {
        let dir = tempfile::tempdir().unwrap();
        let shard = dir.path().join("shard.tar");
        fs::write(&shard, tar_file(&[("0.jpg", b"abc"), ("0.cls", b"7"), ("1.jpg", b"de")])).unwrap();
        let shard_bytes = fs::metadata(&shard).unwrap().len();

        let named = Catalog::from_paths(&[&shard], false, &StopFlag::new());
        assert_eq!((named.files.len(), named.samples.len(), named.len_bytes()), (1, 2, 6));
        assert_eq!(named.name(1), format!("{}!1", shard.display()));

        let plain = Catalog::from_paths(&[dir.path()], false, &StopFlag::new());
        assert_eq!((plain.files.len(), plain.samples.len(), plain.len_bytes()), (1, 1, shard_bytes));
        assert_eq!(plain.name(0), shard.display().to_string());

        let asked = Catalog::from_paths(&[dir.path()], true, &StopFlag::new());
        assert_eq!((asked.files.len(), asked.samples.len(), asked.len_bytes()), (1, 2, 6));
    }

    #[test]
    fn a_broken_container_is_left_out_whole_and_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("bad.safetensors"), b"\xff\xff\xff\xff\xff\xff\xff\x7f{}").unwrap();
        fs::write(dir.path().join("bad.tar"), [b'x'; 1024]).unwrap();
        fs::write(dir.path().join("good.safetensors"), safetensors_file(&[("w", 16)])).unwrap();
        fs::write(dir.path().join("plain"), b"").unwrap();
        let catalog = Catalog::from_paths(&[dir.path()], true, &StopFlag::new());
        assert_eq!((catalog.files.len(), catalog.samples.len(), catalog.len_bytes()), (2, 2, 16));
        let failed: Vec<_> = catalog.failures.iter().map(ToString::to_string).collect();
        assert_eq!(failed.len(), 2, "{failed:?}");
        assert!(failed[0].contains("bad.safetensors: broken safetensors"), "{failed:?}");
        assert!(failed[1].contains("bad.tar: broken tar"), "{failed:?}");
    }
}
