//! Pools of the driver on a machine with two memory nodes.

use std::time::Duration;

use driver_double::Double;
use pinpool::{Backend, Pool};
use tempfile::TempDir;

use crate::fall_through::machine;
use crate::fixture::{MIB, builder, held};

/// Two nodes alike, and a pool near the first.
fn pool_of_two_nodes(backend: Backend, max_bytes: u64) -> (TempDir, Pool) {
    let root = machine(&[(0, 512, "0-63"), (1, 512, "64-127")], &[]);
    let builder = builder(backend).host_root(root.path()).numa_node(0).max_bytes(max_bytes).wait(Duration::ZERO);
    (root, builder.build().unwrap())
}

#[test]
fn vmm_and_register_serve_each_node_and_reuse_buffers_on_it() {
    let double = Double::load();
    double.set_memory_nodes(&[0, 1]);
    let before = held(&double);
    for backend in [Backend::Vmm, Backend::Register] {
        let (_root, pool) = pool_of_two_nodes(backend.clone(), 64 << 20);
        let address = |node: u32| pool.get_on(node, 3 * MIB).unwrap().as_ptr().addr();
        let first = [address(0), address(1)];
        let calls = double.all_calls();
        assert_ne!(first[0], first[1], "{backend:?}");
        assert_eq!([address(0), address(1), address(0)], [first[0], first[1], first[0]], "{backend:?}");
        assert_eq!(double.all_calls(), calls, "{backend:?}: a hit calls nothing, on each node");
        let of_nodes = [pool.clone(), pool.on_node(1).unwrap()];
        for (of_node, hits) in of_nodes.iter().zip([2, 1]) {
            let stats = of_node.stats();
            assert_eq!((stats.gets, stats.hits, stats.backend), (hits + 1, hits, backend.name()));
            stats.validate().unwrap();
        }
        let told: u64 = of_nodes.iter().map(|of_node| of_node.stats().pinned_bytes).sum();
        assert_eq!(held(&double).pinned_bytes - before.pinned_bytes, told, "{backend:?}");
        assert!(pool.get_on(2, MIB).unwrap_err().is_setting());
        drop((of_nodes, pool));
        assert_eq!(held(&double), before, "{backend:?}");
    }
    assert_eq!(double.wrong_uses(), Vec::<String>::new());
}

#[test]
fn the_nodes_of_a_driver_share_one_ceiling_and_what_is_idle_makes_room() {
    let double = Double::load();
    double.set_memory_nodes(&[0, 1]);
    let before = held(&double).pinned_bytes;
    for backend in [Backend::Vmm, Backend::Register] {
        let (_root, pool) = pool_of_two_nodes(backend.clone(), 16 << 20);
        let here = pool.get(12 * MIB).unwrap();
        assert!(pool.get_on(1, 8 * MIB).unwrap_err().is_limit(), "{backend:?}");
        drop(here);
        let there = pool.get_on(1, 8 * MIB).unwrap();
        assert!(held(&double).pinned_bytes - before <= 16 << 20, "{backend:?}");
        drop(there);
    }
    assert_eq!(held(&double).pinned_bytes, before);
}

#[test]
fn memory_of_a_node_that_the_driver_refuses_is_an_error_that_names_it_and_others_are_served() {
    let double = Double::load();
    double.set_memory_nodes(&[0]);
    let before = held(&double);
    let (_root, pool) = pool_of_two_nodes(Backend::Vmm, 64 << 20);
    let error = pool.get_on(1, 3 * MIB).unwrap_err();
    assert!(error.is_backend() && error.to_string().contains("cuMem"), "{error}");
    drop(pool.get_on(0, 3 * MIB).unwrap());
    // The refusal was of the moment.
    double.set_memory_nodes(&[0, 1]);
    drop(pool.get_on(1, 3 * MIB).unwrap());
    drop(pool);
    assert_eq!(held(&double), before);
}

#[test]
fn cuda_says_that_it_cannot_choose_the_node() {
    let _double = Double::load();
    let root = machine(&[(0, 512, "0-63"), (1, 512, "64-127")], &[]);
    let pool = builder(Backend::Cuda).host_root(root.path()).build().unwrap();
    let error = pool.get_on(1, MIB).unwrap_err();
    assert!(error.is_setting() && error.to_string().contains("cuda cannot choose the memory node"), "{error}");
}
