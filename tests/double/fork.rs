//! Memory that a driver has pinned does not exist in a child of fork; its buffers return an error buf.
#![allow(unsafe_code)] // Asks the kernel for what is mapped.

use pinpool::{Backend, Pool};

use crate::child::{alone, in_a_child};

#[test]
fn a_child_of_fork_gets_an_error_instead_of_the_drivers_memory() {
    // A fork beside other tests would copy locks that their threads hold.
    alone(|| {
        let _double = driver_double::Double::load();
        for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
            let pool = Pool::builder().without_env().backend(backend).build().unwrap();
            let mut buf = pool.get(1 << 20).unwrap();
            buf.as_mut_slice().unwrap().fill(7);
            // The driver's own memory of `cuMemHostAlloc` is the driver's to keep from children.
            let is_kept_from_children = pool.stats().backend != "cuda";
            let start = buf.as_ptr().cast_mut().cast();
            in_a_child(|| {
                let mut resident = 0;
                // SAFETY: space for one page's answer; an address that is not mapped is refused.
                let is_mapped = unsafe { libc::mincore(start, 4096, &raw mut resident) } == 0;
                vec![
                    ("mapped", !(is_kept_from_children && is_mapped)),
                    ("slice", buf.as_slice().is_err_and(|error| error.is_forked())),
                    ("mut slice", buf.as_mut_slice().is_err_and(|error| error.is_forked())),
                    ("try", buf.try_as_mut_slice().is_err_and(|error| error.is_forked())),
                ]
            });
            assert!(buf.as_slice().unwrap().iter().all(|&byte| byte == 7));
        }
    });
}

#[test]
fn a_pool_of_a_child_whose_parent_used_cuda_says_why_it_has_no_gpu() {
    alone(|| {
        let double = driver_double::Double::load();
        let pool = Pool::builder().without_env().build().unwrap();
        assert_eq!(pool.stats().backend, "vmm");
        in_a_child(|| {
            let refused = Pool::builder().without_env().backend(Backend::Cuda).build().unwrap_err().to_string();
            let gpu = pinpool::backend::gpu(0);
            let own = Pool::builder().without_env().build().unwrap();
            vec![
                ("cuda", refused.contains("forked from one that used CUDA: spawn it")),
                ("gpu", gpu.found.contains("forked") && gpu.remedy.is_some_and(|remedy| remedy.contains("spawn"))),
                ("auto", !own.stats().backend.is_empty() && own.stats().backend != "vmm"),
            ]
        });
        drop(pool);
        assert_eq!(double.wrong_uses(), Vec::<String>::new());
    });
}
