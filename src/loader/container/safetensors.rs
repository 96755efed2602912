//! `.safetensors` files: eight bytes of header length, a JSON header, then the tensors back to back.
//!
//! Owns the reading of the header; the `safetensors` crate checks that its offsets leave no gaps and that sizes match shapes.
//! Never reads a tensor.
//!
//! - **safetensors-I1**: the length of the header is compared with the file and with the limit of the format before any
//!   memory is allocated for it.

use std::fs::File;
use std::io::Read;

use ::safetensors::tensor::Metadata;

use crate::loader::catalog::{ContainerMember, FileRange};
use crate::loader::failure::{FailureCause, SafetensorsError};

const LENGTH_BYTES: u64 = size_of::<u64>() as u64;
/// The longest header that the format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Lists the tensors, in the order of their bytes.
pub(super) fn index(mut file: File, file_bytes: u64) -> Result<Vec<ContainerMember>, FailureCause> {
    let after_length = file_bytes.checked_sub(LENGTH_BYTES).ok_or(SafetensorsError::NoHeader { file_bytes })?;
    let mut length = [0; size_of::<u64>()];
    file.read_exact(&mut length)?;
    let claimed_bytes = u64::from_le_bytes(length);
    let max_bytes = after_length.min(MAX_HEADER_BYTES);
    if claimed_bytes > max_bytes {
        return Err(SafetensorsError::HeaderLength { claimed_bytes, max_bytes }.into());
    }

    let mut header = Vec::new();
    file.take(claimed_bytes).read_to_end(&mut header)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| SafetensorsError::Header(error.into()))?;

    let data_start = LENGTH_BYTES + claimed_bytes;
    let (described_bytes, actual_bytes) = (metadata.data_len() as u64, file_bytes - data_start);
    if described_bytes != actual_bytes {
        return Err(SafetensorsError::DataLength { described_bytes, actual_bytes }.into());
    }

    let member = |(name, tensor): (String, &::safetensors::tensor::TensorInfo)| {
        // The crate has checked start <= end, and that the last end is `data_len`, which is the rest of the file.
        let (start, end) = tensor.data_offsets;
        let range = FileRange { offset: data_start + start as u64, len_bytes: (end - start) as u64 };
        ContainerMember { name, ranges: vec![range] }
    };
    let mut members: Vec<_> = metadata.tensors().into_iter().map(member).collect();
    // By offset, then by name: empty tensors share an offset.
    members.sort_by(|a, b| (a.ranges[0].offset, &a.name).cmp(&(b.ranges[0].offset, &b.name)));
    Ok(members)
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::super::testing::safetensors_file;
    use super::*;

    fn index_bytes(bytes: &[u8]) -> Result<Vec<ContainerMember>, FailureCause> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.rewind().unwrap();
        index(file, bytes.len() as u64)
    }

    fn with_header(header: &str, data_bytes: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data_bytes, 7);
        bytes
    }

    #[test]
    fn tensors_cover_the_data_back_to_back() {
        let bytes = safetensors_file(&[("b", 100), ("a", 28), ("c", 0)]);
        let members = index_bytes(&bytes).unwrap();
        assert_eq!(members.len(), 3);
        let mut at = members[0].ranges[0].offset;
        for member in &members {
            assert_eq!(member.ranges[0].offset, at);
            at += member.ranges[0].len_bytes;
        }
        assert_eq!(at, bytes.len() as u64);
    }

    #[test]
    fn a_file_without_tensors_has_no_members() {
        assert_eq!(index_bytes(&with_header("{}", 0)).unwrap(), []);
    }

    #[test]
    fn every_cut_of_a_good_file_is_refused() {
        let bytes = safetensors_file(&[("w", 40), ("v", 8)]);
        assert!(index_bytes(&bytes).is_ok());
        for len in 0..bytes.len() {
            let cause = index_bytes(&bytes[..len]).expect_err("a cut file");
            assert!(matches!(cause, FailureCause::Safetensors(_)), "{len}: {cause}");
        }
    }

    #[test]
    fn false_headers_are_refused() {
        let tensor = |shape: &str, start: u64, end: u64| {
            format!(r#"{{"w":{{"dtype":"U8","shape":{shape},"data_offsets":[{start},{end}]}}}}"#)
        };
        let cases = [
            u64::MAX.to_le_bytes().to_vec(),
            (u64::MAX - 8).to_le_bytes().to_vec(),
            [&(1u64 << 40).to_le_bytes()[..], b"{}"].concat(),
            with_header("not json", 0),
            with_header(&"[".repeat(100_000), 0),
            with_header(&tensor("[8]", 0, 8), 7),
            with_header(&tensor("[8]", 0, 8), 9),
            with_header(&tensor("[8]", 1, 9), 9),
            with_header(&tensor("[8]", 8, 0), 8),
            with_header(&tensor("[18446744073709551615,2]", 0, 8), 8),
            with_header(&tensor("[8]", 0, u64::MAX), 8),
        ];
        for (number, bytes) in cases.iter().enumerate() {
            let cause = index_bytes(bytes).expect_err("a false header");
            assert!(matches!(cause, FailureCause::Safetensors(_)), "case {number}: {cause}");
        }
    }
}
