//! Which backend `auto` takes when a driver backend's trial is refused, and what the first log line says about it.

use std::fs;

use cudarc::driver::CudaContext;
use log::Level;
use mock_driver::{Code, MockDriver};
use pinpool::{Backend, PoolBuilder, Preset};

use crate::captured_log::{lines_with_levels, listen};
use crate::child::alone;
use crate::fixture::{builder, held, loaded};

const HOST_NUMA_ID: i32 = 134;
const VIRTUAL_MEMORY_ON_NODES: i32 = 141;
const VIRTUAL_MEMORY_ON_HOST: i32 = 145;

/// The backend of a pool, its start line, and its warnings.
struct Taken {
    backend: &'static str,
    start: String,
    warnings: Vec<String>,
}

fn taken(builder: PoolBuilder) -> Taken {
    listen();
    let pool = builder.build().unwrap();
    // The first use of the pool chooses the backend.
    let backend = pool.stats().backend;
    let lines = lines_with_levels();
    let start = lines.iter().find(|(_, line)| line.contains("preset=")).unwrap().1.clone();
    let warnings = lines.into_iter().filter(|(level, _)| *level == Level::Warn).map(|(_, line)| line).collect();
    Taken { backend, start, warnings }
}

fn auto() -> PoolBuilder {
    builder(Backend::Auto)
}

/// Calls that are refused from the first on, what `auto` takes then, and what the first log line says was skipped, in this order.
/// `host` represents the backends without a driver.
const REFUSALS: &[(&[&str], &str, &[&str])] = &[
    (&[], "vmm", &[]),
    (&["cuMemGetAllocationGranularity"], "register", &["vmm: cuMemGetAllocationGranularity"]),
    (&["cuMemAddressReserve"], "register", &["vmm: cuMemAddressReserve"]),
    (&["cuMemCreate"], "register", &["vmm: cuMemCreate"]),
    (&["cuMemMap"], "register", &["vmm: cuMemMap"]),
    (&["cuMemSetAccess"], "register", &["vmm: cuMemSetAccess"]),
    (&["cuMemUnmap"], "register", &["vmm: cuMemUnmap"]),
    (&["cuMemCreate", "cuMemHostRegister_v2"], "cuda", &["vmm: cuMemCreate", "register: cuMemHostRegister"]),
    (&["cuMemMap", "cuMemHostUnregister"], "cuda", &["vmm: cuMemMap", "register: cuMemHostUnregister"]),
    (&["cuMemHostRegister_v2"], "vmm", &[]),
    (&["cuMemHostAlloc"], "vmm", &[]),
    (
        &["cuMemSetAccess", "cuMemHostRegister_v2", "cuMemHostAlloc"],
        "host",
        &["vmm: cuMemSetAccess", "register: cuMemHostRegister", "cuda: cuMemHostAlloc"],
    ),
    (
        &["cuMemSetAccess", "cuMemHostRegister_v2", "cuMemFreeHost"],
        "host",
        &["vmm: cuMemSetAccess", "register: cuMemHostRegister", "cuda: cuMemFreeHost"],
    ),
    (&["cuDevicePrimaryCtxRetain"], "host", &["vmm, register, cuda: cuDevicePrimaryCtxRetain"]),
    (&["cuMemcpyHtoDAsync_v2"], "host", &["vmm, register, cuda: cuMemcpyHtoDAsync"]),
    (&["cuMemcpyDtoHAsync_v2"], "host", &["vmm, register, cuda: cuMemcpyDtoHAsync"]),
    (&["cuStreamCreate"], "host", &["vmm, register, cuda: cuStreamCreate"]),
];

#[test]
fn each_refused_step_is_named_and_the_next_backend_is_used() {
    alone(|| {
        let driver = MockDriver::load();
        for code in [Code::OUT_OF_MEMORY, Code::NOT_PERMITTED, Code::NOT_SUPPORTED] {
            for (refused, expected, says) in REFUSALS {
                driver.reset();
                // A context that this process's pools have not retained. With a context, every trial makes a copy.
                driver.renew_contexts();
                std::mem::forget(CudaContext::new(0).unwrap());
                refused.iter().for_each(|call| driver.fail_from(call, 1, code));
                let Taken { backend, start, warnings } = taken(auto());
                let is_host = ["mlock", "heap"].contains(&backend);
                assert_eq!(if is_host { "host" } else { backend }, *expected, "{refused:?} {code:?}: {start}");
                let mut rest = start.as_str();
                for part in *says {
                    let skipped = format!("skipped {part}");
                    rest = rest.split_once(&skipped).unwrap_or_else(|| panic!("no {skipped}: {start}")).1;
                    assert!(rest.contains(&format!("(code {})", code.0)), "{start}");
                }
                let without_mlock = usize::from(is_host && start.contains("skipped mlock"));
                assert_eq!(start.matches("(skipped ").count() - without_mlock, says.len());
                // Only an available GPU that is not used causes a warning.
                let unused = warnings.iter().filter(|line| line.contains("is not used although it is available"));
                assert_eq!(unused.count(), usize::from(is_host), "{refused:?}: {warnings:?}");
            }
        }
    });
}

