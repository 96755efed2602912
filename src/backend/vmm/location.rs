//! The host locations at which `vmm` allocates, chosen by the NUMA nodes of the machine.
//!
//! | NUMA nodes | locations, in this order |
//! | --- | --- |
//! | one, or unknown | that node (0 if unknown), any memory of the host |
//! | several, and the preferred one has memory and processors | that node, any memory of the host |
//! | several, and the preferred one does not exist or lacks memory or processors | any memory of the host |
//! | several, not all alike, under a driver before r595 | none, unless `PINPOOL_BACKEND=vmm` is set |
//!
//! `cuMemCreate` refuses a node without memory, a node without processors, and node -1. On machines with unequal nodes, drivers
//! before r595 have killed the process in this call without an error, so the machine is checked first. The preferred node is
//! the node that the user set, else the device's node, else the first node with memory and processors.
//!
//! This module reads files and calls no driver.

use std::path::Path;

use pinpool_os::format::Size;
use pinpool_os::host::{self, NumaNode};

/// The first driver branch that supports machines with unequal nodes.
const FIRST_SAFE_BRANCH: u32 = 595;
/// The CUDA version of that branch, as `cuDriverGetVersion` numbers it.
const FIRST_SAFE_VERSION: i32 = 13_020;
/// Two nodes are alike if the difference of their memory is at most the larger amount divided by this number. Equal nodes may differ
/// slightly, because the firmware keeps some memory of the first node.
const LIKENESS: u64 = 8;

/// A location on the host: the NUMA node with this number, or `None` for a location that the driver chooses.
pub(super) type HostLocation = Option<u32>;

/// The facts that decide the locations.
#[derive(Debug)]
pub(super) struct Machine {
    nodes: Vec<NumaNode>,
    /// Branch of the driver's kernel module; `None` if unknown.
    branch: Option<u32>,
    /// CUDA version of the driver's library.
    version: i32,
}

impl Machine {
    /// Reads the facts of the machine below `root`, which has a driver of this CUDA `version`.
    pub(super) fn read(root: &Path, version: i32) -> Self {
        Self { nodes: host::describe_numa_nodes(root), branch: host::limits::nvidia_branch(root), version }
    }

    /// Returns the locations to try, at least one, or the reason that there is none.
    pub(super) fn locations(&self, wanted: Option<u32>, is_named: bool) -> Result<Vec<HostLocation>, String> {
        let [first, _, ..] = self.nodes.as_slice() else {
            return Ok(vec![Some(self.nodes.first().map_or(0, |node| node.id)), None]);
        };
        let is_old = self.branch.map_or(self.version < FIRST_SAFE_VERSION, |branch| branch < FIRST_SAFE_BRANCH);
        if let Some(difference) = self.difference(first).filter(|_| !is_named && is_old) {
            let driver = self.branch.map_or_else(|| "a driver".to_owned(), |branch| format!("driver {branch}"));
            return Err(format!(
                "the NUMA nodes are not alike ({difference}), and {driver} before r{FIRST_SAFE_BRANCH} may end the \
                 process on such a machine; set PINPOOL_BACKEND=vmm to use it anyway"
            ));
        }
        let is_whole = |node: &&NumaNode| lack(node).is_none();
        let node = self.nodes.iter().find(|node| wanted.map_or_else(|| is_whole(node), |wanted| node.id == wanted));
        let node = node.filter(is_whole).into_iter().map(|node| Some(node.id));
        Ok(node.chain([None]).collect())
    }

    /// Returns why the node `wanted` was not used; `None` if it has memory and processors or is unknown, or if there is only one node.
    pub(super) fn lack_of(&self, wanted: Option<u32>) -> Option<String> {
        let node = self.nodes.iter().filter(|_| self.nodes.len() > 1).find(|node| Some(node.id) == wanted)?;
        lack(node).map(|lack| format!("node {} has no {lack}", node.id))
    }

    /// Returns what a node lacks, or how it differs from `first`, for the first such node; `None` if all nodes are alike.
    fn difference(&self, first: &NumaNode) -> Option<String> {
        self.nodes.iter().find_map(|node| {
            if let Some(lack) = lack(node) {
                return Some(format!("node {} has no {lack}", node.id));
            }
            let (one, other) = (first.memory_bytes.unwrap_or(0), node.memory_bytes.unwrap_or(0));
            if one.abs_diff(other) > one.max(other) / LIKENESS {
                let [one, other] = [one, other].map(Size);
                return Some(format!("node {} has {one} and node {} {other}", first.id, node.id));
            }
            let [one, other] = [first, node].map(|node| node.cpus.as_ref().map_or(0, Vec::len));
            (one != other).then(|| format!("node {} has {one} processors and node {} {other}", first.id, node.id))
        })
    }
}

/// Returns the resource that a node lacks. Unreadable properties count as present.
fn lack(node: &NumaNode) -> Option<&'static str> {
    match (node.memory_bytes, node.cpus.as_deref()) {
        (Some(0), _) => Some("memory"),
        (_, Some([])) => Some("processors"),
        _ => None,
    }
}

