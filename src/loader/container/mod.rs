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

/// Containers written by the crates that define the formats.
#[cfg(test)]
pub(super) mod testing {
    pub(crate) fn tar_file(members: &[(&str, &[u8])]) -> Vec<u8> {
        let mut archive = ::tar::Builder::new(Vec::new());
        for (name, bytes) in members {
            let mut header = ::tar::Header::new_gnu();
            header.set_size(bytes.len() as u64);
            header.set_mode(0o644);
            archive.append_data(&mut header, name, *bytes).unwrap();
        }
        archive.into_inner().unwrap()
    }

    pub(crate) fn safetensors_file(tensors: &[(&str, usize)]) -> Vec<u8> {
        use ::safetensors::tensor::{Dtype, TensorView};
        let bytes: Vec<Vec<u8>> = tensors.iter().map(|(_, len)| (0..=255).cycle().take(*len).collect()).collect();
        let views = tensors
            .iter()
            .zip(&bytes)
            .map(|((name, len), bytes)| (*name, TensorView::new(Dtype::U8, vec![*len], bytes).unwrap()));
        ::safetensors::serialize(views, None).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_extension_decides() {
        let cases = [
            ("a.tar", Some(ContainerFormat::Tar)),
            ("dir.x/A.TAR", Some(ContainerFormat::Tar)),
            ("w.safetensors", Some(ContainerFormat::Safetensors)),
            ("a.tar.gz", None),
            ("tar", None),
            (".tar", None),
            ("dir.tar/plain", None),
        ];
        for (name, format) in cases {
            assert_eq!(ContainerFormat::of(Path::new(name)), format, "{name}");
        }
    }
}
