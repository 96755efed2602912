//! Files that the kernel writes. Invalid values count as absent, and every result is bounded.

use pinpool::unstable::huge_bytes;
use pinpool_os::host::{self, PressureGauge};

use super::{folder, written};

/// The files of a machine, in the order in which the input has them, with a byte 0xFF between each two.
const FILES: [&str; 14] = [
    "proc/self/cgroup",
    "proc/self/mountinfo",
    "proc/meminfo",
    "proc/pressure/memory",
    "cg/app/memory.max",
    "cg/app/memory.high",
    "cg/app/memory.current",
    "cg/app/memory.stat",
    "cg/app/memory.events",
    "cg/app/memory.pressure",
    "cg/app/memory.limit_in_bytes",
    "cg/app/memory.usage_in_bytes",
    "cg/app/memory.failcnt",
    "cg/memory.max",
];

/// Reads memory, limits and pressure of a machine with these files.
pub(crate) fn cgroup(data: &[u8]) {
    let mut contents = data.split(|byte| *byte == 0xFF);
    for path in FILES {
        written(path, contents.next().unwrap_or_default());
    }
    let root = folder();
    if let Some(memory) = host::memory(&root) {
        let (total_bytes, available_bytes) = (memory.total_bytes, memory.available_bytes);
        assert!(available_bytes <= total_bytes, "{available_bytes} of {total_bytes} are available");
    }
    if let Some(mut pressure) = PressureGauge::from_kernel(&root) {
        // Unchanged files show no new limit hit.
        let first = pressure.read();
        assert_eq!(pressure.read(), first);
    }
}

/// A file of `/proc/pressure`.
pub(crate) fn pressure(data: &[u8]) {
    let Some(stall) = host::stall(&String::from_utf8_lossy(data)) else { return };
    let (some, full) = (stall.some_percent, stall.full_percent);
    assert!((0.0..=100.0).contains(&some) && (0.0..=100.0).contains(&full), "{some} {full}");
}

/// A list of NUMA nodes or processors.
pub(crate) fn number_list(data: &[u8]) {
    let Some(numbers) = host::parse_list(&String::from_utf8_lossy(data)) else { return };
    assert!(numbers.len() <= 1 << 16, "{} numbers", numbers.len());
    let listed = numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    assert_eq!(host::parse_list(&listed), Some(numbers));
}

/// An smaps file and some addresses.
pub(crate) fn smaps(data: &[u8]) {
    let (head, text) = data.split_at(data.len().min(16));
    let mut numbers = [0; 16];
    numbers[..head.len()].copy_from_slice(head);
    let [start, len_bytes] =
        [0, 8].map(|at| usize::from_le_bytes(*numbers[at..].first_chunk().expect("eight bytes are left")));
    let text = String::from_utf8_lossy(text);
    for (start, len_bytes) in [(start, len_bytes), (0x100_0000, 8 << 20)] {
        huge_bytes(&text, &(start..start.saturating_add(len_bytes)));
    }
}
