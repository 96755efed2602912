//! What is never used again and never freed: whether a device still uses its memory cannot be known.
//!
//! It stays reachable, so that a leak checker reports only what nobody kept on purpose. Lost memory has its own figure
//! in the statistics of its pool.

use crate::fork::OfProcess;
use crate::sync::plain::Mutex;

static LOST: OfProcess<Mutex<Vec<Box<dyn Send>>>> = OfProcess::new(Mutex::default);

/// Keeps `value` until the process ends.
pub fn keep<T: Send + 'static>(value: T) {
    let value = Box::new(value);
    LOST.get().lock().push(value);
}
