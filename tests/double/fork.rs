//! What a driver has pinned for a process is not there for its children, and they are told so by an empty buffer.
#![allow(unsafe_code)] // Asks the kernel for what is mapped.

use pinpool::{Backend, Pool};

use crate::child::{alone, in_a_child};

#[test]
fn a_child_gets_no_memory_of_a_driver_and_no_fault_for_it() {
    // A fork among other tests' threads would copy their locks.
    alone(|| {
        let _double = driver_double::Double::load();
        for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
            let pool = Pool::builder().without_env().backend(backend).build().unwrap();
            let mut there = pool.get(1 << 20).unwrap();
            there.as_mut_slice().unwrap().fill(7);
            let is_registered = pool.stats().backend == "register";
            let start = there.as_ptr().cast_mut().cast();
            in_a_child(|| {
                let mut resident = 0;
                // SAFETY: room for one page's answer; an address that is not mapped is refused.
                let is_mapped = unsafe { libc::mincore(start, 4096, &raw mut resident) } == 0;
                vec![
                    ("mapped", !(is_registered && is_mapped)),
                    ("slice", there.as_slice_untracked().is_err_and(|error| error.is_forked())),
                    ("mut slice", there.as_mut_slice().is_err_and(|error| error.is_forked())),
                    ("try", there.try_as_mut_slice().is_err_and(|error| error.is_forked())),
                ]
            });
            assert!(there.as_slice_untracked().unwrap().iter().all(|&byte| byte == 7));
        }
    });
}
