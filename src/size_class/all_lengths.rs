//! Every length up to 2 MiB, and every boundary of every class, against the definitions of the classes in wide numbers.

#![allow(clippy::print_stdout)] // How much was run.

use super::*;

const ROUNDINGS: [Rounding; 3] = [Rounding::Exact, Rounding::Pow2, Rounding::Eighths];
const PAGE: u128 = PAGE_BYTES as u128;

/// Each class of [`Rounding::Eighths`] up to 2^64, smallest first: eight of whole pages, then eight per doubling, from
/// 16 MiB multiples of 2 MiB, from 256 MiB 64 per doubling, and from 2^40 one per doubling.
fn eighths_classes() -> Vec<u128> {
    let doubled = (15..24).flat_map(|power| (9..=16).map(move |eighth| (1 << power) * eighth / 8));
    let even = (9..=128).map(|step| step << 21);
    let large = (28..40).flat_map(|power| (65..=128).map(move |step| (1 << power) * step / 64));
    let huge = (41..=64).map(|power| 1 << power);
    (1..=8).map(|pages| pages * PAGE).chain(doubled).chain(even).chain(large).chain(huge).collect()
}

/// The class and its index, as the module says; `None` if there is none.
fn expected(rounding: Rounding, len: usize, align: usize, eighths: &[u128]) -> Option<(u128, usize)> {
    let (len, align) = (len as u128, align as u128);
    let prefixed = len + 16 + if align > 16 { align } else { 0 };
    let class = match rounding {
        Rounding::Exact => (prefixed, 0),
        Rounding::Pow2 => (prefixed.next_power_of_two(), 0),
        Rounding::Eighths => {
            let needed = len + align.saturating_sub(PAGE);
            let index = eighths.partition_point(|&bytes| bytes < needed);
            (*eighths.get(index)?, index)
        }
    };
    (class.0 <= isize::MAX as u128).then_some(class)
}

fn check(rounding: Rounding, len: usize, align: usize, eighths: &[u128]) {
    let class = rounding.class(len, align).ok().map(|class| (class.bytes as u128, class.index as usize));
    assert_eq!(class, expected(rounding, len, align, eighths), "{rounding:?} {len} at {align}");
    let Some((bytes, index)) = class else { return };
    // The worst base is one page past a multiple of the alignment.
    let base = (align as u128).max(PAGE) + PAGE;
    let end = base.next_multiple_of(align as u128) + len as u128;
    assert!(end <= base + bytes, "{rounding:?} {len} at {align}: {bytes} leave no room for the alignment");
    if rounding == Rounding::Eighths {
        let needed = len as u128 + (align as u128).saturating_sub(PAGE);
        let waste = bytes - needed;
        let is_small = match needed {
            ..=0x8000 => waste <= PAGE,
            0x8001..=0x100_0000 => waste * 8 < needed,
            0x100_0001..=0x1000_0000 => waste < 2 << 20,
            0x1000_0001..=0x100_0000_0000 => waste * 64 < needed,
            _ => waste < needed,
        };
        assert!(is_small, "{len} at {align}: {bytes}");
        assert!(bytes.is_multiple_of(PAGE) && index < EIGHTHS_CLASSES as usize, "{len} at {align}: {bytes}, {index}");
    }
}

#[test]
fn every_length_to_two_mib_has_the_class_of_the_definition() {
    let eighths = eighths_classes();
    let longest = if cfg!(miri) { 2000 } else { 2 << 20 };
    let mut before = Class { bytes: PAGE_BYTES, index: 0 };
    for len in 1..=longest {
        let class = Rounding::Eighths.class(len, UNSPECIFIED_ALIGN).unwrap();
        assert_eq!((class.bytes as u128, class.bytes >= len), (eighths[class.index as usize], true), "{len}");
        assert_eq!(plain_eighths_index(len), class.index, "{len}");
        // The previous class ends exactly at the previous length.
        assert_eq!(class.index, before.index + u32::from(before.bytes < len), "{len}");
        before = class;
    }
    for rounding in ROUNDINGS {
        (1..=longest).step_by(if cfg!(debug_assertions) { 7 } else { 1 }).for_each(|len| {
            check(rounding, len, UNSPECIFIED_ALIGN, &eighths);
        });
    }
}

/// Lengths next to each class boundary, power of two and largest number, and 16 and 32 bytes below each.
fn lengths_at_boundaries(eighths: &[u128]) -> Vec<usize> {
    let powers = (0..=64).map(|power| 1u128 << power);
    let boundaries = eighths.iter().copied().chain(powers).chain([0, isize::MAX as u128, usize::MAX as u128]);
    let near = boundaries.flat_map(|at| [0, 16, 32].map(move |less| at.saturating_sub(less)));
    let near = near.flat_map(|at| (0..=4).map(move |step| (at + step).saturating_sub(2)));
    let mut lengths: Vec<usize> = near.filter_map(|len| usize::try_from(len).ok()).collect();
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

#[test]
fn class_boundaries_match_the_definition_at_all_alignments() {
    let eighths = eighths_classes();
    let lengths = lengths_at_boundaries(&eighths);
    let alignments = (0..=30).map(|power| 1usize << power);
    let mut checked = 0u32;
    for align in alignments.step_by(if cfg!(miri) { 13 } else { 1 }) {
        for rounding in ROUNDINGS {
            // Also where the alignment moves the boundary.
            let moved = align.saturating_sub(PAGE_BYTES);
            let (mut before, mut was_error) = (0, false);
            for &len in lengths.iter().step_by(if cfg!(miri) { 41 } else { 1 }) {
                check(rounding, len, align, &eighths);
                check(rounding, len.saturating_sub(moved), align, &eighths);
                check(rounding, len.saturating_sub(align), align, &eighths);
                let class = rounding.class_bytes(len, align);
                assert!(class.as_ref().map_or(true, |&bytes| bytes >= before && !was_error), "{rounding:?} {len}");
                was_error = class.is_err();
                before = class.unwrap_or(before);
                checked += 3;
            }
        }
    }
    println!("{checked} lengths and alignments");
}

#[test]
fn class_indices_are_dense_up_to_the_largest_length() {
    let eighths = eighths_classes();
    assert_eq!(eighths.len(), EIGHTHS_CLASSES as usize);
    for len in lengths_at_boundaries(&eighths) {
        let index = plain_eighths_index(len);
        assert!(index < EIGHTHS_CLASSES, "{len}: {index}");
        match Rounding::Eighths.class(len, UNSPECIFIED_ALIGN) {
            Ok(class) if len > 0 => assert_eq!(class.index, index, "{len}"),
            // No buffer has such a class, so a request finds nothing under this index.
            _ => assert!(eighths[index as usize] > isize::MAX as u128, "{len}: {index}"),
        }
    }
}
