//! Files that hold many samples: which they are, and the one way to list what is in them.
//!
//! Owns the choice of a format by name. Never trusts a header: a length is compared with the file before it is used, and
//! nothing is allocated on a header's word. A container is listed whole or refused whole.

mod safetensors;
mod tar;

use std::fs::File;
use std::path::Path;

use super::catalog::Extent;
use super::failure::Cause;

/// A sample inside a container: its name and where its bytes lie.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) name: String,
    pub(super) extents: Vec<Extent>,
}

/// The formats that are opened rather than read as they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Tar,
    Safetensors,
}

impl Format {
    /// By the last extension: `a.tar` is an archive, `a.tar.gz` is not one that can be read in place.
    pub(super) fn of(path: &Path) -> Option<Format> {
        let extension = path.extension()?;
        if extension.eq_ignore_ascii_case("tar") {
            Some(Format::Tar)
        } else if extension.eq_ignore_ascii_case("safetensors") {
            Some(Format::Safetensors)
        } else {
            None
        }
    }

    /// Lists the samples of the container at `path`.
    pub(super) fn index(self, path: &Path) -> Result<Vec<Member>, Cause> {
        let file = File::open(path)?;
        // The length of the file that is open, not of the one the walk saw: extents are checked against this.
        let len_bytes = file.metadata()?.len();
        match self {
            Format::Tar => tar::index(file, len_bytes),
            Format::Safetensors => safetensors::index(file, len_bytes),
        }
    }
}

/// Containers made by the crates that define them, for the tests of several rooms.
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
            ("a.tar", Some(Format::Tar)),
            ("dir.x/A.TAR", Some(Format::Tar)),
            ("w.safetensors", Some(Format::Safetensors)),
            ("a.tar.gz", None),
            ("tar", None),
            (".tar", None),
            ("dir.tar/plain", None),
        ];
        for (name, format) in cases {
            assert_eq!(Format::of(Path::new(name)), format, "{name}");
        }
    }
}
