//! Huge pages that the administrator has set aside. The tests pass with any number of them, and with none.

use std::fs;

use pinpool::HugeTlb;
use pinpool::{Backend, Pool};

use crate::captured_log::{lines_with_levels, listen};
use crate::child::{alone, in_a_child};
use crate::fixture::{MIB, heap, status_kib};
use crate::valid_stats::valid_stats;

fn free_pages() -> u64 {
    let number = |name: &str| {
        let file = format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}");
        fs::read_to_string(file).ok().and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    number("free_hugepages").saturating_sub(number("resv_hugepages"))
}

fn pool(backend: Backend, hugetlb: HugeTlb, bytes: u64) -> Pool {
    let builder = Pool::builder().without_env().backend(backend).setting("hugetlb", hugetlb).max_bytes(256 << 20);
    builder.reserve(bytes).build().unwrap()
}

/// Bytes of this process in huge pages.
fn hugetlb_bytes() -> u64 {
    status_kib("HugetlbPages") << 10
}

#[test]
fn a_reserve_uses_huge_pages_if_there_are_enough() {
    alone(|| {
        for backend in [Backend::Heap, Backend::Mlock] {
            for hugetlb in [HugeTlb::Off, HugeTlb::Auto, HugeTlb::Pages2MiB] {
                let free = free_pages();
                let pool = pool(backend.clone(), hugetlb, 8 << 20);
                let memory = pool.stats().memory;
                assert!(memory.reserve_bytes == 8 << 20 && memory.reserve_fraction() > 0.99, "{memory:?}");
                let bytes = hugetlb_bytes();
                assert!(bytes == 0 || bytes == 8 << 20 && hugetlb != HugeTlb::Off, "{bytes}");
                // Other processes may take pages meanwhile, so huge pages are certain only if plenty are free.
                let may_be_others = free < 64 || hugetlb == HugeTlb::Off;
                assert!(may_be_others || bytes == 8 << 20, "{free} are free, {bytes} B are used");
                let mut buf = pool.get(8 * MIB).unwrap();
                buf.wait_slice_mut().unwrap().fill(7);
                assert!(buf.wait_slice().unwrap().iter().all(|&byte| byte == 7));
                drop(buf);
                valid_stats(&pool);
                drop(pool);
                assert_eq!(hugetlb_bytes(), 0, "all of it went back");
            }
        }
    });
}

#[test]
fn missing_huge_pages_are_a_warning_unless_auto() {
    alone(|| {
        // More than any machine of a test has set aside; 1 GiB pages are rare.
        for (hugetlb, is_told) in [(HugeTlb::Pages1GiB, true), (HugeTlb::Auto, false), (HugeTlb::Off, false)] {
            let are_there = fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages");
            if hugetlb == HugeTlb::Pages1GiB && are_there.is_ok_and(|text| text.trim() != "0") {
                continue;
            }
            listen();
            let pool = pool(Backend::Heap, hugetlb, 4 << 20);
            assert_eq!(pool.stats().memory.reserve_bytes, 4 << 20);
            let lines = lines_with_levels();
            let warned: Vec<_> = lines.iter().filter(|(level, _)| *level == log::Level::Warn).collect();
            assert_eq!(!warned.is_empty(), is_told, "{lines:?}");
            for (_, text) in warned {
                assert!(text.contains("PINPOOL_HUGETLB=1GiB") && text.contains("hugepages"), "{text}");
            }
        }
    });
}

#[test]
fn a_length_that_is_no_whole_huge_page_takes_other_pages() {
    alone(|| {
        let bytes = (4 << 20) - 4096;
        let pool = heap().hugetlb(HugeTlb::Auto).max_bytes(bytes).reserve(bytes).build().unwrap();
        assert_eq!((pool.stats().memory.reserve_bytes, hugetlb_bytes()), (bytes, 0));
    });
}

#[test]
fn a_child_of_fork_gets_an_error_instead_of_the_bytes() {
    alone(|| {
        for hugetlb in [HugeTlb::Off, HugeTlb::Auto] {
            let pool = pool(Backend::Heap, hugetlb, 4 << 20);
            let mut buf = pool.get(MIB).unwrap();
            buf.wait_slice_mut().unwrap().fill(3);
            let mut childs = Some(buf);
            in_a_child(|| {
                let buf = childs.take().unwrap();
                let read = buf.wait_slice().map(|bytes| bytes[0]);
                let is_as_told = match hugetlb {
                    HugeTlb::Off => read.is_ok_and(|byte| byte == 3),
                    _ => read.is_err_and(|error| error.is_forked()),
                };
                vec![("read", is_as_told)]
            });
            // The parent can still write: no page has to be copied for the child.
            let mut again = pool.get(2 * MIB).unwrap();
            again.wait_slice_mut().unwrap().fill(4);
        }
    });
}
