//! `.safetensors` files: eight bytes of header length, a JSON header, then the tensors back to back.
//!
//! Only the header is read. The `safetensors` crate checks that its offsets leave no gaps and that sizes match shapes.
//!
//! - **safetensors-I1**: the length of the header is compared with the file and with [`HEADER_BYTES_MAX`] before any
//!   memory is allocated for it.

use std::fs::File;
use std::io::Read;

use ::safetensors::tensor::Metadata;

use crate::catalog::{ArchiveMember, FileRange};
use crate::failure::FailureCause;

const LENGTH_BYTES: u64 = size_of::<u64>() as u64;
/// The longest header that is read. The format allows 100 MB, but a parsed header takes up to 15 times its length, and one
/// of 16 MiB describes more than 100,000 tensors.
const HEADER_BYTES_MAX: u64 = 16 << 20;

/// Lists the tensors, in the order of their bytes.
pub(super) fn index(mut file: File, file_bytes: u64) -> Result<Vec<ArchiveMember>, FailureCause> {
    let broken = |why: String| Err(FailureCause::Safetensors(why));
    let Some(after_length) = file_bytes.checked_sub(LENGTH_BYTES) else {
        return broken(format!("{file_bytes} bytes are less than the 8 of the header's length"));
    };
    let mut length = [0; size_of::<u64>()];
    file.read_exact(&mut length)?;
    let claimed_bytes = u64::from_le_bytes(length);
    let max_bytes = after_length.min(HEADER_BYTES_MAX);
    if claimed_bytes > max_bytes {
        let limit = format!("at most {max_bytes} are possible: the rest of the file, or 16 MiB");
        return broken(format!("the header claims {claimed_bytes} bytes, {limit}"));
    }

    let mut header = Vec::new();
    file.take(claimed_bytes).read_to_end(&mut header)?;
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|error| FailureCause::Safetensors(error.to_string()))?;

    let data_start = LENGTH_BYTES + claimed_bytes;
    let (described_bytes, actual_bytes) = (metadata.data_len() as u64, file_bytes - data_start);
    if described_bytes != actual_bytes {
        return broken(format!("the header describes {described_bytes} bytes of tensors, {actual_bytes} follow it"));
    }

    let member = |(name, tensor): (String, &::safetensors::tensor::TensorInfo)| {
        // The crate has checked start <= end, and that the last end is `data_len`, which is the rest of the file.
        let (start, end) = tensor.data_offsets;
        let range = FileRange { offset: data_start + start as u64, len_bytes: (end - start) as u64 };
        ArchiveMember { name, ranges: vec![range], fields: Vec::new() }
    };
    let mut members: Vec<_> = metadata.tensors().into_iter().map(member).collect();
    // The order is by offset and then by name, since empty tensors share an offset.
    members.sort_by(|a, b| (a.ranges[0].offset, &a.name).cmp(&(b.ranges[0].offset, &b.name)));
    Ok(members)
}
