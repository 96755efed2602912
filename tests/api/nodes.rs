//! One pool on several memory nodes, on a machine that a tree of files stands for.

use std::fs;

use pinpool::{Backend, Pool, PoolBuilder, Preset};
use tempfile::TempDir;

const MIB: usize = 1 << 20;

/// A machine with this list of nodes.
fn machine(nodes: &str) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("sys/devices/system/node");
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("online"), nodes).unwrap();
    root
}

fn on(root: &TempDir, backend: Backend) -> PoolBuilder {
    Pool::builder().without_env().backend(backend).host_root(root.path()).background_poll(false)
}

#[test]
fn buffers_are_reused_on_the_node_that_they_lie_on() {
    let root = machine("0-1\n");
    let pool = on(&root, Backend::Heap).max_bytes(Some(64 << 20)).build().unwrap();
    let address = |node: Option<u32>| {
        let buf = node.map_or_else(|| pool.get(3 * MIB), |node| pool.get_on(node, 3 * MIB)).unwrap();
        buf.as_slice().unwrap().as_ptr().addr()
    };
    let first = [address(None), address(Some(0)), address(Some(1))];
    assert!(first[0] != first[1] && first[1] != first[2] && first[0] != first[2], "{first:?}");
    assert_eq!([address(None), address(Some(0)), address(Some(1))], first);
    for of_node in [pool.clone(), pool.on_node(0).unwrap(), pool.on_node(1).unwrap()] {
        let stats = of_node.stats();
        assert_eq!((stats.gets, stats.hits, stats.backend), (2, 1, "heap"));
        stats.validate().unwrap();
    }
}

#[test]
fn all_nodes_are_under_one_ceiling_and_what_is_idle_on_one_makes_room_on_another() {
    let root = machine("0-1\n");
    let pool = on(&root, Backend::Heap).max_bytes(Some(16 << 20)).wait(std::time::Duration::ZERO).build().unwrap();
    let held = || [&pool, &pool.on_node(1).unwrap()].map(|pool| pool.stats().pinned_bytes);
    let here = pool.get(12 * MIB).unwrap();
    let error = pool.get_on(1, 8 * MIB).unwrap_err();
    assert!(error.is_limit(), "{error}");
    let there = pool.get_on(1, 4 * MIB).unwrap();
    assert_eq!(held(), [12 << 20, 4 << 20]);
    assert!(pool.get(2 * MIB).unwrap_err().is_limit());
    // Idle here, and needed there.
    drop(here);
    let more = pool.get_on(1, 8 * MIB).unwrap();
    let [own, other] = held();
    assert!(other == 12 << 20 && own <= 4 << 20, "{own} and {other}");
    drop((there, more));
    // And the other way round.
    let all = pool.get(16 * MIB).unwrap();
    assert_eq!(held(), [16 << 20, 0]);
    drop(all);
    for of_node in [pool.clone(), pool.on_node(1).unwrap()] {
        of_node.stats().validate().unwrap();
    }
    pool.set_max_bytes(4 << 20).unwrap();
    assert!(pool.get_on(1, 8 * MIB).unwrap_err().is_limit(), "the ceiling changes on all nodes");
}

#[test]
fn trim_and_clear_act_on_all_nodes_the_others_first() {
    let root = machine("0,2\n");
    let pool = on(&root, Backend::Heap).max_bytes(Some(64 << 20)).build().unwrap();
    let fill = || {
        drop(pool.get(8 * MIB).unwrap());
        drop(pool.get_on(2, 8 * MIB).unwrap());
    };
    let held = || [&pool, &pool.on_node(2).unwrap()].map(|pool| pool.stats().pinned_bytes >> 20);
    fill();
    assert_eq!(held(), [8, 8]);
    pool.trim(12 << 20);
    assert_eq!(held(), [8, 4]);
    pool.trim(2 << 20);
    assert_eq!(held(), [2, 0]);
    fill();
    pool.clear();
    assert_eq!(held(), [0, 0]);
}

#[test]
fn a_machine_with_one_node_has_one_pool() {
    for nodes in ["0\n", ""] {
        let root = machine(nodes);
        let pool = on(&root, Backend::Sim { total_bytes: 1 << 30 }).build().unwrap();
        drop(pool.get_on(0, MIB).unwrap());
        assert_eq!((pool.stats().gets, pool.on_node(0).unwrap().stats().gets), (1, 1));
    }
}

#[test]
fn who_cannot_choose_the_node_says_so() {
    let root = machine("0-1\n");
    let refused = |pool: &Pool, node: u32, why: &str| {
        let error = pool.get_on(node, MIB).unwrap_err();
        assert!(error.is_setting() && error.to_string().contains(why), "{error}");
    };
    let sim = on(&root, Backend::Sim { total_bytes: 1 << 30 }).build().unwrap();
    refused(&sim, 1, "back-end sim cannot choose the memory node");
    let heap = on(&root, Backend::Heap).max_bytes(Some(64 << 20)).build().unwrap();
    refused(&heap, 7, "no such memory node, the machine has [0, 1]");
    refused(&heap.partition("part", 1 << 20).unwrap(), 1, "partition");
    refused(&heap.on_node(1).unwrap(), 0, "the pool that was built");
    let exact = on(&root, Backend::Heap).preset(Preset::TensorFlow).build().unwrap();
    refused(&exact, 1, "PINPOOL_PRESET=adaptive");
}

/// The kernel's policy of the memory behind a buffer.
#[test]
fn memory_of_a_node_has_its_policy() {
    let Ok(_) = fs::read("/proc/self/numa_maps") else { return };
    let root = machine("0-1\n");
    let pool = on(&root, Backend::Heap).max_bytes(Some(64 << 20)).build().unwrap();
    let mut buf = pool.get_on(0, 4 * MIB).unwrap();
    buf.as_mut_slice().unwrap().fill(1);
    let at = buf.as_slice().unwrap().as_ptr().addr() as u64;
    let maps = fs::read_to_string("/proc/self/numa_maps").unwrap();
    let start = |line: &str| u64::from_str_radix(line.split(' ').next().unwrap(), 16).unwrap();
    let line = maps.lines().filter(|line| start(line) <= at).max_by_key(|line| start(line)).unwrap();
    assert!(line.contains("prefer") && line.contains(":0"), "{line}");
}
