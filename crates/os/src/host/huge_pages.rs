//! The huge pages that the administrator has set aside (hugetlb), by size.

use std::path::Path;

use super::files::Files;

/// The pages of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HugePagePool {
    pub total: u64,
    /// Unused pages that no mapping has reserved, including pages that the kernel may allocate on demand.
    pub free: u64,
}

/// Returns the pages of `page_bytes`; `None` if the kernel has no huge pages of that size.
pub fn huge_pages(root: &Path, page_bytes: u64) -> Option<HugePagePool> {
    let files = Files::below(root);
    let number = |name| files.number(format!("/sys/kernel/mm/hugepages/hugepages-{}kB/{name}", page_bytes >> 10));
    let (total, free) = (number("nr_hugepages")?, number("free_hugepages")?);
    // Overcommitted pages are allocated on demand.
    let surplus = number("nr_overcommit_hugepages").unwrap_or(0);
    let free = free.saturating_sub(number("resv_hugepages").unwrap_or(0)).saturating_add(surplus);
    Some(HugePagePool { total: total.saturating_add(surplus), free })
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::host::tree;

    #[test]
    fn pages_are_free_that_nobody_has_and_nobody_has_set_aside() {
        let file = |name: &str, text| (format!("/sys/kernel/mm/hugepages/hugepages-2048kB/{name}"), text);
        let files = [file("nr_hugepages", "600\n"), file("free_hugepages", "500\n"), file("resv_hugepages", "20\n")];
        let root = tree::of(&files);
        assert_eq!(huge_pages(root.path(), 2 << 20), Some(HugePagePool { total: 600, free: 480 }));
        assert_eq!(huge_pages(root.path(), 1 << 30), None);
    }
}
