//! Which memory node pages are placed on, and which processors touch them first.
//!
//! Asked for, never demanded: pages that the node has no room for come from another, and a kernel that refuses is left
//! alone, for memory on the wrong node is slower and not wrong. On a machine with one node there is no placement.
#![allow(unsafe_code)] // Asks the kernel for a policy, and moves threads.

use std::path::Path;
use std::ptr::NonNull;

use crate::host;

/// Bits of a node mask, as many as any kernel has nodes.
const MOST_NODES: u32 = 1024;

/// A node and the processors near it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placement {
    node: u32,
    cpus: Vec<u32>,
}

impl Placement {
    /// On `node`, if that is one of several. `root` is that of the file system, `/` but in tests.
    pub(super) fn on(root: &Path, node: u32) -> Option<Self> {
        // A node without processors has memory all the same.
        let is_there = host::is_node_of_several(root, node) && node < MOST_NODES;
        is_there.then(|| Self { node, cpus: host::cpus_of_node(root, node).unwrap_or_default() })
    }

    pub(super) fn node(&self) -> u32 {
        self.node
    }

    /// Pages of this mapping come from the node when they are touched.
    pub(super) fn place(&self, start: NonNull<u8>, mapped_bytes: usize) {
        let mut mask = [0_u64; (MOST_NODES / 64) as usize];
        mask[(self.node / 64) as usize] = 1 << (self.node % 64);
        let (policy, bits) = (libc::MPOL_PREFERRED, u64::from(MOST_NODES) + 1);
        // SAFETY: the kernel reads the mask, which has as many bits as said (it counts one more than it reads), and changes
        // where untouched pages of our mapping come from.
        let _refused =
            unsafe { libc::syscall(libc::SYS_mbind, start.as_ptr(), mapped_bytes, policy, mask.as_ptr(), bits, 0_u32) };
    }

    /// The calling thread, which is ours, runs near the node from here on.
    pub(super) fn settle(&self) {
        if self.cpus.is_empty() {
            return;
        }
        // SAFETY: a set of bits, of which none is set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        for &cpu in &self.cpus {
            let cpu = cpu as usize;
            if cpu < 8 * size_of::<libc::cpu_set_t>() {
                // SAFETY: inside the set, checked above.
                unsafe { libc::CPU_SET(cpu, &mut set) };
            }
        }
        // SAFETY: the kernel reads a set of this size, for the calling thread.
        let _refused = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) };
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::backend::{PAGE_BYTES, pages};

    fn several(nodes: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("sys/devices/system/node");
        std::fs::create_dir_all(folder.join("node1")).unwrap();
        std::fs::write(folder.join("online"), nodes).unwrap();
        std::fs::write(folder.join("node1/cpulist"), "0\n").unwrap();
        root
    }

    #[test]
    fn one_node_is_no_placement() {
        assert_eq!(Placement::on(several("0\n").path(), 0), None);
        let root = several("0-1\n");
        assert_eq!(Placement::on(root.path(), 1), Some(Placement { node: 1, cpus: vec![0] }));
        assert_eq!(Placement::on(root.path(), 0), Some(Placement { node: 0, cpus: vec![] }), "memory alone");
        assert_eq!(Placement::on(root.path(), 2), None);
    }

    #[test]
    fn pages_carry_the_policy_and_a_thread_its_processors() {
        // Node 0 is on every machine.
        let placement = Placement { node: 0, cpus: vec![0] };
        let region = pages::map_huge(4 * PAGE_BYTES, 0).unwrap();
        placement.place(region.start(), 4 * PAGE_BYTES);
        let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
        let address = format!("{:x} ", region.start().as_ptr().addr());
        let line = maps.lines().find(|line| line.starts_with(&address));
        // Kernels without nodes have no such file.
        assert!(maps.is_empty() || line.is_some_and(|line| line.contains("prefer")), "{line:?}");
        // SAFETY: mapped above, no reference into it was made.
        unsafe { pages::unmap(region) }.unwrap();
        let settled = std::thread::spawn(move || {
            placement.settle();
            std::fs::read_to_string("/proc/thread-self/status").unwrap()
        });
        let status = settled.join().unwrap();
        let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        assert_eq!(allowed.trim(), "0");
    }
}