#[test]
fn a_backend_without_memory_for_its_test_copy_is_used_with_a_warning() {
    alone(|| {
        let driver = MockDriver::load();
        let refused = |call: &str, code: Code, others: &[&str]| {
            driver.reset();
            driver.renew_contexts();
            std::mem::forget(CudaContext::new(0).unwrap());
            driver.fail_from(call, 1, code);
            others.iter().for_each(|call| driver.fail_from(call, 1, Code::NOT_PERMITTED));
            taken(auto())
        };
        for code in [Code::OUT_OF_MEMORY, Code::NOT_SUPPORTED] {
            for (expected, others) in [("vmm", &[][..]), ("register", &["cuMemCreate"])] {
                let Taken { backend, warnings, .. } = refused("cuMemAllocAsync", code, others);
                let named = format!("backend {expected} is used without a test copy: cuMemAllocAsync failed");
                assert!(backend == expected && warnings.iter().any(|line| line.contains(&named)), "{warnings:?}");
                assert!(warnings.iter().any(|line| line.contains(&format!("(code {})", code.0))), "{warnings:?}");
            }
        }
        // Any other code counts as a refusal.
        let Taken { backend, start, .. } = refused("cuMemAllocAsync", Code::LAUNCH_FAILED, &[]);
        let named = "skipped vmm, register, cuda: cuMemAllocAsync failed: CUDA_ERROR_LAUNCH_FAILED (code 719)";
        assert!(["mlock", "heap"].contains(&backend) && start.contains(named), "{start}");
    });
}

#[test]
fn the_tensorflow_preset_tries_only_the_backend_cuda() {
    let driver = MockDriver::load();
    let of = || taken(auto().preset(Preset::TensorFlow));
    assert_eq!((of().backend, driver.calls("cuMemHostAlloc"), driver.calls("cuMemFreeHost")), ("cuda", 1, 1));
    driver.fail_from("cuMemHostAlloc", 1, Code::NOT_PERMITTED);
    let Taken { start, warnings, .. } = of();
    assert!(start.contains("skipped cuda: cuMemHostAlloc failed: CUDA_ERROR_NOT_PERMITTED (code 800)"), "{start}");
    assert!(warnings.iter().any(|line| line.contains("is not used although it is available")), "{warnings:?}");
}

#[test]
fn a_trial_leaves_nothing_behind_and_creates_a_context_only_to_copy() {
    alone(|| {
        let (driver, before) = loaded();
        let pool = auto().build().unwrap();
        pool.start();
        let (trials, contexts) = (driver.calls("cuMemUnmap"), driver.counts().contexts);
        drop(tokio::runtime::Runtime::new().unwrap().block_on(pool.get_async(4096)).unwrap());
        assert!(trials > 0 && driver.calls("cuMemUnmap") == trials, "only `start` makes a trial");
        drop(pool);
        assert_eq!(contexts, 0, "vmm needs none");
        crate::until::until("the thread of the request to end", || held(&driver) == before);
        driver.fail_from("cuMemCreate", 1, Code::NOT_PERMITTED);
        driver.fail_from("cuMemHostRegister_v2", 1, Code::NOT_PERMITTED);
        assert_eq!((taken(auto()).backend, held(&driver)), ("cuda", before));
        assert_eq!((driver.counts().contexts, driver.calls("cuMemcpyHtoDAsync_v2")), (1, 1), "cuda is copied from");
        let counts = driver.counts();
        assert_eq!((counts.streams, counts.device_allocations), (0, 0));
    });
}

