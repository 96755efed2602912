//! Fake copies that end when the test says so.
#![allow(unsafe_code)] // Implements the unsafe traits of copies.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pinpool::copy::{CopyTarget, Enqueued, Fence};

/// A stream with copies that end, and fences that panic, on command.
#[derive(Debug, Clone, Default)]
pub(crate) struct ManualStream(pub(crate) Arc<ManualFence>);

#[derive(Debug, Default)]
pub(crate) struct ManualFence {
    pub(crate) is_over: AtomicBool,
    pub(crate) panics: AtomicBool,
}

// SAFETY: copies nothing, so no device uses the memory.
unsafe impl Fence for ManualFence {
    fn is_complete(&self) -> pinpool::Result<bool> {
        assert!(!self.panics.load(Ordering::SeqCst), "the fence panics");
        Ok(self.is_over.load(Ordering::SeqCst))
    }
    fn wait(&self) -> pinpool::Result<()> {
        Ok(())
    }
}

/// Where all copies go.
pub(crate) struct Nowhere;

// SAFETY: copies nothing.
unsafe impl CopyTarget<ManualStream> for Nowhere {
    fn capacity_bytes(&self) -> usize {
        usize::MAX
    }
    unsafe fn enqueue_write(&mut self, stream: &ManualStream, _source: *const u8, _len: usize) -> Enqueued {
        Ok(stream.0.clone())
    }
}
