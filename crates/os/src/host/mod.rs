//! The machine and the cgroups that hold this process: page sizes, memory, shortage of it, NUMA nodes.
//!
//! | file | owns | read |
//! | --- | --- | --- |
//! | `memory` | how much memory there is and is available, and which limit decides it | at the start; the limits once a second |
//! | `limits` | the limits of the process, and which of them refused memory | when memory is refused, and by `doctor` |
//! | `pressure` | whether tasks wait for memory, whether a limit was hit | at most once a second |
//! | `numa` | the NUMA node near a device, the memory of a node and the processors near it | once, at the start |
//! | `huge_pages` | the huge pages that are set aside | if they are requested, and by `doctor` |
//! | `cgroup` | the groups that hold this process, and their files | for `memory` and `pressure` |
//! | `files` | bounded reads below a root | for all of these |
//!
//! Reads files and returns plain values. Decides nothing about pools, logs nothing and keeps no file open. What cannot be
//! read or parsed counts as absent. By hand, since `procfs` would be a dependency of every user of the pool, and knows no cgroups
//! below another root. Every entry point takes the root of the file system, which is `/` except in tests.

mod cgroup;
mod files;
mod huge_pages;
pub mod limits;
mod memory;
mod numa;
mod pressure;

#[cfg(any(test, feature = "testing"))]
pub use files::tree;
pub use huge_pages::huge_pages;
pub use memory::{HostMemory, LimitOrigin, MemoryGauge, memory};
pub use numa::{MemoryNode, memory_nodes, numa_node_of_pci, numa_nodes, parse_list};
pub use pressure::{Pressure, PressureGauge, stall};

/// The smallest page. Every region starts at a multiple of it, and every source acquires multiples of it.
pub const PAGE_BYTES: usize = 4096;

/// Most bytes of a granule, the unit in which an arena commits and decommits memory: the size of a huge page, and the
/// unit in which the CUDA driver maps memory.
pub const GRANULE_BYTES: usize = 2 << 20;
