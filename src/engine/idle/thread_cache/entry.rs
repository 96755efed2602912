//! A buffer with the header by which the front remembers it while it is idle.
//!
//! The header travels with the buffer, so neither a get nor a put allocates, and one move of a pointer hands over all.
//! Its links belong to the front alone: they mean something only while the entry is idle.
#![allow(unsafe_code)] // Send and Sync despite the links; see the comments there.

use super::slot;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Another idle entry, or none.
pub(super) type Link<T> = Option<NonNull<Entry<T>>>;

/// What the front holds: a value, its class, and where it is idle.
///
/// The alignment keeps two entries off one cache line and leaves the low bits of an address to the inbox.
#[repr(C, align(64))]
pub struct Entry<T> {
    /// Same class, put back later and earlier. In an inbox `below` is the one put there before.
    pub(super) above: Link<T>,
    pub(super) below: Link<T>,
    /// Any class, put back next and just before.
    pub(super) newer: Link<T>,
    pub(super) older: Link<T>,
    /// Coarse time of the last put.
    pub(super) stamp: u32,
    pub(super) class: u32,
    /// The seat that took it last, where a put brings it home to.
    pub(super) home: u32,
    bytes: usize,
    value: T,
}

// SAFETY: the links are followed only by the shelf or the inbox that holds the entry (shelf I1, inbox I1); whoever else
// has the entry has a value, a few numbers and pointers that nobody reads.
unsafe impl<T: Send> Send for Entry<T> {}

// SAFETY: as above; `&Entry` shows the value and the numbers only.
unsafe impl<T: Sync> Sync for Entry<T> {}

impl<T> Entry<T> {
    /// Wraps `value`, whose home is the calling thread.
    pub fn new(class: u32, bytes: usize, value: T) -> Box<Self> {
        Self::new_at(slot::current().number(), class, bytes, value)
    }

    pub(super) fn new_at(home: u32, class: u32, bytes: usize, value: T) -> Box<Self> {
        Box::new(Self { above: None, below: None, newer: None, older: None, stamp: 0, class, home, bytes, value })
    }

    /// The size class under which it is put and taken.
    pub fn class(&self) -> u32 {
        self.class
    }

    /// The bytes that it stands for in sums of idle bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes the header off.
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
