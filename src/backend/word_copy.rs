//! Copies a word from host memory to a device and back on a dedicated stream, and compares it.
#![allow(unsafe_code)] // Calls the driver, and accesses the memory of a trial.

use std::ptr::NonNull;

use cudarc::driver::sys;

use crate::driver::code::{Code, FailedCall};
use crate::driver::device::Device;
use crate::driver::{calls, with_one_retry};
use crate::error::SourceError;

const WORD_BYTES: usize = size_of::<u64>();
/// The copied value, which is neither zero nor a value with which a driver fills memory.
const WORD: u64 = 0x7072_6f62_6564_2131;

/// The error of the first call that failed, and whether the device has finished using the words. If it has not, their memory must
/// not be released.
pub(super) type Failure = (SourceError, bool);

/// Copies the first word at `start` to the device and back into the second word. If the device has no memory for the word, makes no
/// copy and returns the reason. This is not a failure: a framework may have taken all device memory, and some devices have no memory
/// pools, but such devices can still copy from pinned memory.
///
/// # Safety
///
/// The first two words must be aligned, readable and writable, and belong to the caller alone.
pub(super) unsafe fn check(device: u32, start: NonNull<u8>) -> Result<Option<SourceError>, Failure> {
    let _entered = Device::find(device).and_then(|device| device.enter()).map_err(|error| (error, true))?;
    let stream = calls::stream_create(calls::CU_STREAM_NON_BLOCKING).map_err(|failed| (failed.into(), true))?;
    // SAFETY: the caller's promise, and a live stream.
    let copied = unsafe { check_on(stream, start.cast()) };
    // SAFETY: created above, destroyed once.
    let _gone = unsafe { calls::stream_destroy(stream) };
    copied
}

/// # Safety
///
/// The contract of [`check`], and a live stream.
unsafe fn check_on(stream: sys::CUstream, sent: NonNull<u64>) -> Result<Option<SourceError>, Failure> {
    // SAFETY: a live stream. Memory is allocated in this way because freeing it does not wait for the device.
    let word = match unsafe { calls::device_alloc_async(WORD_BYTES, stream) } {
        Ok(word) => word,
        Err(failed @ FailedCall { code: Code::OUT_OF_MEMORY | Code::NOT_SUPPORTED | Code::NOT_FOUND, .. }) => {
            return Ok(Some(failed.into()));
        }
        Err(failed) => return Err((failed.into(), true)),
    };
    // SAFETY: the caller's promise.
    let back = unsafe { sent.add(1) };
    // SAFETY: the caller's promise.
    unsafe { sent.write_volatile(WORD) };
    // SAFETY: the caller's promise.
    unsafe { back.write_volatile(0) };
    // SAFETY: both words are live until the stream has completed, below.
    let there = unsafe { calls::copy_to_device(word, sent.as_ptr().cast(), WORD_BYTES, stream) };
    // SAFETY: both words are live until the stream has completed, below.
    let and_back = unsafe { calls::copy_to_host(back.as_ptr().cast(), word, WORD_BYTES, stream) };
    // SAFETY: allocated on this stream, and freed once.
    let _gone = unsafe { calls::device_free_async(word, stream) };
    // The device uses the words until the stream has completed, even if one of the copies was refused.
    // SAFETY: a live stream.
    let completed = with_one_retry(|| unsafe { calls::stream_synchronize(stream) });
    there.and(and_back).and(completed).map_err(|failed| (failed.into(), completed.is_ok()))?;
    // SAFETY: the caller's promise, and the device is done with it.
    let arrived = unsafe { back.read_volatile() };
    let differs = || SourceError::new("copy", format!("the word {WORD:#x} came back from the device as {arrived:#x}"));
    if arrived == WORD { Ok(None) } else { Err((differs(), true)) }
}
