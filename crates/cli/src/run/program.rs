//! A program's file: its path, and whether the dynamic loader applies `LD_PRELOAD` to it.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::iter;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Maximum number of nested script interpreters, as in the kernel.
const SCRIPTS_MAX: usize = 4;
const SET_USER_OR_GROUP: u32 = 0o6000;
const EXECUTABLE: u32 = 0o111;
/// The dynamic loader of glibc.
const LOADER: &str =
    if cfg!(target_arch = "aarch64") { "/lib/ld-linux-aarch64.so.1" } else { "/lib64/ld-linux-x86-64.so.2" };

/// Finds the program as a shell does: a name without a slash is searched for in the directories of `PATH`.
pub(super) fn find(name: &OsStr) -> io::Result<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return Ok(PathBuf::from(name));
    }
    let folders = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    let files: Vec<_> =
        env::split_paths(&folders).map(|folder| folder.join(name)).filter(|file| file.is_file()).collect();
    let path = files.iter().find(|file| mode(file).is_some_and(|mode| mode & EXECUTABLE != 0)).or(files.first());
    path.cloned().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
}

/// Returns the reason that the dynamic loader ignores `LD_PRELOAD` for `program`, or `None` if it does not.
pub(super) fn ignores_preloads(program: &Path) -> Option<&'static str> {
    let files = iter::successors(Some(program.to_owned()), |file| interpreter(file));
    let file = files.take(1 + SCRIPTS_MAX).last()?;
    if mode(&file)? & SET_USER_OR_GROUP != 0 {
        return Some("it runs as another user or group, and such programs preload no libraries");
    }
    let verified = Command::new(LOADER).arg("--verify").arg(&file).stdout(Stdio::null()).stderr(Stdio::null()).status();
    let is_refused = matches!(verified.ok()?.code(), Some(1 | 2));
    is_refused.then_some("it is neither dynamically linked for this machine nor a script")
}

fn mode(file: &Path) -> Option<u32> {
    fs::metadata(file).ok().map(|facts| facts.permissions().mode())
}

/// Returns the interpreter of a script, or `None` if the file is not a script.
fn interpreter(file: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    File::open(file).ok()?.take(256).read_to_end(&mut start).ok()?;
    let Some(line) = start.strip_prefix(b"#!").and_then(|line| line.split(|&byte| byte == b'\n').next()) else {
        // The C library passes a file that the kernel cannot execute to the shell.
        return if start.starts_with(b"\x7fELF") { None } else { Some(PathBuf::from("/bin/sh")) };
    };
    let mut words = line.split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    let first = Path::new(OsStr::from_bytes(words.next()?));
    // `env` runs the program that its first argument names.
    match (first.file_name()?.as_bytes(), words.find(|word| !word.starts_with(b"-"))) {
        (b"env", Some(name)) => find(OsStr::from_bytes(name)).ok(),
        _ => Some(first.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_judged_by_its_interpreter_and_a_program_by_its_mode() {
        let shell = find(OsStr::new("sh")).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        fs::write(&script, "#!/usr/bin/env sh\nexit 0\n").unwrap();
        assert_eq!(interpreter(&script), Some(shell));
        assert_eq!(ignores_preloads(&script), None);
        fs::write(&script, "exit 0\n").unwrap();
        assert_eq!(interpreter(&script), Some(PathBuf::from("/bin/sh")));
        let file = folder.path().join("program");
        fs::write(&file, "\x7fELF").unwrap();
        assert!(ignores_preloads(&file).is_some_and(|why| why.contains("dynamically linked")));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4755)).unwrap();
        assert!(ignores_preloads(&file).is_some_and(|why| why.contains("user")));
    }
}
