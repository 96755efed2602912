//! Descriptors that a forked child closes. Otherwise a worker that outlives its parent would keep the parent's sockets open and
//! its files locked.
//!
//! The list contains the number and the file of each descriptor. Before a descriptor is closed, in a child or by its owner's
//! drop, its file is compared with the listed file: other code of the process may have closed the descriptor, and its number may
//! refer to another file now.
#![allow(unsafe_code)] // Closes descriptors in a child.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicI32, AtomicU64};

use crate::file_id::FileId;
use crate::fork::{self, ForkDelay, ForkGeneration};
use crate::sync::unmodeled::{AtomicBool, Ordering};

/// The value of a free entry.
const FREE: i32 = -1;
/// The value of an entry that is about to receive a descriptor.
const TAKEN: i32 = -2;

/// A descriptor, and the file that it referred to when it was listed.
struct Place {
    descriptor: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

static LISTED: [Place; 1024] =
    [const { Place { descriptor: AtomicI32::new(FREE), device: AtomicU64::new(0), inode: AtomicU64::new(0) } }; 1024];

impl Place {
    /// Returns whether `descriptor`, which this entry lists, still refers to the listed file.
    fn is_still(&self, descriptor: i32) -> bool {
        // Relaxed: `ParentOnly::new` stored both before the descriptor, while forks were delayed. So they are visible to a child
        // that finds the descriptor, and to the thread that drops the owner.
        let (device, inode) = (self.device.load(Ordering::Relaxed), self.inode.load(Ordering::Relaxed));
        FileId::of_descriptor(descriptor).is_ok_and(|found| found == FileId { device, inode })
    }
}

extern "C" fn close_listed() {
    for place in &LISTED {
        // Relaxed: the child has one thread.
        let descriptor = place.descriptor.swap(FREE, Ordering::Relaxed);
        if descriptor >= 0 && place.is_still(descriptor) {
            // SAFETY: this is the child's copy of a descriptor that a `ParentOnly` owns. In a child the `ParentOnly` does not
            // close it again. `close` may be called in a child of a process with threads.
            unsafe { libc::close(descriptor) };
        }
    }
}

/// A file or a socket that children of `fork` do not inherit.
#[derive(Debug)]
pub struct ParentOnly<T: AsFd> {
    value: ManuallyDrop<T>,
    listed: usize,
    generation: ForkGeneration,
}

impl<T: AsFd> ParentOnly<T> {
    /// Lists `value`. `_no_fork` must be acquired before `value` is opened, so that no child inherits it unlisted.
    ///
    /// # Errors
    ///
    /// All entries of the list are in use, or the system does not report the file of `value`.
    pub fn new(value: T, _no_fork: &ForkDelay) -> io::Result<Self> {
        static REGISTERED: AtomicBool = AtomicBool::new(false);
        // SAFETY: the handler uses atomics, and calls fstat and close.
        unsafe { fork::call_in_children(&REGISTERED, close_listed) };
        let descriptor = value.as_fd().as_raw_fd();
        let FileId { device, inode } = FileId::of_descriptor(descriptor)?;
        // Acquire pairs with the Release of `drop`: the stores below come after every access by the entry's previous owner.
        let take = |place: &Place| {
            place.descriptor.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let listed = LISTED.iter().position(take).ok_or_else(|| {
            io::Error::other(format!(
                "this process has {} recordings and sockets open, and may have no more: close some",
                LISTED.len()
            ))
        })?;
        let place = &LISTED[listed];
        // Relaxed: a child has everything that its parent stored before the fork, and forks are delayed during this call.
        place.device.store(device, Ordering::Relaxed);
        place.inode.store(inode, Ordering::Relaxed);
        place.descriptor.store(descriptor, Ordering::Relaxed);
        Ok(Self { value: ManuallyDrop::new(value), listed, generation: ForkGeneration::now() })
    }
}

impl<T: AsFd> Deref for ParentOnly<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: AsFd> Drop for ParentOnly<T> {
    fn drop(&mut self) {
        // In a child, `close_listed` has closed the descriptor, and the entry may list one of the child's own descriptors.
        if self.generation.is_stale() {
            return;
        }
        let place = &LISTED[self.listed];
        if place.is_still(self.value.as_fd().as_raw_fd()) {
            // SAFETY: the value is dropped only here, once, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
        // Release pairs with the Acquire of `new`. The entry is freed only after the descriptor is closed. A child that is forked
        // in between finds another file or none behind the number, and does not close it.
        place.descriptor.store(FREE, Ordering::Release);
    }
}

#[cfg(all(test, not(miri), not(pinpool_loom)))]
mod tests {
    use std::fs::File;
    use std::os::fd::{FromRawFd, OwnedFd};

    use super::*;

    fn opened(path: &std::path::Path) -> ParentOnly<File> {
        let no_fork = fork::delay_forks();
        ParentOnly::new(File::create(path).unwrap(), &no_fork).unwrap()
    }

    #[test]
    fn a_number_that_is_another_files_by_now_is_not_closed() {
        let dir = tempfile::tempdir().unwrap();
        let own = opened(&dir.path().join("own"));
        let number = own.as_raw_fd();
        let other = File::create(dir.path().join("other")).unwrap();
        // SAFETY: only `own` has this number. The call replaces the file behind it, as careless code of a program might.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
        drop(own);
        // SAFETY: from here on, nothing else owns the number.
        let still_open = unsafe { OwnedFd::from_raw_fd(number) };
        assert!(File::from(still_open).metadata().is_ok());
    }

    #[test]
    fn a_place_is_free_again_after_its_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        for _ in 0..LISTED.len() + 10 {
            drop(opened(&dir.path().join("f")));
        }
    }
}
