//! The driver's answers about a buffer of the program, corrected to those for an allocation of its own.
//!
//! The memory is the driver's own pinned memory, so most answers are right as they are. Those about the allocation
//! (its range, its id) are about a block of the pool, and are replaced by the buffer's. Its flags stay the flags of the block, which is
//! portable and mapped.

use std::ffi::c_int;
use std::ptr::NonNull;

use crate::buffers::Facts;

/// Attributes of pointers, as the driver numbers them.
const BUFFER_ID: c_int = 7;
const RANGE_START: c_int = 11;
const RANGE_BYTES: c_int = 12;

/// Corrects the driver's answer for an attribute, at `place`, which has space for it.
pub(crate) fn correct(facts: &Facts, attribute: c_int, place: *mut std::ffi::c_void) {
    let value = match attribute {
        BUFFER_ID => facts.id,
        RANGE_START => facts.start as u64,
        RANGE_BYTES => facts.bytes as u64,
        _ => return,
    };
    if let Some(place) = NonNull::new(place.cast::<u64>()) {
        // SAFETY: preload-I1: the driver wrote a value of 8 bytes of this attribute there.
        unsafe { place.write_unaligned(value) };
    }
}
