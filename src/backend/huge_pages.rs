//! Huge pages that the administrator has set aside (hugetlb), for whole regions: a reserve that the caller waits for,
//! and the regions of `register`.
//!
//! These pages need neither `khugepaged` nor memory that happens to be contiguous, are never swapped, and do not count towards
//! `RLIMIT_MEMLOCK`. Each mapping claims its pages when it is created (never `MAP_NORESERVE`), so a touch cannot fail for lack
//! of pages. A touch could still exceed the cgroup limit, so a call that can return an error brings the pages in before they are
//! touched. Forked children do not inherit these mappings: a write by the parent would have to copy a page, and since
//! no page is set aside for the copy, the kernel would kill the child.
#![allow(unsafe_code)] // Maps memory.

use std::cell::Cell;
use std::ops::Range;
use std::path::Path;

use super::mapping;
use super::populate::populate;
use super::source::Region;
use crate::error::SourceError;
use crate::report::Finding;
use pinpool_os::format::Size;
use pinpool_os::host::{PAGE_BYTES, huge_pages};

/// The huge pages that memory is taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum HugeTlb {
    /// None.
    #[default]
    Off,
    /// 2 MiB pages if there are any, otherwise other pages, without a warning.
    Auto,
    /// 2 MiB pages; a warning if there are too few.
    Pages2MiB,
    /// 1 GiB pages, for whole GiB; a warning if there are too few.
    Pages1GiB,
}

impl HugeTlb {
    /// Returns the length of a page; `None` for [`HugeTlb::Off`].
    pub(crate) fn page_bytes(self) -> Option<u64> {
        match self {
            Self::Off => None,
            Self::Auto | Self::Pages2MiB => Some(2 << 20),
            Self::Pages1GiB => Some(1 << 30),
        }
    }

    /// Returns whether the user requested this page size.
    fn is_required(self) -> bool {
        matches!(self, Self::Pages2MiB | Self::Pages1GiB)
    }

    /// Returns the finding that no page of the requested size is free; `None` if there are some, or if no size was requested.
    pub(crate) fn finding(self, root: &Path) -> Option<Finding> {
        let page_bytes = self.page_bytes().filter(|_| self.is_required())?;
        let found = match huge_pages(root, page_bytes) {
            Some(pages) if pages.free > 0 => return None,
            Some(pages) => format!("none of the {} huge pages of {self} is free: PINPOOL_HUGETLB={self}", pages.total),
            None => format!("the kernel has no huge pages of {self}: PINPOOL_HUGETLB={self}"),
        };
        Some(Finding::warning("hugetlb", format!("{found} has no effect")).remedy(self.remedy()))
    }

    /// Returns a text that tells the administrator how to set pages aside.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Self::Pages1GiB => {
                "set pages aside when the machine starts: hugepagesz=1G hugepages=N on the kernel's command line; or \
                 PINPOOL_HUGETLB=auto"
            }
            _ => "set pages aside with `sysctl vm.nr_hugepages=N`, N times 2 MiB; or PINPOOL_HUGETLB=auto",
        }
    }

    /// Returns a text for a log line if the user requested a page size and fewer than `wanted_bytes` are in such pages.
    pub(crate) fn lack(self, had_bytes: impl FnOnce() -> u64, wanted_bytes: u64) -> Option<String> {
        let had_bytes = self.is_required().then(had_bytes).filter(|&had_bytes| had_bytes < wanted_bytes)?;
        let [had, wanted] = [had_bytes, wanted_bytes].map(Size);
        Some(format!("{had} of {wanted} are in huge pages (PINPOOL_HUGETLB={self}); {}", self.remedy()))
    }

    /// Returns a region of `len_bytes` with all pages present, and whether it is in pages that were set aside. If there are too few of
    /// these, the region is in other pages, which are touched after a `prepare` call.
    pub(super) fn acquire(
        self,
        len_bytes: usize,
        id: u64,
        (threads, node): (usize, Option<u32>),
        progress: &dyn Fn(usize),
        prepare: impl FnOnce(&Region) -> Result<(), SourceError>,
    ) -> Result<(Region, bool), SourceError> {
        let progress = &increasing(progress);
        // SAFETY: regions that were just mapped, and nothing else uses them.
        let fill = |region: &Region| unsafe { populate(region, threads, node, progress) };
        let is_whole = |page_bytes: &u64| len_bytes > 0 && (len_bytes as u64).is_multiple_of(*page_bytes);
        let page_bytes = self.page_bytes().filter(|_| mapping::HAS_RANGES).filter(is_whole);
        if let Some(region) = page_bytes.and_then(|bytes| mapping::map_hugetlb(len_bytes, bytes, id).ok()) {
            let filled = mapping::inherit(&region, false).and_then(|()| {
                // At the cgroup limit a touch would kill the process, so a call must fault the pages in. The call fails
                // before Linux 5.14, and there `populate` would touch the pages.
                mapping::advise(region.start(), PAGE_BYTES, mapping::linux::MADV_POPULATE_WRITE)
            });
            let filled = filled.and_then(|()| fill(&region));
            // SAFETY: mapped above, no reference into it was made.
            if let Ok(region) = unsafe { mapping::keep_if(filled, region) } {
                return Ok((region, true));
            }
        }
        let region = mapping::map_huge(len_bytes, id)?;
        let filled = prepare(&region).and_then(|()| fill(&region));
        // SAFETY: as above.
        unsafe { mapping::keep_if(filled, region) }.map(|region| (region, false))
    }
}

