//! Archives of samples, and compressed files.
//!
//! The name of a file determines its format. Every length in a header is checked against the file before use, so that a header
//! cannot cause a large allocation. An archive is listed completely or refused.
//!
//! A compressed file is decompressed once to list its names and lengths. So the batches of every epoch are known in advance, and
//! a damaged file is found early.

mod safetensors;
mod tar;

use std::fs::File;
use std::path::Path;

use crate::catalog::FileContent;
use crate::compressed::{Compression, Decompressor};
use crate::failure::FailureCause;
use crate::stop::StopFlag;

/// Returns whether the file has the name of an archive.
pub(super) fn is_archive(path: &Path) -> bool {
    match Compression::of(path) {
        Some((_, is_tar)) => is_tar,
        None => path.extension().is_some_and(|extension| {
            ["tar", "safetensors"].iter().any(|format| extension.eq_ignore_ascii_case(format))
        }),
    }
}

/// Lists the content of the file at `path`. Returns `None` if its last extension is not a known format. Stops decompressing when
/// `stop` is raised.
pub(super) fn open(path: &Path, stop: &StopFlag) -> Option<Result<FileContent, FailureCause>> {
    if let Some((compression, is_tar)) = Compression::of(path) {
        return Some(open_compressed(path, compression, is_tar, stop));
    }
    let extension = path.extension()?;
    let [is_tar, is_safetensors] = ["tar", "safetensors"].map(|format| extension.eq_ignore_ascii_case(format));
    (is_tar || is_safetensors).then(|| {
        let file = File::open(path)?;
        // This is the length of the open file; the path may name another file by now.
        let len_bytes = file.metadata()?.len();
        let members = if is_tar { tar::index(file, len_bytes)? } else { safetensors::index(file, len_bytes)? };
        Ok(FileContent { members: Some(members), ..FileContent::default() })
    })
}

fn open_compressed(
    path: &Path,
    compression: Compression,
    is_tar: bool,
    stop: &StopFlag,
) -> Result<FileContent, FailureCause> {
    let mut decoder = Decompressor::open(path, compression, stop)?;
    let compression = Some(compression);
    if !is_tar {
        return Ok(FileContent { members: None, len_bytes: decoder.skip_to_end()?, compression });
    }
    match tar::index_forward(&mut decoder) {
        // Report damaged compressed data as the cause of an error in the archive.
        Err(error) => Err(decoder.broken.map_or(error, FailureCause::Compressed)),
        Ok(members) => Ok(FileContent { members: Some(members), len_bytes: 0, compression }),
    }
}
