//! Files that hold many samples.
//!
//! Owns the choice of a format by the name of the file. Checks every length in a header against the file before it is used,
//! and allocates nothing that only a header asks for. Lists a container whole or refuses it whole.

mod safetensors;
mod tar;

use std::fs::File;
use std::path::Path;

use super::catalog::ContainerMember;
use super::failure::FailureCause;

/// The formats whose samples are listed one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContainerFormat {
    Tar,
    Safetensors,
}

impl ContainerFormat {
    /// The format by the last extension: `a.tar.gz` is a plain file, since its members cannot be read in place.
    pub(super) fn of(path: &Path) -> Option<ContainerFormat> {
        let extension = path.extension()?;
        if extension.eq_ignore_ascii_case("tar") {
            Some(ContainerFormat::Tar)
        } else if extension.eq_ignore_ascii_case("safetensors") {
            Some(ContainerFormat::Safetensors)
        } else {
            None
        }
    }

    /// Lists the samples of the container at `path`.
    pub(super) fn index(self, path: &Path) -> Result<Vec<ContainerMember>, FailureCause> {
        let file = File::open(path)?;
        // The length of the open file, since the path may name another one by now.
        let len_bytes = file.metadata()?.len();
        match self {
            ContainerFormat::Tar => Ok(tar::index(file, len_bytes)?),
            ContainerFormat::Safetensors => safetensors::index(file, len_bytes),
        }
    }
}