/// A machine below a separate root: NUMA nodes as (number, GiB, processors), and more files.
pub(crate) fn machine(nodes: &[(u32, u64, &str)], more: &[(&str, &str)]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    let folder = "sys/devices/system/node";
    let online: Vec<_> = nodes.iter().map(|(id, ..)| id.to_string()).collect();
    write(&format!("{folder}/online"), &online.join(","));
    for (id, gib, cpus) in nodes {
        write(&format!("{folder}/node{id}/meminfo"), &format!("Node {id} MemTotal: {} kB\n", gib << 20));
        write(&format!("{folder}/node{id}/cpulist"), &format!("{cpus}\n"));
    }
    more.iter().for_each(|(path, text)| write(path, text));
    root
}

const NEW: (&str, &str) = ("sys/module/nvidia/version", "595.45.04\n");
/// The device of the mock driver is near node 1.
const NEAR_1: (&str, &str) = ("sys/bus/pci/devices/0000:d0:00.0/numa_node", "1\n");
const ALIKE: &[(u32, u64, &str)] = &[(0, 512, "0-63"), (1, 508, "64-127")];
const MEMORYLESS: &[(u32, u64, &str)] = &[(0, 512, "0-63"), (1, 0, "64-127")];
const WITHOUT_CPUS: &[(u32, u64, &str)] = &[(0, 512, "0-63"), (1, 512, "")];
const ASYMMETRIC: &[(u32, u64, &str)] = &[(0, 512, "0-63"), (1, 128, "64-127")];

#[test]
fn old_drivers_use_vmm_on_unequal_numa_nodes_only_if_it_is_set() {
    let driver = MockDriver::load();
    for (nodes, why) in [
        (MEMORYLESS, "node 1 has no memory"),
        (WITHOUT_CPUS, "node 1 has no processors"),
        (ASYMMETRIC, "node 0 has 512.0GiB and node 1 128.0GiB"),
    ] {
        let root = machine(nodes, &[]);
        let created = driver.calls("cuMemCreate");
        let Taken { backend, start, .. } = taken(auto().unstable_host_root(root.path()));
        assert_eq!((backend, driver.calls("cuMemCreate") - created), ("register", 0), "{start}");
        assert!(start.contains(why) && start.contains("set PINPOOL_BACKEND=vmm"), "{start}");
        assert_eq!(taken(builder(Backend::Vmm).unstable_host_root(root.path())).backend, "vmm");
        assert_eq!(taken(auto().unstable_host_root(machine(nodes, &[NEW]).path())).backend, "vmm", "{nodes:?}");
    }
    assert_eq!(taken(auto().unstable_host_root(machine(ALIKE, &[]).path())).backend, "vmm");
}

#[test]
fn memory_without_a_node_replaces_an_incomplete_node() {
    let driver = MockDriver::load();
    for nodes in [MEMORYLESS, WITHOUT_CPUS] {
        let root = machine(nodes, &[NEW, NEAR_1]);
        let created = driver.calls("cuMemCreate");
        let Taken { backend, start, .. } = taken(auto().unstable_host_root(root.path()));
        assert_eq!((backend, driver.calls("cuMemCreate") - created), ("register", 0), "{start}");
        assert!(start.contains("node 1 has no ") && start.contains("without a node"), "{start}");
        driver.set_attribute(VIRTUAL_MEMORY_ON_HOST, 1);
        assert_eq!(taken(auto().unstable_host_root(root.path())).backend, "vmm");
        driver.reset();
    }
}

#[test]
fn memory_without_a_node_is_requested_if_the_node_is_refused() {
    let driver = MockDriver::load();
    driver.set_attribute(VIRTUAL_MEMORY_ON_HOST, 1);
    driver.fail("cuMemCreate", 1, Code::INVALID_VALUE);
    assert_eq!(taken(auto()).backend, "vmm");
    driver.fail_from("cuMemCreate", 1, Code::INVALID_VALUE);
    let start = taken(auto()).start;
    let words = "cuMemCreate failed: CUDA_ERROR_INVALID_VALUE (code 1); then cuMemCreate failed";
    assert!(start.contains(words), "{start}");
    driver.reset();
    driver.set_attribute(VIRTUAL_MEMORY_ON_NODES, 0);
    driver.set_attribute(VIRTUAL_MEMORY_ON_HOST, 1);
    assert_eq!(taken(auto()).backend, "vmm", "a driver that has memory of the host alone");
    // On a single-node machine, a driver that reports no node near the device.
    driver.reset();
    driver.set_attribute(HOST_NUMA_ID, -1);
    assert_eq!(auto().build().unwrap().stats().backend, "vmm");
}
