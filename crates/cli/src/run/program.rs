//! A program's file: where it is, and whether the loader of libraries heeds `LD_PRELOAD` for it.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Scripts whose interpreter is a script again are followed so far, as the kernel does.
const SCRIPTS_MAX: usize = 4;

const SET_USER_OR_GROUP: u32 = 0o6000;
const EXECUTABLE: u32 = 0o111;

/// What an ELF file says of its loader.
#[derive(Debug, PartialEq, Eq)]
enum Loader {
    /// None: the program is linked statically.
    None,
    Path(String),
    /// For another machine or word size.
    Foreign,
}

#[derive(Debug)]
pub(super) struct Program {
    path: PathBuf,
}

impl Program {
    /// Finds it as a shell does: a name without a slash in the folders of `PATH`.
    pub(super) fn find(name: &OsStr) -> io::Result<Self> {
        if name.as_bytes().contains(&b'/') {
            return Ok(Self { path: PathBuf::from(name) });
        }
        let folders = env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
        let files = env::split_paths(&folders).map(|folder| folder.join(name)).filter(|file| file.is_file());
        let files: Vec<PathBuf> = files.collect();
        let path = files.iter().find(|file| mode(file).is_some_and(|mode| mode & EXECUTABLE != 0)).or(files.first());
        path.cloned().map(|path| Self { path }).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Why the loader ignores `LD_PRELOAD`, or cannot load the library, if that is so.
    pub(super) fn ignores_preloads(&self) -> Option<String> {
        let mut file = self.path.clone();
        for _ in 0..SCRIPTS_MAX {
            match interpreter(&file) {
                Some(next) => file = next,
                None => break,
            }
        }
        if mode(&file)? & SET_USER_OR_GROUP != 0 {
            return Some("it runs as another user or group, and such programs load nothing before them".to_owned());
        }
        match loader(&file).ok()?? {
            Loader::None => Some("it is linked statically, so no library is loaded before it".to_owned()),
            Loader::Foreign => Some("it is of another machine type, and cannot load the library".to_owned()),
            Loader::Path(path) if path.contains("ld-musl") => {
                Some(format!("its loader is {path}, which cannot load a library for glibc"))
            }
            Loader::Path(_) => None,
        }
    }
}

fn mode(file: &Path) -> Option<u32> {
    fs::metadata(file).ok().map(|facts| facts.permissions().mode())
}

/// The interpreter of a script.
fn interpreter(file: &Path) -> Option<PathBuf> {
    let mut start = Vec::new();
    File::open(file).ok()?.take(256).read_to_end(&mut start).ok()?;
    let line = start.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let mut words = line.split(|byte| byte.is_ascii_whitespace()).filter(|word| !word.is_empty());
    let first = Path::new(OsStr::from_bytes(words.next()?));
    // `env` runs what its first word names.
    match (first.file_name()?.as_bytes(), words.find(|word| !word.starts_with(b"-"))) {
        (b"env", Some(name)) => Program::find(OsStr::from_bytes(name)).ok().map(|program| program.path),
        _ => Some(first.to_owned()),
    }
}

/// The loader of an ELF file; `None` if it is no such file.
fn loader(path: &Path) -> io::Result<Option<Loader>> {
    const PROGRAM_HEADER_BYTES: usize = 56;
    const INTERPRETER: u32 = 3;
    const WORD_OF_64_BITS: u8 = 2;
    const LITTLE_END_FIRST: u8 = 1;
    let mut file = File::open(path)?;
    let mut header = [0; 64];
    if file.read_exact(&mut header).is_err() || !header.starts_with(b"\x7fELF") {
        return Ok(None);
    }
    let machine = u16::from_le_bytes([header[18], header[19]]);
    let own = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    if header[4] != WORD_OF_64_BITS || header[5] != LITTLE_END_FIRST || machine != own {
        return Ok(Some(Loader::Foreign));
    }
    let at = number(&header[32..40]);
    let (size, count) =
        (usize::from(u16::from_le_bytes([header[54], header[55]])), u16::from_le_bytes([header[56], header[57]]));
    if size < PROGRAM_HEADER_BYTES {
        return Ok(None);
    }
    for index in 0..u64::from(count) {
        let mut entry = vec![0; size];
        file.seek(SeekFrom::Start(at.saturating_add(index * size as u64)))?;
        file.read_exact(&mut entry)?;
        if u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]) == INTERPRETER {
            let (start, bytes) = (number(&entry[8..16]), number(&entry[32..40]));
            let mut path = Vec::new();
            file.seek(SeekFrom::Start(start))?;
            file.take(bytes.min(4096)).read_to_end(&mut path)?;
            let path = path.split(|&byte| byte == 0).next().unwrap_or_default();
            return Ok(Some(Loader::Path(String::from_utf8_lossy(path).into_owned())));
        }
    }
    Ok(Some(Loader::None))
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_a_loader_heeds_preloads_and_a_script_goes_by_its_interpreter() {
        let shell = Program::find(OsStr::new("sh")).unwrap();
        assert!(matches!(loader(shell.path()), Ok(Some(Loader::Path(_)))), "{:?}", loader(shell.path()));
        assert_eq!(shell.ignores_preloads(), None);
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        fs::write(&script, "#!/usr/bin/env sh\nexit 0\n").unwrap();
        assert_eq!(interpreter(&script), Some(shell.path().to_owned()));
    }

    #[test]
    fn a_static_and_a_foreign_program_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("program");
        let mut header = vec![0; 64];
        header[..6].copy_from_slice(b"\x7fELF\x02\x01");
        header[18] = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
        header[54] = 56;
        fs::write(&file, &header).unwrap();
        let program = Program { path: file.clone() };
        assert!(program.ignores_preloads().is_some_and(|why| why.contains("statically")), "{program:?}");
        header[4] = 1;
        fs::write(&file, &header).unwrap();
        assert!(program.ignores_preloads().is_some_and(|why| why.contains("machine")), "{program:?}");
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4755)).unwrap();
        assert!(program.ignores_preloads().is_some_and(|why| why.contains("user")), "{program:?}");
    }
}
