//! Memory that several processes use.
//!
//! | file | what it tests |
//! | --- | --- |
//! | `shared_pool` | buffers within one process: what is refused, tickets, waits, the limit, copies |
//! | `kills` | workers and trainers that are killed at any instruction |
#![cfg(target_os = "linux")]
#![allow(unsafe_code)] // Attaches workers.

mod kills;
mod shared_pool;

use std::os::fd::OwnedFd;

use pinpool_shared_buffers::{Result, SharedPool, SharedWorker};
use test_common::{child, draw};

fn descriptor(shared: &SharedPool) -> OwnedFd {
    // SAFETY: both sides are these tests, which change the memory only through the crate.
    unsafe { shared.descriptor() }.try_clone_to_owned().unwrap()
}

fn attach_to(descriptor: OwnedFd) -> Result<SharedWorker> {
    // SAFETY: as above.
    unsafe { SharedWorker::attach(descriptor) }
}

fn attach(shared: &SharedPool) -> SharedWorker {
    attach_to(descriptor(shared)).unwrap()
}
