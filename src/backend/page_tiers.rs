//! Which pages memory really lies in, read back from the kernel (`/proc/self/smaps`) and not assumed from the request.

use std::fmt;
use std::fs;
use std::ops::Range;
use std::ptr::NonNull;

/// Bytes by the kind of page that holds them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PageTiers {
    /// In huge pages reserved by the administrator (hugetlb).
    pub hugetlb_bytes: u64,
    /// In transparent huge pages.
    pub transparent_bytes: u64,
    /// In pages of the smallest size.
    pub small_bytes: u64,
    /// In granules of the CUDA driver, for which the kernel reports no pages.
    pub driver_bytes: u64,
}

impl PageTiers {
    /// The pages behind `len_bytes` addresses. Bytes without a page are not counted.
    pub(crate) fn between(start: NonNull<u8>, len_bytes: usize) -> Self {
        // Empty where the kernel does not list them.
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        Self::in_smaps(&smaps, start.as_ptr().addr(), len_bytes)
    }

    pub(crate) fn in_smaps(smaps: &str, start: usize, len_bytes: usize) -> Self {
        let mappings = parse_smaps(smaps);
        let end = start.saturating_add(len_bytes);
        let tiers = mappings.iter().map(|mapping| {
            let Range { start: from, end: to } = mapping.addresses;
            mapping.tiers(to.min(end).saturating_sub(from.max(start)) as u64)
        });
        tiers.fold(Self::default(), Self::add)
    }

    pub(crate) fn add(self, other: Self) -> Self {
        Self {
            hugetlb_bytes: self.hugetlb_bytes.saturating_add(other.hugetlb_bytes),
            transparent_bytes: self.transparent_bytes.saturating_add(other.transparent_bytes),
            small_bytes: self.small_bytes.saturating_add(other.small_bytes),
            driver_bytes: self.driver_bytes.saturating_add(other.driver_bytes),
        }
    }
}

/// `transparent huge pages`, or percentages if there are several kinds.
impl fmt::Display for PageTiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut tiers = vec![
            (self.hugetlb_bytes, "hugetlb pages"),
            (self.transparent_bytes, "transparent huge pages"),
            (self.small_bytes, "4 KiB pages"),
            (self.driver_bytes, "granules of the driver"),
        ];
        tiers.retain(|(bytes, _)| *bytes > 0);
        let all_bytes: u128 = tiers.iter().map(|(bytes, _)| u128::from(*bytes)).sum();
        match tiers.as_slice() {
            [] => f.write_str("no pages"),
            [(_, only)] => f.write_str(only),
            several => {
                for (index, (bytes, name)) in several.iter().enumerate() {
                    let percent = u128::from(*bytes) * 100 / all_bytes;
                    write!(f, "{}{percent} % {name}", if index == 0 { "" } else { ", " })?;
                }
                Ok(())
            }
        }
    }
}

/// One mapping in `/proc/self/smaps`. The kernel merges adjacent mappings with the same attributes.
#[derive(Debug, Default)]
struct SmapsEntry {
    addresses: Range<usize>,
    resident_bytes: u64,
    huge_bytes: u64,
    hugetlb_bytes: u64,
}

impl SmapsEntry {
    /// The pages of `overlap_bytes` of this mapping: it may reach beyond the addresses in question.
    fn tiers(&self, overlap_bytes: u64) -> PageTiers {
        let transparent_bytes = self.huge_bytes.min(overlap_bytes);
        PageTiers {
            hugetlb_bytes: self.hugetlb_bytes.min(overlap_bytes),
            transparent_bytes,
            small_bytes: self.resident_bytes.min(overlap_bytes) - transparent_bytes.min(self.resident_bytes),
            driver_bytes: 0,
        }
    }
}

fn parse_smaps(text: &str) -> Vec<SmapsEntry> {
    let mut mappings: Vec<SmapsEntry> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(first), second) = (words.next(), words.next().unwrap_or_default()) else { continue };
        if let Some(addresses) = parse_addresses(first) {
            mappings.push(SmapsEntry { addresses, ..SmapsEntry::default() });
        } else if let Some(mapping) = mappings.last_mut() {
            let bytes = second.parse::<u64>().unwrap_or(0).saturating_mul(1024);
            match first {
                "Rss:" => mapping.resident_bytes = bytes,
                "AnonHugePages:" | "ShmemPmdMapped:" | "FilePmdMapped:" => {
                    mapping.huge_bytes = mapping.huge_bytes.saturating_add(bytes);
                }
                "Private_Hugetlb:" | "Shared_Hugetlb:" => {
                    mapping.hugetlb_bytes = mapping.hugetlb_bytes.saturating_add(bytes);
                }
                _ => {}
            }
        }
    }
    mappings
}

/// `7f0000000000-7f0000200000`, the first word of a mapping; the other lines begin with `Name:`.
fn parse_addresses(word: &str) -> Option<Range<usize>> {
    let (from, to) = word.split_once('-')?;
    Some(usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?)
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
    fn pages_are_counted_by_kind_as_far_as_they_overlap() {
        let of = |start, len_bytes| PageTiers::in_smaps(SMAPS, start, len_bytes);
        let expected = PageTiers { transparent_bytes: 2 << 20, small_bytes: 1 << 20, ..PageTiers::default() };
        assert_eq!(of(0x100_0000, 4 << 20), expected);
        assert_eq!(of(0x200_0000, 4 << 20), PageTiers { hugetlb_bytes: 4 << 20, ..PageTiers::default() });
        assert_eq!(of(0x300_0000, 1 << 20), PageTiers { small_bytes: 1 << 20, ..PageTiers::default() }, "a part");
        assert_eq!(of(0x400_0000, 4 << 20), PageTiers::default(), "not mapped");
        assert_eq!(of(0x100_0000, 0x240_0000).hugetlb_bytes, 4 << 20, "several");
    }

    #[test]
    fn one_kind_is_named_and_several_get_percentages() {
        let tiers = PageTiers { transparent_bytes: 3 << 20, small_bytes: 1 << 20, ..PageTiers::default() };
        assert_eq!(tiers.to_string(), "75 % transparent huge pages, 25 % 4 KiB pages");
        assert_eq!(PageTiers { driver_bytes: 1, ..PageTiers::default() }.to_string(), "granules of the driver");
        assert_eq!(PageTiers::default().to_string(), "no pages");
    }
}
