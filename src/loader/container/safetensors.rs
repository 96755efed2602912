//! `.safetensors` files: eight bytes of header length, a JSON header, then the tensors back to back.
//!
//! Owns the reading of the header, whose meaning (offsets without gaps, sizes that fit shapes) the `safetensors` crate
//! checks. Never reads a tensor.
//!
//! I1. The header's length is compared with the file's and with the format's own bound before a byte is allocated.

use std::fs::File;
use std::io::Read;

use ::safetensors::tensor::Metadata;

use super::super::catalog::Extent;
use super::super::failure::Cause;
use super::Member;

const LENGTH_BYTES: u64 = size_of::<u64>() as u64;
/// The format's own bound on a header.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Lists the tensors, in the order of their bytes.
pub(super) fn index(mut file: File, file_bytes: u64) -> Result<Vec<Member>, Cause> {
    let broken = |why: String| Cause::Safetensors(why);
    let Some(after_length) = file_bytes.checked_sub(LENGTH_BYTES) else {
        return Err(broken(format!("{file_bytes} bytes are less than the {LENGTH_BYTES} of the header's length")));
    };
    let mut length = [0; size_of::<u64>()];
    file.read_exact(&mut length)?;
    let header_bytes = u64::from_le_bytes(length);
    let bound = after_length.min(MAX_HEADER_BYTES);
    if header_bytes > bound {
        return Err(broken(format!("the header claims {header_bytes} bytes, at most {bound} are possible")));
    }

    let mut header = Vec::new();
    file.take(header_bytes).read_to_end(&mut header)?;
    let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| broken(error.to_string()))?;

    let data_start = LENGTH_BYTES + header_bytes;
    let data_bytes = file_bytes - data_start;
    let described_bytes = metadata.data_len() as u64;
    if described_bytes != data_bytes {
        return Err(broken(format!("the header describes {described_bytes} bytes of tensors, {data_bytes} follow it")));
    }

    let tensors = metadata.tensors();
    let mut members = Vec::with_capacity(tensors.len());
    for (name, tensor) in tensors {
        let (start, end) = tensor.data_offsets;
        // The crate has checked start <= end, and that the last end is data_len, which is within the file.
        let extent = Extent { offset: data_start + start as u64, len_bytes: (end - start) as u64 };
        members.push(Member { name, extents: vec![extent] });
    }
    // By place, then by name: tensors without elements share one.
    members.sort_by(|a, b| (a.extents[0].offset, &a.name).cmp(&(b.extents[0].offset, &b.name)));
    Ok(members)
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::super::testing::safetensors_file;
    use super::*;

    fn index_bytes(bytes: &[u8]) -> Result<Vec<Member>, Cause> {
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
        let mut at = members[0].extents[0].offset;
        for member in &members {
            assert_eq!(member.extents[0].offset, at);
            at += member.extents[0].len_bytes;
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
            assert!(matches!(cause, Cause::Safetensors(_)), "{len}: {cause}");
        }
    }

    #[test]
    fn hostile_headers_are_refused_by_their_numbers() {
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
            let cause = index_bytes(bytes).expect_err("a hostile header");
            assert!(matches!(cause, Cause::Safetensors(_)), "case {number}: {cause}");
        }
    }
}
