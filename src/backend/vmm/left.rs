//! What the driver refused to take back from sources that are gone: the next source of the process tries again, when it is made
//! and when it ends.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::c_int;

use crate::driver::device::Device;
use crate::driver::virtual_memory::{DriverRefusal, GranuleHandle, VmmApi};
use pinpool_os::fork::OfProcess;
use pinpool_os::sync::plain::Mutex;

static LEFT: OfProcess<Mutex<Left>> = OfProcess::new(Mutex::default);

#[derive(Debug, Default)]
struct Left {
    ranges: Vec<LeftRange>,
    /// Granules that are mapped nowhere.
    handles: Vec<GranuleHandle>,
}

/// Addresses that came from the driver, and that nothing uses.
#[derive(Debug, Default)]
pub(super) struct LeftRange {
    pub(super) start: u64,
    pub(super) bytes: usize,
    /// First address and length of what is still mapped there, and nothing else is.
    pub(super) mapped: Vec<(u64, usize)>,
    /// Granules that are mapped nowhere else, and that nothing uses.
    pub(super) handles: Vec<GranuleHandle>,
}

impl LeftRange {
    /// Whether the driver has taken back all of it now, or never will.
    fn is_released(&mut self, driver: VmmApi) -> bool {
        // SAFETY: whole granules that are mapped there and unused, as `keep_range` requires; no one else's since they were taken.
        self.mapped.retain(|&(start, bytes)| is_refused(unsafe { driver.unmap(start, bytes) }));
        if !self.mapped.is_empty() {
            return false;
        }
        // SAFETY: as `keep_range` requires, and mapped nowhere any more.
        self.handles.retain(|&handle| is_refused(unsafe { driver.release(handle) }));
        // SAFETY: as `keep_range` requires, and nothing is mapped there any more.
        self.handles.is_empty() && !is_refused(unsafe { driver.unreserve(self.start, self.bytes) })
    }
}

/// Keeps addresses with what is mapped there.
pub(super) fn keep_range(range: LeftRange) {
    LEFT.get().lock().ranges.push(range);
}

/// Keeps a granule that is mapped nowhere, and that nothing uses.
pub(super) fn keep_granule(handle: GranuleHandle) {
    LEFT.get().lock().handles.push(handle);
}

/// Whether to ask again. After an error that says that there is no such address or handle, it may be another's.
fn is_refused(result: Result<(), DriverRefusal>) -> bool {
    const INVALID_VALUE: c_int = 1;
    const INVALID_HANDLE: c_int = 400;
    result.is_err_and(|refusal| !matches!(refusal.code, INVALID_VALUE | INVALID_HANDLE))
}

/// Returns to the driver what it takes now.
pub(super) fn release(driver: VmmApi, device: &Device) {
    let Left { mut ranges, mut handles } = std::mem::take(&mut *LEFT.get().lock());
    if ranges.is_empty() && handles.is_empty() {
        return;
    }
    // Without a context the driver may refuse; then the next source tries.
    let _entered = device.enter_if_active();
    // SAFETY: as `keep_granule` requires; it is no one else's since it was taken above.
    handles.retain(|&handle| is_refused(unsafe { driver.release(handle) }));
    ranges.retain_mut(|range| !range.is_released(driver));
    let mut left = LEFT.get().lock();
    left.ranges.append(&mut ranges);
    left.handles.append(&mut handles);
}
