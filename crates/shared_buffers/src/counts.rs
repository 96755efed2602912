//! The number of shared buffers in each state.

use super::layout::View;
use super::state::Usage;

/// The number of shared buffers in each state. Other processes may change states at any time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BufferCounts {
    /// Free.
    pub free: usize,
    /// Being filled by a worker.
    pub filling: usize,
    /// Sent by a worker and not received.
    pub sent: usize,
    /// Received and not released, or in flight. Buffers with a damaged state are counted here too.
    pub received: usize,
}

impl BufferCounts {
    pub(super) fn read(view: View<'_>) -> Self {
        let mut counts = Self::default();
        for (_, entry) in view.buffer_headers() {
            let count = match entry.state.read().map(|state| state.usage) {
                Some(Usage::Free) => &mut counts.free,
                Some(Usage::Filling(_)) => &mut counts.filling,
                Some(Usage::Sent(_)) => &mut counts.sent,
                Some(Usage::Received) | None => &mut counts.received,
            };
            *count += 1;
        }
        counts
    }
}