/// Returns a function that reports only progress beyond its previous report, since a region may be filled twice.
fn increasing(progress: &dyn Fn(usize)) -> impl Fn(usize) {
    let reached = Cell::new(0);
    move |done| {
        if done > reached.get() {
            reached.set(done);
            progress(done);
        }
    }
}

/// Returns the bytes in `places` that are in huge pages according to the kernel: in pages set aside (hugetlb), and in transparent
/// huge pages.
pub(crate) fn huge_bytes(places: &[Range<usize>]) -> [u64; 2] {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let each = places.iter().map(|addresses| huge_bytes_in(&smaps, addresses));
    each.fold([0; 2], |[hugetlb, transparent], more| [hugetlb + more[0], transparent + more[1]])
}

/// Returns the same two numbers for `addresses`, from the text of an smaps file. A mapping that extends beyond
/// `addresses` contributes at most its bytes in `addresses`.
pub(crate) fn huge_bytes_in(smaps: &str, addresses: &Range<usize>) -> [u64; 2] {
    let (mut overlap_bytes, mut found) = (0, [0_u64; 2]);
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(first) = words.next() else { continue };
        if let Some((start, end)) = first.split_once('-').and_then(parse_addresses) {
            overlap_bytes = end.min(addresses.end).saturating_sub(start.max(addresses.start)) as u64;
            continue;
        }
        let kind = match first {
            "Private_Hugetlb:" => 0,
            "AnonHugePages:" => 1,
            _ => continue,
        };
        let kib = words.next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0);
        found[kind] = found[kind].saturating_add(kib.saturating_mul(1024).min(overlap_bytes));
    }
    found
}

/// Parses the two halves of `7f0000000000-7f0000200000`, the first word of a mapping.
fn parse_addresses((start, end): (&str, &str)) -> Option<(usize, usize)> {
    Some((usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
1000000-1400000 rw-p 00000000 00:00 0
KernelPageSize:        4 kB
Rss:                3072 kB
AnonHugePages:      2048 kB
2000000-2400000 rw-p 00000000 00:0f 99 /anon_hugepage (deleted)
KernelPageSize:     2048 kB
AnonHugePages:         0 kB
Private_Hugetlb:    4096 kB
3000000-3400000 rw-p 00000000 00:00 0
Rss:                4096 kB
";

    #[test]
    fn huge_pages_are_counted_if_they_overlap() {
        let of = |start, bytes| huge_bytes_in(SMAPS, &(start..start + bytes));
        assert_eq!(of(0x100_0000, 4 << 20), [0, 2 << 20]);
        assert_eq!(of(0x200_0000, 4 << 20), [4 << 20, 0]);
        assert_eq!(of(0x230_0000, 4 << 20), [1 << 20, 0], "a part");
        assert_eq!(of(0x300_0000, 4 << 20), [0, 0]);
        assert_eq!(of(0x100_0000, 0x240_0000), [4 << 20, 2 << 20], "several");
    }
}
