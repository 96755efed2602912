//! What the driver refused to take back from sources that are gone: the next source of the process tries again, when it is made
//! and when it ends.
#![allow(unsafe_code)] // Calls the driver.

use crate::driver::virtual_memory::{GranuleHandle, VmmApi};
use crate::fork::OfProcess;
use crate::sync::plain::Mutex;

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
    /// Whether the driver has taken back all of it now.
    fn is_released(&mut self, driver: VmmApi) -> bool {
        // SAFETY: whole granules that are mapped there and unused, as `keep_range` requires; no one else's since they were taken.
        self.mapped.retain(|&(start, bytes)| unsafe { driver.unmap(start, bytes) }.is_err());
        if !self.mapped.is_empty() {
            return false;
        }
        // SAFETY: as `keep_range` requires, and mapped nowhere any more.
        self.handles.retain(|&handle| unsafe { driver.release(handle) }.is_err());
        // SAFETY: as `keep_range` requires, and nothing is mapped there any more.
        self.handles.is_empty() && unsafe { driver.unreserve(self.start, self.bytes) }.is_ok()
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

/// Returns to the driver what it takes now.
pub(super) fn release(driver: VmmApi) {
    let Left { mut ranges, mut handles } = std::mem::take(&mut *LEFT.get().lock());
    // SAFETY: as `keep_granule` requires; it is no one else's since it was taken above.
    handles.retain(|&handle| unsafe { driver.release(handle) }.is_err());
    ranges.retain_mut(|range| !range.is_released(driver));
    let mut left = LEFT.get().lock();
    left.ranges.append(&mut ranges);
    left.handles.append(&mut handles);
}
