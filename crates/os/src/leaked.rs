//! Values that are kept until the process ends, because it is unknown whether a device still uses their memory.
//!
//! They stay reachable, so that a leak checker does not report them. The statistics of a pool count such memory.

use crate::fork::PerProcess;
use crate::sync::unmodeled::Mutex;

static LEAKED: PerProcess<Mutex<Vec<Box<dyn Send>>>> = PerProcess::new(Mutex::default);

/// Leaks `value`: keeps it until the process ends.
pub fn leak<T: Send + 'static>(value: T) {
    let value = Box::new(value);
    LEAKED.get().lock().push(value);
}
