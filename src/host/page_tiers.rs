//! Which pages memory really lies in, read back from the kernel (`/proc/self/smaps`) and not assumed from what was asked.

use std::fmt;
use std::fs;
use std::ptr::NonNull;

/// Bytes by the pages that they lie in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageTiers {
    /// In huge pages that were set aside for it (hugetlb).
    pub hugetlb_bytes: u64,
    /// In huge pages that the kernel made (transparent huge pages).
    pub transparent_bytes: u64,
    /// In pages of the smallest size.
    pub small_bytes: u64,
    /// In granules of the CUDA driver, of which the kernel says nothing.
    pub driver_bytes: u64,
}

impl PageTiers {
    /// What lies between two addresses. Bytes that no page is behind count nowhere.
    pub(crate) fn between(start: NonNull<u8>, len_bytes: usize) -> Self {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        of_smaps(&smaps, start.as_ptr().addr() as u64, len_bytes as u64)
    }

    pub(crate) fn add(self, other: Self) -> Self {
        Self {
            hugetlb_bytes: self.hugetlb_bytes + other.hugetlb_bytes,
            transparent_bytes: self.transparent_bytes + other.transparent_bytes,
            small_bytes: self.small_bytes + other.small_bytes,
            driver_bytes: self.driver_bytes + other.driver_bytes,
        }
    }
}

/// `transparent huge pages`, or shares where there are several.
impl fmt::Display for PageTiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tiers = [
            (self.hugetlb_bytes, "hugetlb pages"),
            (self.transparent_bytes, "transparent huge pages"),
            (self.small_bytes, "4 KiB pages"),
            (self.driver_bytes, "granules of the driver"),
        ];
        let all_bytes: u64 = tiers.iter().map(|(bytes, _)| bytes).sum();
        let there: Vec<_> = tiers.into_iter().filter(|(bytes, _)| *bytes > 0).collect();
        match there.as_slice() {
            [] => f.write_str("no pages"),
            [(_, only)] => f.write_str(only),
            several => {
                for (index, (bytes, name)) in several.iter().enumerate() {
                    let percent = u128::from(*bytes) * 100 / u128::from(all_bytes);
                    write!(f, "{}{percent} % {name}", if index == 0 { "" } else { ", " })?;
                }
                Ok(())
            }
        }
    }
}

/// One paragraph: a mapping, as far as it lies between the two addresses.
#[derive(Debug, Default)]
struct Mapping {
    overlap_bytes: u64,
    resident_bytes: u64,
    huge_bytes: u64,
    hugetlb_bytes: u64,
}

impl Mapping {
    /// A mapping that reaches beyond (the kernel merges neighbours) counts as far as it overlaps.
    fn tiers(&self) -> PageTiers {
        let hugetlb_bytes = self.hugetlb_bytes.min(self.overlap_bytes);
        let transparent_bytes = self.huge_bytes.min(self.overlap_bytes);
        let small_bytes = self.resident_bytes.min(self.overlap_bytes) - transparent_bytes.min(self.resident_bytes);
        PageTiers { hugetlb_bytes, transparent_bytes, small_bytes, driver_bytes: 0 }
    }
}

fn of_smaps(smaps: &str, start: u64, len_bytes: u64) -> PageTiers {
    let end = start.saturating_add(len_bytes);
    let mut sum = PageTiers::default();
    let mut mapping = Mapping::default();
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(first), second) = (words.next(), words.next().unwrap_or_default()) else { continue };
        if let Some((from, to)) = addresses(first) {
            sum = sum.add(mapping.tiers());
            let overlap_bytes = to.min(end).saturating_sub(from.max(start));
            mapping = Mapping { overlap_bytes, ..Mapping::default() };
        } else if mapping.overlap_bytes > 0 {
            let bytes = second.parse::<u64>().unwrap_or(0) << 10;
            match first {
                "Rss:" => mapping.resident_bytes = bytes,
                "AnonHugePages:" | "ShmemPmdMapped:" | "FilePmdMapped:" => mapping.huge_bytes += bytes,
                "Private_Hugetlb:" | "Shared_Hugetlb:" => mapping.hugetlb_bytes += bytes,
                _ => {}
            }
        }
    }
    sum.add(mapping.tiers())
}

/// `7f0000000000-7f0000200000`; a line of a figure has a colon instead.
fn addresses(word: &str) -> Option<(u64, u64)> {
    let (from, to) = word.split_once('-')?;
    Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
1000000-1400000 rw-p 00000000 00:00 0
Size:               4096 kB
KernelPageSize:        4 kB
Rss:                3072 kB
AnonHugePages:      2048 kB
ShmemPmdMapped:        0 kB
2000000-2400000 rw-p 00000000 00:0f 99 /anon_hugepage (deleted)
KernelPageSize:     2048 kB
Rss:                   0 kB
AnonHugePages:         0 kB
Private_Hugetlb:    4096 kB
VmFlags: rd wr
3000000-3400000 rw-p 00000000 00:00 0
Rss:                4096 kB
AnonHugePages:         0 kB
";

    #[test]
    fn the_kernel_says_which_pages_there_are() {
        let of = |start, len| of_smaps(SMAPS, start, len);
        let expected = PageTiers { transparent_bytes: 2 << 20, small_bytes: 1 << 20, ..PageTiers::default() };
        assert_eq!(of(0x100_0000, 4 << 20), expected);
        assert_eq!(of(0x200_0000, 4 << 20), PageTiers { hugetlb_bytes: 4 << 20, ..PageTiers::default() });
        assert_eq!(of(0x300_0000, 1 << 20), PageTiers { small_bytes: 1 << 20, ..PageTiers::default() }, "a part");
        assert_eq!(of(0x400_0000, 4 << 20), PageTiers::default(), "not mapped");
        assert_eq!(of(0x100_0000, 0x240_0000).hugetlb_bytes, 4 << 20, "several");
    }

    #[test]
    fn tiers_are_said_in_words() {
        let tiers = PageTiers { transparent_bytes: 3 << 20, small_bytes: 1 << 20, ..PageTiers::default() };
        assert_eq!(tiers.to_string(), "75 % transparent huge pages, 25 % 4 KiB pages");
        assert_eq!(PageTiers { driver_bytes: 1, ..PageTiers::default() }.to_string(), "granules of the driver");
        assert_eq!(PageTiers::default().to_string(), "no pages");
    }

    #[cfg(not(miri))]
    #[test]
    fn memory_of_this_process_is_found() {
        use crate::backend::pages::{self, Commit};
        let region = pages::map(16 << 20, Commit::Yes, 0).unwrap();
        assert_eq!(PageTiers::between(region.start(), 0), PageTiers::default());
        #[allow(unsafe_code)] // Touches and unmaps what was mapped above.
        // SAFETY: mapped above, ours alone.
        unsafe {
            region.start().write_bytes(1, 16 << 20)
        };
        let tiers = PageTiers::between(region.start(), 16 << 20);
        assert_eq!(tiers.transparent_bytes + tiers.small_bytes, 16 << 20, "{tiers:?}");
        #[allow(unsafe_code)]
        // SAFETY: as above, used no more.
        unsafe { pages::unmap(region) }.unwrap();
    }
}
