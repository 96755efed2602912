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

/// Lists the samples of the container at `path`; `None` if its last extension names no format. `a.tar.gz` is a plain file,
/// since its members cannot be read in place.
pub(super) fn index(path: &Path) -> Option<Result<Vec<ContainerMember>, FailureCause>> {
    let extension = path.extension()?;
    let [is_tar, is_safetensors] = ["tar", "safetensors"].map(|format| extension.eq_ignore_ascii_case(format));
    (is_tar || is_safetensors).then(|| {
        let file = File::open(path)?;
        // The length of the open file, since the path may name another one by now.
        let len_bytes = file.metadata()?.len();
        if is_tar { Ok(tar::index(file, len_bytes)?) } else { safetensors::index(file, len_bytes) }
    })
}
