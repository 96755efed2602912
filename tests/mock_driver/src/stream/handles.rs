//! The handles of streams, which are reused.

const FIRST_HANDLE: usize = 0x5000_0000;
const HANDLE_STEP: usize = 0x10;

/// The number of the stream that each handle represents, in the order of the handles.
#[derive(Default)]
pub(super) struct Handles(Vec<Option<usize>>);

impl Handles {
    /// The number behind a handle.
    pub(super) fn number(&self, handle: usize) -> Option<usize> {
        let offset = handle.checked_sub(FIRST_HANDLE).filter(|offset| offset.is_multiple_of(HANDLE_STEP))?;
        self.0.get(offset / HANDLE_STEP).copied().flatten()
    }

    /// The first free handle, for a stream of this number.
    pub(super) fn assign(&mut self, number: usize) -> usize {
        let unused = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
        self.0.resize(self.0.len().max(unused + 1), None);
        self.0[unused] = Some(number);
        FIRST_HANDLE + unused * HANDLE_STEP
    }

    /// Frees the handle of this stream.
    pub(super) fn free(&mut self, number: usize) {
        self.0.iter_mut().filter(|known| **known == Some(number)).for_each(|known| *known = None);
    }
}
