//! What moves between the idle ones, users and devices: memory with its class and its way home.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::core::Core;
use super::residence;
use super::supply::Memory;
use crate::engine::idle::thread_cache::Entry;
use crate::error::Error;
use crate::in_flight::{CopyFences, FenceKind, Fences};
use crate::size_class::Class;
use crate::sync::process::{AtomicU64, Ordering};

/// Memory of one class, and the pool that it belongs to. One pointer wide: moving it moves nothing.
///
/// A block carries its own reference to the pool, in use or idle, so that a hit touches no reference count. The circle
/// (the pool keeps idle blocks, which keep the pool) is cut when the pool closes and is drained.
pub(crate) struct Block(Box<Entry<Parts>>);

/// Without the pool that it leads to.
impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("class_bytes", &self.class_bytes())
            .field("memory", &self.0.memory)
            .field("state", &self.0.state)
            .finish()
    }
}

/// What a block is made of, behind the header by which the front links idle ones.
#[derive(Debug)]
pub(super) struct Parts {
    core: Arc<Core>,
    memory: Memory,
    class_bytes: usize,
    state: BufferState,
    /// How often it is aboard, since it was last known to be free: once, or more if threads came together.
    boarded: AtomicU64,
}

/// What the user of a block has made of it. Kept with the block, so that a buffer is one pointer, which a get returns in
/// a register.
#[derive(Debug, Default)]
pub(crate) struct BufferState {
    /// From the start of the block to the first byte of the buffer.
    pub(crate) skip_bytes: usize,
    pub(crate) len: usize,
    /// Where `io::Write` goes on.
    pub(crate) position: usize,
    pub(crate) copy_fences: CopyFences,
}

impl BufferState {
    /// A new user asks for `len` bytes. Writes only what differs: a loader asks for the same again and again, and what is
    /// not written need not travel to the core that puts the buffer back.
    #[inline]
    pub(crate) fn begin(&mut self, skip_bytes: usize, len: usize) {
        for (field, value) in [(&mut self.skip_bytes, skip_bytes), (&mut self.len, len), (&mut self.position, 0)] {
            if *field != value {
                *field = value;
            }
        }
    }
}

impl Block {
    pub(super) fn new(core: Arc<Core>, memory: Memory, class: Class) -> Self {
        let held_bytes = usize::try_from(memory.held_bytes()).unwrap_or(usize::MAX);
        Self(Entry::new(
            class.index,
            held_bytes,
            Parts { core, memory, class_bytes: class.bytes, state: BufferState::default(), boarded: AtomicU64::new(0) },
        ))
    }

    #[inline]
    pub(super) fn of_entry(entry: Box<Entry<Parts>>) -> Self {
        Self(entry)
    }

    #[inline]
    pub(super) fn into_entry(self) -> Box<Entry<Parts>> {
        self.0
    }

    #[inline]
    pub(super) fn core(&self) -> &Arc<Core> {
        &self.0.core
    }

    #[inline]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.0.memory.start()
    }

    #[inline]
    pub(crate) fn class_bytes(&self) -> usize {
        self.0.class_bytes
    }

    #[inline]
    pub(crate) fn state(&self) -> &BufferState {
        &self.0.state
    }

    #[inline]
    pub(crate) fn state_mut(&mut self) -> &mut BufferState {
        &mut self.0.state
    }

    pub(super) fn class(&self) -> Class {
        Class { bytes: self.0.class_bytes, index: self.0.class() }
    }

    pub(crate) fn id(&self) -> u64 {
        self.0.memory.id()
    }

    /// Is it in memory of the pool's source, and not the ordinary memory that stands in when that is full?
    #[inline]
    pub(super) fn is_from_source(&self) -> bool {
        self.0.memory.is_from_source()
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.is_from_source() && self.core().is_pinned()
    }

    pub(crate) fn numa_node(&self) -> Option<u32> {
        self.core().numa_node().filter(|_| self.is_from_source())
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.0.memory.held_bytes()
    }

    /// Comes before every copy from it that is enqueued. May wait, while memory goes back to a driver that would wait for
    /// the copy.
    #[inline]
    pub(crate) fn begin_copy(&self) {
        // Aboard already, it must not wait: a release that is to begin waits for it. Acquire, with the Release below:
        // whoever sees another thread's boarding comes after the release which that one came after.
        if self.0.boarded.load(Ordering::Acquire) == 0 {
            self.core().begin_copy();
            self.0.boarded.fetch_add(1, Ordering::Release);
        }
    }

    /// All copies from it are over. Nobody else has it.
    #[inline]
    pub(crate) fn end_copies(&self) {
        // Relaxed: who has the block alone comes after all who boarded. Loaded first, for most puts come without a copy.
        if self.0.boarded.load(Ordering::Relaxed) > 0 {
            self.core().end_copies(self.0.boarded.swap(0, Ordering::Relaxed));
        }
    }

    /// How the end of a copy from it is best learnt.
    pub(crate) fn fence_kind(&self) -> FenceKind {
        self.core().fence_kind()
    }

    /// Is this a child of the process whose memory it is? Then it is left alone.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.core().is_forked()
    }

    /// Is this a child, and the memory one that a driver may not have left to it?
    #[inline]
    pub(crate) fn is_out_of_reach(&self) -> bool {
        self.is_forked() && self.is_from_source() && self.core().source().needs_gpu()
    }

    pub(crate) fn check_process(&self) -> Result<(), Error> {
        self.core().check_process()
    }

    /// The put: nobody uses it any more.
    #[inline]
    pub(crate) fn put_back(self) {
        residence::inside(self, Core::put);
    }

    /// The put, when all `fences` are over.
    pub(crate) fn put_back_after(self, fences: Fences) {
        residence::inside(self, |core, block| core.put_after(block, fences));
    }

    /// Takes it out of use for good: nobody knows when a device is done with it.
    pub(crate) fn leak(self, error: &Error) {
        residence::inside(self, |core, block| core.leak(block, error));
    }

    /// The memory, for its release, and the pool that it is released through.
    pub(super) fn into_parts(self) -> (Arc<Core>, Memory) {
        let parts = self.0.into_value();
        (parts.core, parts.memory)
    }
}
