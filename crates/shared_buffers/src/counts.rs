//! The number of shared buffers in each state.

use super::layout::View;
use super::state::Use;

/// The number of shared buffers in each state. Other processes may change states at any time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Free.
    pub free: usize,
    /// Being filled by a worker.
    pub filling: usize,
    /// Sent by a worker and not received.
    pub sent: usize,
    /// Received and not released, or in flight. Buffers with a damaged state are counted here too.
    pub held: usize,
}

impl Counts {
    pub(super) fn read(view: View<'_>) -> Self {
        let mut counts = Self::default();
        for (_, entry) in view.entries() {
            let count = match entry.state.read().map(|state| state.usage) {
                Some(Use::Free) => &mut counts.free,
                Some(Use::Filling(_)) => &mut counts.filling,
                Some(Use::Sent(_)) => &mut counts.sent,
                Some(Use::Held) | None => &mut counts.held,
            };
            *count += 1;
        }
        counts
    }
}
