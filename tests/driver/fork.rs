//! Memory that a driver has pinned does not exist in a child of fork; access to its buffers is an error.
#![allow(unsafe_code)] // Asks the kernel whether a page is mapped.

use pinpool::cudarc::driver::CudaContext;
use pinpool::{Backend, PinnedBy, Pool};

use crate::child::{alone, in_a_child};

#[test]
fn a_forked_child_gets_an_error_for_driver_memory() {
    // A fork alongside other tests would copy locks that their threads hold.
    alone(|| {
        let _driver = mock_driver::MockDriver::load();
        for backend in [Backend::Vmm, Backend::Register, Backend::Cuda] {
            let pool = Pool::builder().without_env().backend(backend).build().unwrap();
            let mut buf = pool.get(1 << 20).unwrap();
            buf.wait_slice_mut().unwrap().fill(7);
            // Memory from `cuMemHostAlloc` belongs to the driver, which decides whether children have it.
            let is_kept_from_children = pool.stats().backend != "cuda";
            let start = buf.as_ptr().cast_mut().cast();
            let context = CudaContext::new(0).unwrap();
            in_a_child(|| {
                let mut resident = 0;
                // SAFETY: space for one page's answer; an address that is not mapped is refused.
                let is_mapped = unsafe { libc::mincore(start, 4096, &raw mut resident) } == 0;
                vec![
                    ("mapped", !(is_kept_from_children && is_mapped)),
                    ("slice", buf.wait_slice().is_err_and(|error| error.is_forked())),
                    ("mut slice", buf.wait_slice_mut().is_err_and(|error| error.is_forked())),
                    ("device", buf.device_ptr(&context).is_err_and(|error| error.is_forked())),
                    ("try", buf.try_slice().is_err_and(|error| error.is_forked())),
                    ("try mut", buf.try_slice_mut().is_err_and(|error| error.is_forked())),
                ]
            });
            assert!(buf.wait_slice().unwrap().iter().all(|&byte| byte == 7));
        }
    });
}

#[test]
fn a_forked_child_reports_why_it_has_no_gpu() {
    alone(|| {
        let _driver = mock_driver::MockDriver::load();
        let pool = Pool::builder().without_env().build().unwrap();
        assert_eq!(pool.stats().backend, "vmm");
        in_a_child(|| {
            let refused = Pool::builder().without_env().backend(Backend::Cuda).build().unwrap_err().to_string();
            let gpu = pinpool::unstable::backend::gpu_finding(0);
            let own = Pool::builder().without_env().build().unwrap();
            vec![
                ("cuda", refused.contains("the parent of this forked process used CUDA: spawn")),
                ("gpu", gpu.found.contains("forked") && gpu.remedy.is_some_and(|remedy| remedy.contains("spawn"))),
                ("auto", !own.stats().backend.is_empty() && own.stats().backend != "vmm"),
            ]
        });
    });
}

#[test]
fn an_unused_pool_leaves_cuda_to_forked_children() {
    alone(|| {
        let driver = mock_driver::MockDriver::load();
        let pool = Pool::builder().without_env().build().unwrap();
        let text = r#"Pool { name: None, backend: "auto", preset: Adaptive, max_bytes: Auto, .. }"#;
        assert_eq!(format!("{pool:?}"), text);
        drop(pool.get_async(4096));
        pool.maintain();
        pool.trim(0);
        pool.clear();
        let closed = Pool::builder().without_env().build().unwrap();
        closed.close();
        assert!(closed.get(4096).unwrap_err().is_closed() && closed.tagged("tag").get(4096).unwrap_err().is_closed());
        assert_eq!(driver.calls("cuInit"), 0);
        in_a_child(|| {
            let own = Pool::builder().without_env().backend(Backend::Gpu).build();
            let pins = |pool: &Pool| pool.get(4096).is_ok_and(|buf| buf.pinned_by() == Some(PinnedBy::Driver));
            vec![("own", own.is_ok_and(|own| pins(&own))), ("launcher's", pins(&pool) && pool.stats().backend == "vmm")]
        });
        assert_eq!(driver.calls("cuInit"), 0);
        drop(pool.clone());
        // The first request chooses the backend, for all clones of the pool.
        let clone = pool.clone();
        drop(pool.get(4096).unwrap());
        assert!(driver.calls("cuInit") > 0);
        assert_eq!((clone.stats().backend, clone.stats().requests.served, pool.stats().requests.misses), ("vmm", 1, 1));
        in_a_child(|| vec![("begun", clone.get(4096).is_err_and(|error| error.is_forked()))]);
    });
}

#[test]
fn a_reserve_starts_the_driver_when_the_pool_is_built() {
    alone(|| {
        let driver = mock_driver::MockDriver::load();
        let build = |name, text| {
            drop(Pool::builder().without_env().setting(name, text).build().unwrap());
            driver.calls("cuInit")
        };
        assert_eq!(["auto", "heap"].map(|backend| build("PINPOOL_BACKEND", backend)), [0, 0], "never used");
        assert!(build("PINPOOL_RESERVE", "2MiB") > 0);
    });
}
