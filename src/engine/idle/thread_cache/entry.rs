//! A buffer with the header that the thread cache needs while the buffer is idle.
//!
//! The header travels with the buffer, so neither a take nor a put allocates, and a buffer changes hands as one pointer.
//! The links belong to the cache alone: they mean something only while the entry is idle.
#![allow(unsafe_code)] // Send and Sync despite the links.

use super::slot;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Another idle entry, or none.
pub(super) type Link<T> = Option<NonNull<Entry<T>>>;

/// What the cache holds: a value, its class, and its links while it is idle.
///
/// The alignment keeps two entries off one cache line and leaves the low bits of an address to the remote free list.
#[repr(C, align(64))]
pub struct Entry<T> {
    /// Same class: put next and put before. In a remote free list `below` is the one pushed before.
    pub(super) above: Link<T>,
    pub(super) below: Link<T>,
    /// Any class: put next and put before.
    pub(super) newer: Link<T>,
    pub(super) older: Link<T>,
    /// Coarse time of the last put.
    pub(super) stamp: u32,
    pub(super) class: u32,
    /// Slot number of the thread that took it last; a put returns it to that shard.
    pub(super) owner: u32,
    bytes: usize,
    value: T,
}

// SAFETY: only the free list or remote free list that holds the entry follows its links (list-I1, remote-I1); to any other
// thread that has the entry they are numbers that it never reads.
unsafe impl<T: Send> Send for Entry<T> {}

// SAFETY: as above; `&Entry` gives access to the value and the numbers only.
unsafe impl<T: Sync> Sync for Entry<T> {}

impl<T> Entry<T> {
    /// Wraps `value`; the calling thread's shard owns it.
    pub fn new(class: u32, bytes: usize, value: T) -> Box<Self> {
        Self::new_at(slot::current().number(), class, bytes, value)
    }

    pub(super) fn new_at(owner: u32, class: u32, bytes: usize, value: T) -> Box<Self> {
        Box::new(Self { above: None, below: None, newer: None, older: None, stamp: 0, class, owner, bytes, value })
    }

    /// The size class under which it is put and taken.
    pub fn class(&self) -> u32 {
        self.class
    }

    /// What it adds to the sum of idle bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Unwraps the value.
    pub fn into_value(self) -> T {
        self.value
    }
}

impl<T> Deref for Entry<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Entry<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T: fmt::Debug> fmt::Debug for Entry<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("class", &self.class)
            .field("bytes", &self.bytes)
            .field("stamp", &self.stamp)
            .field("value", &self.value)
            .finish_non_exhaustive()
    }
}
