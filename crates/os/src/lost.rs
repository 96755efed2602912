//! Values that are kept until the process ends, because it is unknown whether a device still uses their memory.
//!
//! They stay reachable, so that a leak checker does not report them. The statistics of a pool count such memory.

use crate::fork::OfProcess;
use crate::sync::plain::Mutex;

static LOST: OfProcess<Mutex<Vec<Box<dyn Send>>>> = OfProcess::new(Mutex::default);

/// Keeps `value` until the process ends.
pub fn keep<T: Send + 'static>(value: T) {
    let value = Box::new(value);
    LOST.get().lock().push(value);
}
