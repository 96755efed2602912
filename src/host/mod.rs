//! What the machine and its control groups allow, and whether they are short of memory.
//!
//! ```text
//!   memory    how much there is, how much is free, who says so     once, at the start
//!   pressure  is anyone waiting for memory, was a limit hit        at most once a second
//!   numa      which memory is near a device                        once, at the start
//!      │
//!   hierarchy which control groups hold this process
//!   group     what the files of one of them say
//!   files     bounded reads below a root
//! ```
//!
//! The room reads files and gives plain values. It decides nothing about pools, logs nothing, keeps no file open and
//! never fails: what cannot be read or makes no sense is as if it were not there. Every entry takes the root of the
//! file system, `/` but in tests.

/// Bytes of a page: every region starts at a multiple of this, and every source holds multiples of it.
pub const PAGE_BYTES: usize = 4096;

mod files;
mod group;
mod hierarchy;
mod memory;
mod numa;
mod page_tiers;
mod pressure;

pub(crate) use memory::{default_ceiling, memory};
#[cfg(feature = "cuda")]
pub(crate) use numa::numa_node_of_pci;
pub(crate) use numa::{cpus_of_node, is_node_of_several, numa_nodes};
pub use page_tiers::PageTiers;
pub(crate) use pressure::{Gauge, Pressure};
