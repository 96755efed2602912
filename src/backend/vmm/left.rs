//! What the driver refused to take back from sources that are gone: the next source of the process tries again.
#![allow(unsafe_code)] // Calls the driver.

use crate::driver::virtual_memory::VmmApi;
use crate::fork::OfProcess;
use crate::sync::plain::Mutex;

static LEFT: OfProcess<Mutex<Left>> = OfProcess::new(Mutex::default);

#[derive(Debug, Default)]
struct Left {
    /// First address and length of ranges in which nothing is mapped.
    ranges: Vec<(u64, usize)>,
    /// Granules that are mapped nowhere.
    handles: Vec<u64>,
}

/// Keeps a range that came from the driver, in which nothing is mapped, and that nothing uses.
pub(super) fn keep_range(start: u64, bytes: usize) {
    LEFT.get().lock().ranges.push((start, bytes));
}

/// Keeps a granule that is mapped nowhere, and that nothing uses.
pub(super) fn keep_granule(handle: u64) {
    LEFT.get().lock().handles.push(handle);
}

/// Returns to the driver what it takes now.
pub(super) fn release(driver: VmmApi) {
    let (mut ranges, mut handles) = {
        let mut left = LEFT.get().lock();
        (std::mem::take(&mut left.ranges), std::mem::take(&mut left.handles))
    };
    // SAFETY: as `keep_granule` requires; it is no one else's since it was taken above.
    handles.retain(|&handle| unsafe { driver.release(handle) }.is_err());
    // SAFETY: as `keep_range` requires; it is no one else's since it was taken above.
    ranges.retain(|&(start, bytes)| unsafe { driver.unreserve(start, bytes) }.is_err());
    let mut left = LEFT.get().lock();
    left.ranges.append(&mut ranges);
    left.handles.append(&mut handles);
}
