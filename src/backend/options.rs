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
    /// Requested NUMA node; `None` for the GPU's.
    pub(crate) node: Option<u32>,
    /// Whether an arena is between the pool and the source, so that few and large pieces are pinned.
    pub(crate) has_arena: bool,
    /// The limit in bytes, if the user set one.
    pub(crate) max_bytes: Option<u64>,
    /// For whole regions of `vmm`, `register`, `mlock` and `heap`.
    pub(crate) hugetlb: HugeTlb,
    /// Sources of the driver that are not to be tried in this process, each with the reason.
    pub(crate) excluded: &'a [(&'static str, String)],
}

impl PinOptions<'static> {
    /// For a pool with an arena on this machine, for the GPU with this ordinal.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))] // Only sources of a driver are made without a pool.
    pub(crate) fn new(device: u32, node: Option<u32>) -> Self {
        let root = Path::new("/");
        Self { root, device, node, has_arena: true, max_bytes: None, hugetlb: HugeTlb::Off, excluded: &[] }
    }
}
