//! From the paths a user names to the regular files under them, in an order that is the same each time.
//!
//! Owns the rules of the walk. Never opens a file.
//!
//! | met | done |
//! | --- | --- |
//! | regular file, empty or not | found |
//! | symlink to a file | found, under the link's name |
//! | symlink to a directory | entered, unless this PATH has been in that directory before |
//! | symlink in a circle | not followed, kept in [`Walked::loops`] |
//! | symlink to nothing, unreadable directory | a failure, named |
//! | pipe, socket, device | passed over; a failure if it was named as a PATH |
//!
//! I1. No directory is entered twice under one PATH, so the walk ends whatever the links say.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use super::failure::{Cause, Failure};
use super::stop::Stop;

/// A regular file and the length it had when the walk passed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// As named, or under a directory as named.
    pub path: PathBuf,
    /// Length at the time of the walk.
    pub len_bytes: u64,
    /// Whether the caller named this very file.
    pub named: bool,
}

/// All that a walk met.
#[derive(Debug, Default)]
pub struct Walked {
    /// Files, in the order of the PATHs and by name within each.
    pub files: Vec<Found>,
    /// What could not be looked at.
    pub failures: Vec<Failure>,
    /// Links that were not followed because they lead back.
    pub loops: Vec<PathBuf>,
}

/// Finds the regular files under `paths`, or those met before `stop` was raised.
#[must_use]
pub fn walk<P: AsRef<Path>>(paths: &[P], stop: &Stop) -> Walked {
    let mut walked = Walked::default();
    for path in paths {
        walked.enter(path.as_ref(), stop);
    }
    walked
}

impl Walked {
    fn enter(&mut self, root: &Path, stop: &Stop) {
        match fs::metadata(root) {
            Err(error) => self.failures.push(Failure::new(root.display(), error)),
            Ok(meta) if meta.is_file() => {
                self.files.push(Found { path: root.into(), len_bytes: meta.len(), named: true });
            }
            Ok(meta) if meta.is_dir() => self.enter_directory(root, stop),
            Ok(_) => self.failures.push(Failure::new(root.display(), Cause::NotAFile)),
        }
    }

    fn enter_directory(&mut self, root: &Path, stop: &Stop) {
        let mut entered = HashSet::new();
        let mut again = Vec::new();
        let tree = WalkDir::new(root).follow_links(true).sort_by_file_name().into_iter().filter_entry(|entry| {
            if !entry.file_type().is_dir() {
                return true;
            }
            // An entry whose metadata cannot be had is let through: walkdir then says why.
            let first_time = entry.metadata().map_or(true, |meta| entered.insert((meta.dev(), meta.ino())));
            if !first_time {
                again.push(entry.path().to_path_buf());
            }
            first_time
        });
        for entry in tree.take_while(|_| !stop.is_requested()) {
            match entry {
                Ok(entry) if entry.file_type().is_file() => match entry.metadata() {
                    Ok(meta) => {
                        self.files.push(Found { path: entry.into_path(), len_bytes: meta.len(), named: false });
                    }
                    Err(error) => self.failed(root, error),
                },
                Ok(_) => {}
                Err(error) => self.failed(root, error),
            }
        }
        self.loops.append(&mut again);
    }

    fn failed(&mut self, root: &Path, error: walkdir::Error) {
        let path = error.path().unwrap_or(root).to_path_buf();
        let circle = error.loop_ancestor().is_some()
            || error.io_error().is_some_and(|error| error.raw_os_error() == Some(libc::ELOOP));
        if circle {
            self.loops.push(path);
        } else {
            // The walk's own words would name the path once more.
            let error = error.into_io_error().unwrap_or_else(|| io::Error::other("cannot be looked at"));
            self.failures.push(Failure::new(path.display(), error));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn names(walked: &Walked, root: &Path) -> Vec<String> {
        let name = |found: &Found| found.path.strip_prefix(root).unwrap().display().to_string();
        walked.files.iter().map(name).collect()
    }

    #[test]
    fn files_come_sorted_and_empty_ones_count() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("b")).unwrap();
        for (name, len) in [("c", 3), ("b/2", 2), ("b/1", 0), ("a", 1)] {
            fs::write(dir.path().join(name), vec![0; len]).unwrap();
        }
        let walked = walk(&[dir.path()], &Stop::new());
        assert_eq!(names(&walked, dir.path()), ["a", "b/1", "b/2", "c"]);
        assert_eq!(walked.files.iter().map(|found| found.len_bytes).collect::<Vec<_>>(), [1, 0, 2, 3]);
        assert!(walked.files.iter().all(|found| !found.named));
        assert!(walked.failures.is_empty());
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
        let walked = walk(&[dir.path()], &Stop::new());
        assert_eq!(names(&walked, dir.path()), ["link", "real/deep/file"]);
        assert_eq!(walked.files[0].len_bytes, 5);
        assert!(walked.failures.is_empty(), "{:?}", walked.failures);
        assert_eq!(walked.loops.len(), 3, "{:?}", walked.loops);
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
        // Followed along every path that has no circle, this would be more than 12! files.
        let walked = walk(&[dir.path()], &Stop::new());
        assert_eq!(walked.files.len(), 12);
        assert!(walked.failures.is_empty());
    }

    #[test]
    fn what_is_missing_or_dangling_is_named() {
        let dir = tempfile::tempdir().unwrap();
        symlink("nowhere", dir.path().join("dangling")).unwrap();
        fs::write(dir.path().join("good"), b"x").unwrap();
        let missing = dir.path().join("missing");
        let walked = walk(&[missing.as_path(), dir.path()], &Stop::new());
        assert_eq!(names(&walked, dir.path()), ["good"]);
        let failed: Vec<_> = walked.failures.iter().map(|failure| failure.name.clone()).collect();
        assert_eq!(failed, [missing.display().to_string(), dir.path().join("dangling").display().to_string()]);
        assert_eq!(walked.failures[1].to_string().matches("dangling").count(), 1, "{}", walked.failures[1]);
    }

    #[test]
    fn a_socket_is_passed_over_and_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        let inside = walk(&[dir.path()], &Stop::new());
        assert!(inside.files.is_empty() && inside.failures.is_empty());
        let named = walk(&[&socket], &Stop::new());
        assert!(matches!(named.failures[0].cause, Cause::NotAFile));
    }

    #[test]
    fn a_named_file_is_marked_so() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"xyz").unwrap();
        assert_eq!(walk(&[&file], &Stop::new()).files, [Found { path: file, len_bytes: 3, named: true }]);
    }
}
