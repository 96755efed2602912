//! Handles of streams, which recur: what was destroyed last week and what was destroyed with its work still running are
//! free alike, as on a real driver. Inside the double a stream goes by its number, which is never given twice.

use crate::call::{Out, driver_call};
use crate::{capture, stream};

/// The handles every program knows.
pub(crate) const LEGACY: usize = 0;
pub(crate) const LEGACY_BY_NAME: usize = 1;
pub(crate) const PER_THREAD: usize = 2;
const FIRST: usize = 0x5000_0000;
const STEP: usize = 0x10;

/// The number of the stream that each handle stands for, in the order of the handles.
pub(crate) struct Handles(Vec<Option<usize>>);

impl Handles {
    pub(crate) const fn new() -> Self {
        Self(Vec::new())
    }

    /// The number behind a handle.
    pub(crate) fn number(&self, handle: usize) -> Option<usize> {
        let offset = handle.checked_sub(FIRST).filter(|offset| offset.is_multiple_of(STEP))?;
        self.0.get(offset / STEP).copied().flatten()
    }

    /// The first free handle, for a stream of this number.
    pub(crate) fn give(&mut self, number: usize) -> usize {
        let free = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
        self.0.resize(self.0.len().max(free + 1), None);
        self.0[free] = Some(number);
        FIRST + free * STEP
    }

    /// Nothing goes by this stream's handle any more.
    pub(crate) fn take_back(&mut self, number: usize) {
        self.0.iter_mut().filter(|known| **known == Some(number)).for_each(|known| *known = None);
    }
}

driver_call! { Device fn cuStreamGetId(handle: usize, out: Out<u64>) {
    let number = stream::resolve(handle)?;
    capture::forbid_naming(number)?;
    out.put(number as u64)
}}
