//! NUMA nodes: the node near a device, and the memory and processors of a node.
//!
//! A machine with one node, or a machine that does not list its nodes, offers no choice (`None`).

use std::path::Path;

use super::files::Files;

const NODES: &str = "/sys/devices/system/node";

/// Returns the node near the device with this PCI bus ID (`0000:3B:00.0`, in upper or lower case), if the machine has several.
pub fn numa_node_of_pci(root: &Path, id: &str) -> Option<u32> {
    let id =
        Some(id.to_ascii_lowercase()).filter(|id| id.chars().all(|c| c.is_ascii_hexdigit() || ":.".contains(c)))?;
    // The kernel writes -1 if the firmware names no node.
    let node = Files::below(root).number(format!("/sys/bus/pci/devices/{id}/numa_node"))?;
    let nodes = numa_nodes(root);
    u32::try_from(node).ok().filter(|node| nodes.len() > 1 && nodes.contains(node))
}

/// Returns the nodes of the machine; empty if the machine does not list them.
pub fn numa_nodes(root: &Path) -> Vec<u32> {
    let list = Files::below(root).read(format!("{NODES}/online"));
    list.and_then(|list| parse_list(&list)).unwrap_or_default()
}

/// A NUMA node, and the contents of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumaNode {
    pub id: u32,
    /// All memory of the node; `None` if unknown.
    pub memory_bytes: Option<u64>,
    /// Processors near the node; `None` if unknown.
    pub cpus: Option<Vec<u32>>,
}

/// Returns the nodes of the machine, each with its memory and processors; empty if the machine does not list them.
pub fn describe_numa_nodes(root: &Path) -> Vec<NumaNode> {
    let files = Files::below(root);
    let describe = |id| {
        let cpus = files.read(format!("{NODES}/node{id}/cpulist")).and_then(|list| parse_list(&list));
        let meminfo = files.read(format!("{NODES}/node{id}/meminfo"));
        NumaNode { id, memory_bytes: meminfo.and_then(|text| total_bytes(&text)), cpus }
    };
    numa_nodes(root).into_iter().map(describe).collect()
}

/// Parses the memory of a node, from a line such as `Node 0 MemTotal: 24684096 kB`.
fn total_bytes(meminfo: &str) -> Option<u64> {
    let rest = meminfo.lines().find_map(|line| line.split_once("MemTotal:"))?.1;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Lists with more numbers than this, or with a number of this size or above, are rejected: no machine has that many nodes or
/// processors.
const LIST_LIMIT: u32 = 1 << 16;

/// Parses a set as the kernel writes it: `0-3,8,10-11`.
pub fn parse_list(text: &str) -> Option<Vec<u32>> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        let more = (last as usize + 1).saturating_sub(first as usize);
        if last >= LIST_LIMIT || numbers.len() + more > LIST_LIMIT as usize {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

#[cfg(all(test, not(miri)))] // Files only: no unsafe code to check.
mod tests {
    use super::super::files::tree;
    use super::*;

    const DEVICE: &str = "/sys/bus/pci/devices/0000:3b:00.0/numa_node";
    const ONLINE: &str = "/sys/devices/system/node/online";

    fn node(files: &[(&str, &str)]) -> Option<u32> {
        numa_node_of_pci(tree::of(files).path(), "0000:3B:00.0")
    }

    #[test]
    fn the_bus_names_the_numa_node_of_a_device() {
        assert_eq!(node(&[(DEVICE, "1\n"), (ONLINE, "0-1\n")]), Some(1));
        assert_eq!(node(&[(DEVICE, "0\n"), (ONLINE, "0\n")]), None);
        assert_eq!(node(&[(DEVICE, "-1\n"), (ONLINE, "0-1\n")]), None);
        assert_eq!(node(&[(DEVICE, "7\n"), (ONLINE, "0-1\n")]), None, "a node that does not exist");
        assert_eq!(node(&[(ONLINE, "0-1\n")]), None);
        assert_eq!(node(&[(DEVICE, "1\n")]), None);
        assert_eq!(node(&[(DEVICE, "1\n"), (ONLINE, "purple\n")]), None);
    }

    #[test]
    fn an_id_never_leads_out_of_its_folder() {
        let root = tree::of(&[("/sys/bus/pci/numa_node", "1\n"), (ONLINE, "0-1\n")]);
        assert_eq!(numa_node_of_pci(root.path(), "../"), None);
    }

    #[test]
    fn a_node_has_the_memory_and_the_processors_that_its_files_say() {
        let files = [
            (ONLINE, "0-2\n"),
            ("/sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       24684096 kB\nNode 0 MemFree: 1 kB\n"),
            ("/sys/devices/system/node/node0/cpulist", "0-3\n"),
            ("/sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 0 kB\n"),
            ("/sys/devices/system/node/node1/cpulist", "\n"),
            ("/sys/devices/system/node/node2/meminfo", "Node 2 MemTotal: 18446744073709551615 kB\n"),
        ];
        let nodes = describe_numa_nodes(tree::of(&files).path());
        let node = |id, memory_bytes, cpus| NumaNode { id, memory_bytes, cpus };
        let first = node(0, Some(24_684_096 << 10), Some(vec![0, 1, 2, 3]));
        assert_eq!(nodes, [first, node(1, Some(0), Some(vec![])), node(2, None, None)]);
        assert_eq!(describe_numa_nodes(tree::of(&files[1..]).path()), [], "unlisted nodes");
    }

    #[test]
    fn a_list_of_numbers_is_bounded() {
        assert_eq!(parse_list("4-6,12\n"), Some(vec![4, 5, 6, 12]));
        assert_eq!(parse_list("0-4294967295"), None);
        assert_eq!(parse_list("0-65535,0"), None, "more numbers than allowed");
    }
}
