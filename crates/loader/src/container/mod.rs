//! Files that hold many samples, or one that is compressed.
//!
//! Owns the choice of a format by the name of the file. Checks every length in a header against the file before it is used,
//! and allocates nothing that only a header asks for. Lists a container whole or refuses it whole.
//!
//! A compressed file is decompressed once to be listed, and nothing of it is kept but names and lengths: so the batches of
//! every epoch are known before the first one is read, and a damaged file is found then.

mod safetensors;
mod tar;

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::catalog::ContainerMember;
use super::compressed::{Compression, Decoder, ForwardReader};
use super::failure::FailureCause;
use super::stop::StopFlag;

/// What is in a file that was opened.
#[derive(Debug)]
pub(super) enum Opened {
    /// Samples, in the order in which they lie in the file, or in its data if it is compressed.
    Container(Vec<ContainerMember>, Option<Compression>),
    /// One sample of this many bytes, compressed.
    Compressed(u64, Compression),
}

/// Whether the file at `path` is opened by decompressing it.
pub(super) fn is_compressed(path: &Path) -> bool {
    Compression::of(path).is_some()
}

/// Whether the file has the name of a container.
pub(super) fn is_container(path: &Path) -> bool {
    match Compression::of(path) {
        Some((_, is_tar)) => is_tar,
        None => path.extension().is_some_and(|extension| {
            ["tar", "safetensors"].iter().any(|format| extension.eq_ignore_ascii_case(format))
        }),
    }
}

/// Lists what is in the file at `path`; `None` if its last extension names no format. A compressed file is given up when
/// `stop` is raised.
pub(super) fn open(path: &Path, stop: &StopFlag) -> Option<Result<Opened, FailureCause>> {
    if let Some((compression, is_tar)) = Compression::of(path) {
        return Some(open_compressed(path, compression, is_tar, stop));
    }
    let extension = path.extension()?;
    let [is_tar, is_safetensors] = ["tar", "safetensors"].map(|format| extension.eq_ignore_ascii_case(format));
    (is_tar || is_safetensors).then(|| {
        let file = File::open(path)?;
        // The length of the open file, since the path may name another one by now.
        let len_bytes = file.metadata()?.len();
        let members = if is_tar { tar::index(file, len_bytes)? } else { safetensors::index(file, len_bytes)? };
        Ok(Opened::Container(members, None))
    })
}

fn open_compressed(
    path: &Path,
    compression: Compression,
    is_tar: bool,
    stop: &StopFlag,
) -> Result<Opened, FailureCause> {
    let file = File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::from(io::ErrorKind::IsADirectory).into());
    }
    let mut reader = ForwardReader::new(Decoder::new(Arc::new(file), compression)?, stop);
    if !is_tar {
        return Ok(Opened::Compressed(reader.read_to_end()?, compression));
    }
    match tar::index_forward(&mut reader) {
        // What follows from damaged data says less than what is damaged.
        Err(error) => Err(reader.broken().cloned().map_or(error, FailureCause::Compressed)),
        Ok(members) => Ok(Opened::Container(members, Some(compression))),
    }
}
