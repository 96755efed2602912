//! What the kernel says of mappings of this process, one by one: no other test can change these figures.
#![allow(unsafe_code)] // Spoils pages and asks for their presence.

use std::fs::{self, File};
use std::ops;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use super::{AddressRange, PAGE_BYTES, Region};

/// One paragraph of `/proc/self/smaps`.
struct Mapping {
    addresses: ops::Range<usize>,
    is_accessible: bool,
    resident_kib: u64,
    locked_kib: u64,
}

fn mappings() -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in fs::read_to_string("/proc/self/smaps").unwrap().lines() {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap(), words.next().unwrap_or_default());
        if let Some((from, to)) = first.split_once('-') {
            let [from, to] = [from, to].map(|address| usize::from_str_radix(address, 16).unwrap());
            let is_accessible = second.starts_with("rw");
            mappings.push(Mapping { addresses: from..to, is_accessible, resident_kib: 0, locked_kib: 0 });
        } else if let Some(mapping) = mappings.last_mut() {
            match first {
                "Rss:" => mapping.resident_kib = second.parse().unwrap(),
                "Locked:" => mapping.locked_kib = second.parse().unwrap(),
                _ => {}
            }
        }
    }
    mappings
}

/// Sum of `figure` over the mappings of `range`. A mapping that reaches beyond it must have none.
fn sum(range: &AddressRange, figure: impl Fn(&Mapping) -> u64) -> u64 {
    let start = range.start().as_ptr().addr();
    let end = start + range.len_bytes();
    let of_range = |mapping: &Mapping| {
        let inside = start <= mapping.addresses.start && mapping.addresses.end <= end;
        assert!(inside || figure(mapping) == 0, "{range:?} was merged with a neighbour");
        figure(mapping)
    };
    mappings()
        .iter()
        .filter(|mapping| mapping.addresses.start < end && start < mapping.addresses.end)
        .map(of_range)
        .sum()
}

pub(super) fn resident_kib(range: &AddressRange) -> u64 {
    sum(range, |mapping| mapping.resident_kib)
}

pub(super) fn locked_kib(range: &AddressRange) -> u64 {
    sum(range, |mapping| mapping.locked_kib)
}

/// What of `range` may be read and written.
pub(super) fn accessible_kib(range: &AddressRange) -> u64 {
    sum(range, |mapping| if mapping.is_accessible { mapping.addresses.len() as u64 >> 10 } else { 0 })
}

/// `Locked:` of the mapping that holds `address`: neighbours may have been merged into it.
pub(super) fn locked_kib_at(address: NonNull<u8>) -> u64 {
    mappings().iter().find(|mapping| mapping.addresses.contains(&address.as_ptr().addr())).unwrap().locked_kib
}

/// Pages of `region` that have memory.
pub(super) fn present_pages(region: &Region) -> usize {
    let mut present = vec![0_u8; region.len_bytes().div_ceil(PAGE_BYTES)];
    // SAFETY: the kernel writes a byte for each page, which is how long `present` is.
    let asked = unsafe { libc::mincore(region.start().as_ptr().cast(), region.len_bytes(), present.as_mut_ptr()) };
    assert_eq!(asked, 0);
    present.iter().filter(|&&byte| byte & 1 == 1).count()
}

/// Puts the first page of `file` where `page` is.
///
/// # Safety
///
/// `page` is a page of a mapping of the caller's, which nothing uses.
pub(crate) unsafe fn replace_page(page: NonNull<u8>, file: &File, protection: libc::c_int) {
    let (start, flags) = (page.as_ptr().cast(), libc::MAP_SHARED | libc::MAP_FIXED);
    // SAFETY: the caller gives up the page.
    assert_eq!(unsafe { libc::mmap(start, PAGE_BYTES, protection, flags, file.as_raw_fd(), 0) }, start);
}
