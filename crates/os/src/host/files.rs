//! Bounded reads of small text files below a root, and the two formats in which the kernel writes them.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Maximum number of bytes that a read returns. The mount table of a host with ten thousand containers is shorter.
const READ_LIMIT_BYTES: u64 = 4 << 20;

/// A file system below a root. Paths are absolute, as a process inside that root names them.
#[derive(Debug, Clone)]
pub(super) struct Files {
    root: PathBuf,
}

impl Files {
    pub(super) fn below(root: &Path) -> Self {
        Self { root: root.to_owned() }
    }

    pub(super) fn read(&self, path: impl AsRef<Path>) -> Option<String> {
        // Miri isolates programs from the files of the machine.
        if cfg!(miri) {
            return None;
        }
        let path = path.as_ref();
        let below_root = path.strip_prefix("/").unwrap_or(path);
        // Non-blocking, so that a pipe without a writer does not block the caller.
        let file =
            OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(self.root.join(below_root)).ok()?;
        let mut bytes = Vec::new();
        file.take(READ_LIMIT_BYTES).read_to_end(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Reads a file with one number. Returns `None` if the file has no number, such as `max`, which means "no limit" in cgroup
    /// files.
    pub(super) fn number(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.read(path)?.trim().parse().ok()
    }
}

/// Returns the number after `key` in a text with lines of the form `key number`.
pub(super) fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()? == key).then(|| words.next()?.parse().ok())?
    })
}

/// File trees that replace a machine's files in tests.
#[cfg(any(test, feature = "testing"))]
pub mod tree {
    use tempfile::TempDir;

    /// The mount tables of a machine with cgroups version 2, and of a machine with version 1.
    pub const V2: (&str, &str) = ("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    pub const V1: (&str, &str) =
        ("/proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");

    /// Creates a root directory that contains a file for each `(absolute path, content)`.
    pub fn of(files: &[(impl AsRef<str>, impl AsRef<str>)]) -> TempDir {
        let root = tempfile::tempdir().unwrap();
        files.iter().for_each(|(path, content)| write(&root, path.as_ref(), content.as_ref()));
        root
    }

    pub fn write(root: &TempDir, path: &str, content: &str) {
        let path = root.path().join(path.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
}

#[cfg(all(test, not(miri)))] // Files only: no unsafe code to check.
mod tests {
    use super::*;

    #[test]
    fn a_file_without_a_number_counts_as_absent() {
        let root =
            tree::of(&[("/a", "4096\n"), ("/max", "max\n"), ("/huge", "99999999999999999999999"), ("/none", "")]);
        let files = Files::below(root.path());
        assert_eq!(files.number("/a"), Some(4096));
        for path in ["/max", "/huge", "/none", "/absent", "/"] {
            assert_eq!(files.number(path), None, "{path}");
        }
    }

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let text = "total_inactive_file 1\ninactive_file 2\nanon\nfile x\n";
        assert_eq!(field(text, "inactive_file"), Some(2));
        for key in ["file", "anon", "inactive", ""] {
            assert_eq!(field(text, key), None, "{key}");
        }
    }

    #[test]
    fn reads_of_an_endless_file_and_of_a_pipe_without_writer_end() {
        let files = Files::below(Path::new("/"));
        assert_eq!(files.read("/dev/zero").map(|text| text.len() as u64), Some(READ_LIMIT_BYTES));
        let root = tempfile::tempdir().unwrap();
        let pipe = root.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert_eq!(files.read(&pipe).as_deref(), Some(""));
    }
}
