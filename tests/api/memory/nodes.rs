//! Pools on NUMA nodes, on a machine that a tree of files simulates.

use std::fs;

use pinpool::PoolBuilder;
use tempfile::TempDir;

use crate::fixture::{MIB, heap};
use crate::scratch::scratch;

/// A machine with this list of nodes.
fn machine(nodes: &str) -> TempDir {
    let (root, folder) = scratch("sys/devices/system/node");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("online"), nodes).unwrap();
    root
}

fn on(root: &TempDir, node: u32) -> PoolBuilder {
    heap().unstable_host_root(root.path()).maintenance_thread(false).setting("numa_node", node)
}

#[test]
fn a_node_that_does_not_exist_is_refused_if_there_is_a_choice() {
    let error = on(&machine("0-1\n"), 7).build().unwrap_err();
    assert!(error.is_setting() && error.to_string().contains("the machine has [0, 1]"), "{error}");
    ["0\n", ""].into_iter().for_each(|nodes| drop(on(&machine(nodes), 7).build().unwrap().get(MIB).unwrap()));
}

/// Checks the kernel's NUMA policy for a buffer's memory.
#[test]
fn memory_of_a_node_has_its_policy() {
    let Ok(_) = fs::read("/proc/self/numa_maps") else { return };
    let root = machine("0-1\n");
    let pool = on(&root, 0).max_bytes(64 << 20).build().unwrap();
    let mut buf = pool.get(4 * MIB).unwrap();
    buf.wait_slice_mut().unwrap().fill(1);
    let at = buf.wait_slice().unwrap().as_ptr().addr() as u64;
    let maps = fs::read_to_string("/proc/self/numa_maps").unwrap();
    let start = |line: &str| u64::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap();
    let line = maps.lines().filter(|line| start(line) <= at).max_by_key(|line| start(line)).unwrap();
    assert!(line.contains("prefer") && line.contains(":0"), "{line}");
}
