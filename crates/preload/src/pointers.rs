//! What the driver answers about a buffer of the program: what it would answer for its own allocation.
//!
//! The memory is the driver's own pinned memory, so most answers are right as they are. Those about the allocation
//! (its flags, its range, its id) are about a block of the pool: flags are the driver's answer for a sample that was allocated
//! with the flags of the program, the others are the buffer's.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::ptr::NonNull;

use crate::buffers::{Facts, WITHOUT_FLAGS};
use crate::driver::{Code, Driver};
use crate::locks::Mutex;

/// Attributes of pointers, as the driver numbers them.
const BUFFER_ID: c_int = 7;
const RANGE_START: c_int = 11;
const RANGE_BYTES: c_int = 12;

/// The flags that the driver tells, by the context and the flags of an allocation.
static TOLD: Mutex<BTreeMap<(usize, c_uint), Result<c_uint, Code>>> = Mutex::new(BTreeMap::new());

/// The flags that `cuMemHostGetFlags` tells of an allocation with the flags of this buffer.
pub(crate) fn flags(driver: &Driver, facts: &Facts) -> Result<c_uint, Code> {
    let key = (facts.context.handle(), facts.flags);
    let mut told = TOLD.lock();
    if let Some(answer) = told.get(&key) {
        return *answer;
    }
    let asked = facts.context.while_alive(|handle| {
        let _entered = driver.enter(handle)?;
        let sample = match facts.flags {
            WITHOUT_FLAGS => driver.alloc_host(1),
            flags => driver.host_alloc(1, flags),
        }?;
        // The sample stays: to free it would wait for the device.
        driver.host_flags(sample)
    });
    let answer = asked.unwrap_or(Err(crate::driver::CONTEXT_IS_DESTROYED));
    if answer.is_ok() {
        told.insert(key, answer);
    }
    answer
}

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
