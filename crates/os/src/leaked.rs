//! Values that are kept until the process ends, because it is unknown whether a device still uses their memory.
//!
//! They stay reachable, so that a leak checker does not report them. The statistics of a pool count such memory.

use crate::fork::OfProcess;
use crate::sync::plain::Mutex;

static LEAKED: OfProcess<Mutex<Vec<Box<dyn Send>>>> = OfProcess::new(Mutex::default);

/// Leaks `value`: keeps it until the process ends.
pub fn leak<T: Send + 'static>(value: T) {
    let value = Box::new(value);
    LEAKED.get().lock().push(value);
}
