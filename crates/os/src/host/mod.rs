//! The machine and the cgroups that contain this process: page sizes, memory, memory pressure, NUMA nodes.
//!
//! | file | owns | read |
//! | --- | --- | --- |
//! | `memory` | how much memory exists and is available, and which limit sets the total | at the start, then once a second |
//! | `limits` | the limits of the process, and which of them refused memory | at the start, after a refusal, and by `doctor` |
//! | `pressure` | whether tasks wait for memory, whether a limit was hit | at most once a second |
//! | `numa` | the NUMA node near a device, the memory of a node and the processors near it | once, at the start |
//! | `huge_pages` | the huge pages that are set aside | if they are requested, and by `doctor` |
//! | `cgroup` | the groups that contain this process, and their files | for `memory` and `pressure` |
//! | `files` | bounded reads below a root | for all modules in this table |
//!
//! This module reads files and returns plain values. It makes no decisions about pools, logs nothing and keeps no file open. A
//! value that cannot be read or parsed counts as absent. The files are parsed without the `procfs` crate, which would be a
//! dependency of every user of the pool and does not support cgroups below another root. Every entry point takes the root of the
//! file system, which is `/` except in tests.

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
pub use numa::{NumaNode, describe_numa_nodes, numa_node_of_pci, numa_nodes, parse_list};
pub use pressure::{Pressure, PressureGauge, stall};

/// Size of the smallest page. Every region starts at a multiple of this size, and every source acquires multiples of this size.
pub const PAGE_BYTES: usize = 4096;

/// Maximum size of a granule, the unit in which an arena commits and decommits memory. It is the size of a huge page, and the
/// unit in which the CUDA driver maps memory.
pub const GRANULE_BYTES: usize = 2 << 20;
