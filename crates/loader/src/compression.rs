//! How a file is compressed.
//!
//! Owns the choice by the name of the file.

use std::fmt;
use std::path::Path;

/// How a file is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Compression {
    /// `.gz`: one member or several.
    Gzip,
    /// `.zst`: one frame or several.
    Zstd,
}

impl Compression {
    /// By the last extension of `path`, and whether a tar archive is inside.
    pub(super) fn of(path: &Path) -> Option<(Compression, bool)> {
        let extension = path.extension()?;
        let is = |word: &str| extension.eq_ignore_ascii_case(word);
        let holds_tar = || {
            let inner = path.file_stem().map(Path::new).and_then(Path::extension);
            inner.is_some_and(|inner| inner.eq_ignore_ascii_case("tar"))
        };
        match () {
            () if is("gz") => Some((Compression::Gzip, holds_tar())),
            () if is("tgz") => Some((Compression::Gzip, true)),
            () if is("zst") => Some((Compression::Zstd, holds_tar())),
            () if is("tzst") => Some((Compression::Zstd, true)),
            () => None,
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Compression::Gzip => "gzip",
            Compression::Zstd => "zstd",
        })
    }
}
