//! What moves between store, user and device: memory with its class and its way home.

use std::ptr::NonNull;
use std::sync::Arc;

use super::core::Core;
use super::supply::Memory;

/// Memory of one class, and the pool that it belongs to. One pointer wide: moving it moves nothing.
///
/// A block carries its own reference to the pool, in use or idle, so that a hit touches no reference count. The circle
/// (the pool keeps idle blocks, which keep the pool) is cut when the pool closes and its store is drained.
#[derive(Debug)]
pub(crate) struct Block(Box<Parts>);

#[derive(Debug)]
struct Parts {
    core: Arc<Core>,
    memory: Memory,
}

impl Block {
    pub(crate) fn new(core: Arc<Core>, memory: Memory) -> Self {
        Self(Box::new(Parts { core, memory }))
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.0.core
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.0.memory.region().start()
    }

    pub(crate) fn class_bytes(&self) -> usize {
        self.0.memory.region().len_bytes()
    }

    pub(crate) fn id(&self) -> u64 {
        self.0.memory.region().id()
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.0.memory.held_bytes()
    }

    /// The memory, for its release, and the pool that it is released through.
    pub(crate) fn into_parts(self) -> (Arc<Core>, Memory) {
        (self.0.core, self.0.memory)
    }
}
