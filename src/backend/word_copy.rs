//! Whether a device can copy from host memory: one word is copied there and back, on a dedicated stream.
//!
//! Part of a trial. Where the device has no memory for a word, or a capture forbids the calls, nothing is known and that is
//! no refusal. Frees nothing in a way that waits for the device, where the driver has a choice.
#![allow(unsafe_code)] // Calls the driver, and reads and writes the memory of a trial.

use std::ptr::NonNull;

use cudarc::driver::sys;

use crate::driver::calls;
use crate::driver::code::Code;
use crate::driver::device::{Device, driver_error};
use crate::error::SourceError;

const WORD_BYTES: usize = size_of::<u64>();
/// Neither zero nor what a driver fills memory with.
const WORD: u64 = 0x7072_6f62_6564_2131;

/// Copies the first word behind `start` to the device and back into the second.
///
/// # Safety
///
/// The first two words are the caller's alone, readable and writable.
pub(super) unsafe fn through(device: &Device, start: NonNull<u8>) -> Result<(), SourceError> {
    let _entered = device.enter()?;
    let Ok(stream) = Stream::new() else { return Ok(()) };
    let Some(memory) = DeviceWord::new(&stream) else { return Ok(()) };
    let (sent, back) = (start.cast::<u64>(), start.as_ptr().wrapping_add(WORD_BYTES).cast::<u64>());
    // SAFETY: the caller's promise; the memory of every source starts at a page.
    unsafe { sent.write_volatile(WORD) };
    // SAFETY: as above; the second word lies behind the first.
    unsafe { back.write_volatile(0) };
    // SAFETY: both have a word, and live until the stream is over, below.
    let there = unsafe { calls::copy_to_device(memory.address, sent.as_ptr().cast(), WORD_BYTES, stream.0) };
    // SAFETY: as above.
    let and_back = unsafe { calls::copy_to_host(back.cast(), memory.address, WORD_BYTES, stream.0) };
    // The words are used until then, also if one of the copies was refused: a wait that is refused is made again.
    let ended = stream.wait().or_else(|_| stream.wait());
    refusal("cuMemcpyHtoDAsync", there)?;
    refusal("cuMemcpyDtoHAsync", and_back)?;
    refusal("cuStreamSynchronize", ended)?;
    // SAFETY: as above, and the device is done with it.
    let arrived = unsafe { back.read_volatile() };
    // A capture may have refused the copies.
    let was_copied = there.is_ok() && and_back.is_ok() && ended.is_ok();
    if was_copied && arrived != WORD {
        return Err(SourceError::new("copy", format!("the word {WORD:#x} came back from the device as {arrived:#x}")));
    }
    Ok(())
}

fn refusal(call: &'static str, outcome: Result<(), Code>) -> Result<(), SourceError> {
    match outcome {
        Err(error) if !error.is_forbidden_by_capture() => Err(driver_error(call, error)),
        _ => Ok(()),
    }
}

struct Stream(sys::CUstream);

impl Stream {
    /// A stream that waits for no other.
    fn new() -> Result<Self, Code> {
        calls::stream_create(calls::NON_BLOCKING).map(Self)
    }

    fn wait(&self) -> Result<(), Code> {
        // SAFETY: live until `self` is dropped.
        unsafe { calls::stream_synchronize(self.0) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once.
        let _gone = unsafe { calls::stream_destroy(self.0) };
    }
}

/// A word of device memory.
struct DeviceWord<'a> {
    address: sys::CUdeviceptr,
    /// The stream that frees it; else a call that waits for the device does.
    stream: Option<&'a Stream>,
}

impl<'a> DeviceWord<'a> {
    fn new(stream: &'a Stream) -> Option<Self> {
        // Drivers that can do the first can do the second.
        // SAFETY: a live stream.
        if let Ok(address) = unsafe { calls::device_alloc_async(WORD_BYTES, stream.0) } {
            return Some(Self { address, stream: Some(stream) });
        }
        calls::device_alloc(WORD_BYTES).ok().map(|address| Self { address, stream: None })
    }
}

impl Drop for DeviceWord<'_> {
    fn drop(&mut self) {
        let _gone = match self.stream {
            // SAFETY: allocated on this stream, all copies on it have completed, and freed once.
            Some(stream) => unsafe { calls::device_free_async(self.address, stream.0) },
            // SAFETY: as above.
            None => unsafe { calls::device_free(self.address) },
        };
    }
}
