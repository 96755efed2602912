//! What a pool requires of its source.

use std::path::Path;

use super::huge_pages::HugeTlb;

/// How memory is pinned, and for which pool.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PinOptions<'a> {
    /// The root of the file system, `/` except in tests.
    pub(crate) root: &'a Path,
    /// Ordinal of the GPU.
    pub(crate) device: u32,
    /// Requested NUMA node; `None` for the GPU's node.
    pub(crate) node: Option<u32>,
    /// Whether an arena is between the pool and the source, so that few and large pieces are pinned.
    pub(crate) has_arena: bool,
    /// The limit of the pool in bytes; `None` if the pool has no limit.
    pub(crate) max_bytes: Option<u64>,
    /// The huge pages for whole regions of `vmm`, `register`, `mlock` and `heap`.
    pub(crate) hugetlb: HugeTlb,
    /// Driver sources that must not be tried in this process, each with the reason.
    pub(crate) excluded: &'a [(&'static str, String)],
}

impl PinOptions<'static> {
    /// Returns the options for a pool with an arena on this machine, for the GPU with the ordinal `device`.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // Only sources of a driver are made without a pool.
    pub(crate) fn new(device: u32, node: Option<u32>) -> Self {
        let root = Path::new("/");
        Self { root, device, node, has_arena: true, max_bytes: None, hugetlb: HugeTlb::Off, excluded: &[] }
    }
}
