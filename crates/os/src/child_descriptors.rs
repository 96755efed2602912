//! Descriptors that a child of `fork` closes. Otherwise a worker that outlives its parent would keep the parent's sockets open
//! and its files locked.
//!
//! The list has the number and the file of each descriptor. Before a number is closed, in a child or at the end, its file is
//! compared: code of the process may have closed the number, which may now refer to another file.
#![allow(unsafe_code)] // Closes descriptors in a child.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicI32, AtomicU64};

use crate::file_id::FileId;
use crate::fork::{self, ForkGeneration, HeldOff};
use crate::sync::process::{AtomicBool, Ordering};

/// Marks a free entry.
const FREE: i32 = -1;
/// Marks an entry that is about to receive a descriptor.
const TAKEN: i32 = -2;

/// A descriptor, and the file that it was open on.
struct Place {
    descriptor: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

static LISTED: [Place; 1024] =
    [const { Place { descriptor: AtomicI32::new(FREE), device: AtomicU64::new(0), inode: AtomicU64::new(0) } }; 1024];

impl Place {
    /// The file of `descriptor`, which this place lists.
    fn is_still(&self, descriptor: i32) -> bool {
        // Relaxed: written before the descriptor was, by this thread or by one that had done so before the fork.
        let (device, inode) = (self.device.load(Ordering::Relaxed), self.inode.load(Ordering::Relaxed));
        FileId::of_descriptor(descriptor).is_ok_and(|found| found == FileId { device, inode })
    }
}

extern "C" fn close_listed() {
    for place in &LISTED {
        // Relaxed: the child has one thread.
        let descriptor = place.descriptor.swap(FREE, Ordering::Relaxed);
        if descriptor >= 0 && place.is_still(descriptor) {
            // SAFETY: the child's copy of a descriptor that a `ParentOnly` owns, which does not close it again in a child.
            // `close` may be called in a child of a process with threads.
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
    /// `_no_fork` is taken before `value` is opened, so that no child has it unlisted.
    ///
    /// # Errors
    ///
    /// If this process has as many of them as are listed.
    pub fn new(value: T, _no_fork: &HeldOff) -> io::Result<Self> {
        static REGISTERED: AtomicBool = AtomicBool::new(false);
        fork::call_in_children(&REGISTERED, close_listed);
        let descriptor = value.as_fd().as_raw_fd();
        let FileId { device, inode } = FileId::of_descriptor(descriptor)?;
        // Acquire, with the Release of `drop`: what is written here comes after the last user's.
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
        // Relaxed: a child is forked with what its parent had stored, and forks are held off.
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
        // A child has closed it, and the place may list a descriptor of the child's own.
        if self.generation.is_stale() {
            return;
        }
        let place = &LISTED[self.listed];
        if place.is_still(self.value.as_fd().as_raw_fd()) {
            // SAFETY: dropped here alone, once, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
        // Release, with the Acquire of `new`. After the descriptor is closed: a child that is forked in between finds another
        // file or none there.
        place.descriptor.store(FREE, Ordering::Release);
    }
}

#[cfg(all(test, not(miri), not(pinpool_loom)))]
mod tests {
    use std::fs::File;
    use std::os::fd::{FromRawFd, OwnedFd};

    use super::*;

    fn opened(path: &std::path::Path) -> ParentOnly<File> {
        let no_fork = fork::hold_off();
        ParentOnly::new(File::create(path).unwrap(), &no_fork).unwrap()
    }

    #[test]
    fn a_number_that_is_another_files_by_now_is_not_closed() {
        let dir = tempfile::tempdir().unwrap();
        let own = opened(&dir.path().join("own"));
        let number = own.as_raw_fd();
        let other = File::create(dir.path().join("other")).unwrap();
        // SAFETY: replaces the file of a number that `own` alone has, as careless code of a program does.
        assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), number) }, number);
        drop(own);
        // SAFETY: nothing else owns the number from here on.
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