#[cfg(all(test, not(miri)))] // Files only: no unsafe code to check.
mod tests {
    use super::*;
    use pinpool_os::host::tree;

    const ANYWHERE: HostLocation = None;
    const OLD: (&str, &str) = ("/sys/module/nvidia/version", "580.159.04\n");
    const NEW: (&str, &str) = ("/sys/module/nvidia/version", "595.45.04\n");

    /// Returns a machine with these nodes: number, GiB of memory, list of processors.
    fn machine(nodes: &[(u32, u64, &str)], module: &[(&str, &str)], version: i32) -> Machine {
        const NODES: &str = "/sys/devices/system/node";
        let online: Vec<_> = nodes.iter().map(|(id, ..)| id.to_string()).collect();
        let mut files = vec![(format!("{NODES}/online"), online.join(","))];
        for (id, gib, cpus) in nodes {
            files.push((format!("{NODES}/node{id}/meminfo"), format!("Node {id} MemTotal: {} kB\n", gib << 20)));
            files.push((format!("{NODES}/node{id}/cpulist"), format!("{cpus}\n")));
        }
        files.extend(module.iter().map(|&(path, text)| (path.to_owned(), text.to_owned())));
        Machine::read(tree::of(&files).path(), version)
    }

    #[test]
    fn each_shape_of_a_machine_has_its_locations() {
        let alike = [(0, 512, "0-63"), (1, 504, "64-127")];
        let unlike = [(0, 512, "0-63"), (1, 128, "64-127")];
        let memoryless = [(0, 512, "0-63"), (1, 0, "64-127")];
        let expander = [(0, 512, "0-63"), (1, 512, "")];
        let fewer_cpus = [(0, 512, "0-63"), (1, 512, "64-95")];
        let gpu_nodes = [(0, 480, "0-71"), (1, 480, "72-143"), (2, 96, ""), (10, 96, "")];
        let some = |locations: &[HostLocation]| Some(locations.to_vec());
        for (nodes, module, wanted, expected) in [
            (&[][..], OLD, None, some(&[Some(0), ANYWHERE])),
            (&[(0, 128, "0-15")], OLD, None, some(&[Some(0), ANYWHERE])),
            (&[(8, 128, "0-15")], OLD, None, some(&[Some(8), ANYWHERE])),
            (&alike, OLD, None, some(&[Some(0), ANYWHERE])),
            (&alike, OLD, Some(1), some(&[Some(1), ANYWHERE])),
            (&alike, NEW, Some(1), some(&[Some(1), ANYWHERE])),
            (&unlike, OLD, Some(0), None),
            (&unlike, NEW, Some(1), some(&[Some(1), ANYWHERE])),
            (&memoryless, OLD, Some(0), None),
            (&memoryless, NEW, Some(1), some(&[ANYWHERE])),
            (&memoryless, NEW, None, some(&[Some(0), ANYWHERE])),
            (&expander, OLD, None, None),
            (&expander, NEW, Some(1), some(&[ANYWHERE])),
            (&fewer_cpus, OLD, Some(0), None),
            (&fewer_cpus, NEW, Some(1), some(&[Some(1), ANYWHERE])),
            (&gpu_nodes, OLD, Some(0), None),
            (&gpu_nodes, NEW, Some(1), some(&[Some(1), ANYWHERE])),
            (&alike, NEW, Some(7), some(&[ANYWHERE])),
        ] {
            let machine = machine(nodes, &[module], 13_000);
            let what = format!("{nodes:?} {module:?} {wanted:?}");
            let found = machine.locations(wanted, false);
            assert_eq!(found.clone().ok(), expected, "{what}");
            assert!(found.err().is_none_or(|why| why.contains("set PINPOOL_BACKEND=vmm") && why.contains("580")));
            let insisted = machine.locations(wanted, true).unwrap();
            assert!(expected.is_none_or(|expected| expected == insisted), "{what}");
        }
    }

    #[test]
    fn without_a_version_of_the_module_that_of_cuda_decides() {
        let nodes = [(0, 512, "0-63"), (1, 0, "64-127")];
        assert!(machine(&nodes, &[], 13_010).locations(None, false).is_err());
        assert!(machine(&nodes, &[], 13_020).locations(None, false).is_ok());
        assert!(machine(&nodes, &[NEW], 13_000).locations(None, false).is_ok());
        assert!(machine(&nodes, &[OLD], 13_020).locations(None, false).is_err(), "the module is the older of the two");
    }

    #[test]
    fn a_wanted_node_that_is_not_whole_is_named() {
        let machine = machine(&[(0, 512, "0-63"), (1, 0, "64-127")], &[NEW], 0);
        assert_eq!(machine.lack_of(Some(1)).as_deref(), Some("node 1 has no memory"));
        assert_eq!((machine.lack_of(Some(0)), machine.lack_of(None)), (None, None));
    }
}
