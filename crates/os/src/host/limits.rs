//! The limits of this process, and which of them refused memory.

use std::path::Path;

use super::files::{Files, field};
use super::memory::{self, LimitOrigin};

/// The soft limits of this process. A value is `None` if there is no limit, or if the limit cannot be read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessLimits {
    /// `RLIMIT_MEMLOCK`, `ulimit -l`.
    pub locked_bytes: Option<u64>,
    /// `RLIMIT_AS`, `ulimit -v`.
    pub address_bytes: Option<u64>,
    /// `RLIMIT_DATA`, `ulimit -d`.
    pub data_bytes: Option<u64>,
    /// `RLIMIT_NOFILE`, `ulimit -n`.
    pub open_files: Option<u64>,
    /// `RLIMIT_NPROC`, `ulimit -u`.
    pub threads: Option<u64>,
}

pub fn process_limits(root: &Path) -> ProcessLimits {
    let text = Files::below(root).read("/proc/self/limits").unwrap_or_default();
    let soft = |name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name)?.split_ascii_whitespace().next()?.parse().ok())
    };
    ProcessLimits {
        locked_bytes: soft("Max locked memory"),
        address_bytes: soft("Max address space"),
        data_bytes: soft("Max data size"),
        open_files: soft("Max open files"),
        threads: soft("Max processes"),
    }
}

/// Returns the number of ranks on this host, as torchrun states it, or 1.
pub fn local_ranks() -> u64 {
    parse_ranks(std::env::var("LOCAL_WORLD_SIZE").ok()).unwrap_or(1).max(1)
}

/// Parses the value of `LOCAL_WORLD_SIZE`.
pub fn parse_ranks(variable: Option<String>) -> Option<u64> {
    variable?.trim().parse().ok()
}

pub const ADDRESSES: &str = "the addresses of this process are limited (RLIMIT_AS): raise `ulimit -v`";
pub const DATA: &str = "the data of this process is limited: raise the limit (`ulimit -d unlimited`)";
pub const LOCKED: &str =
    "raise the limit (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=), grant CAP_IPC_LOCK, or set PINPOOL_BACKEND=heap";
pub const OVERCOMMIT: &str = "the kernel promises no more memory than it has (vm.overcommit_memory=2): raise \
                                     vm.overcommit_ratio, or set vm.overcommit_memory=0";
pub const CGROUP: &str = "the cgroup is out of memory: raise its limit (memory.max, docker --memory, \
                                        MemoryMax=), or lower PINPOOL_MAX_BYTES";
pub const MACHINE: &str = "the machine is out of memory: lower PINPOOL_MAX_BYTES, or end other programs";
pub const MAPPINGS: &str = "the process has as many mappings as it may: raise vm.max_map_count";
pub const ADDRESS_SPACE: &str = "the address space of the process is used up; each pool reserves eight times its \
                                        limit: build fewer pools, or lower PINPOOL_MAX_BYTES";
pub const UNKNOWN: &str = "the kernel is out of memory or of mappings (vm.max_map_count)";

/// 63/64 of the address space of a process, which has 128 TiB on x86-64 and 256 TiB elsewhere.
const NEARLY_ALL_ADDRESSES: u64 = (if cfg!(target_arch = "x86_64") { 1_u64 << 47 } else { 1 << 48 }) / 64 * 63;

/// Returns the probable reason why the kernel refused `bytes` of memory to this process with ENOMEM, and what to do about it. The
/// reason is the first limit that leaves less than `bytes`.
pub fn memory_remedy(root: &Path, bytes: usize) -> &'static str {
    let (files, limits, bytes) = (Files::below(root), process_limits(root), bytes as u64);
    let leaves_less = |limit: Option<u64>, used: Option<u64>| {
        limit.zip(used).is_some_and(|(limit, used)| limit.saturating_sub(used) < bytes)
    };
    let status = files.read("/proc/self/status").unwrap_or_default();
    let used = |key| field(&status, key)?.checked_mul(1024);
    if leaves_less(limits.address_bytes, used("VmSize:")) {
        return ADDRESSES;
    }
    if used("VmSize:").is_some_and(|used_bytes| used_bytes > NEARLY_ALL_ADDRESSES) {
        return ADDRESS_SPACE;
    }
    if leaves_less(limits.data_bytes, used("VmData:")) {
        return DATA;
    }
    if files.number("/proc/sys/vm/overcommit_memory") == Some(2) {
        let meminfo = files.read("/proc/meminfo").unwrap_or_default();
        let bytes_of = |key| field(&meminfo, key)?.checked_mul(1024);
        if leaves_less(bytes_of("CommitLimit:"), bytes_of("Committed_AS:")) {
            return OVERCOMMIT;
        }
    }
    if let Some(memory) = memory::memory(root).filter(|memory| memory.available_bytes < bytes) {
        return match memory.origin {
            LimitOrigin::Cgroup(_) => CGROUP,
            LimitOrigin::Machine => MACHINE,
        };
    }
    // A call may split one mapping into three, so it may need two more.
    let is_full = mapping_use(root).is_some_and(|MappingUse { used, limit }| used + 2 >= limit);
    if is_full { MAPPINGS } else { UNKNOWN }
}

/// The number of mappings of this process, and its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappingUse {
    pub used: u64,
    /// `vm.max_map_count`.
    pub limit: u64,
}

/// Counts the mappings of this process. Returns `None` if the kernel does not show both the mappings and the limit. Takes
/// milliseconds if there are many mappings.
pub fn mapping_use(root: &Path) -> Option<MappingUse> {
    let files = Files::below(root);
    let limit = files.number("/proc/sys/vm/max_map_count")?;
    let used = files.read("/proc/self/maps")?.lines().count() as u64;
    Some(MappingUse { used, limit })
}

/// Returns the bytes that this process has locked.
pub fn locked_bytes(root: &Path) -> Option<u64> {
    field(&Files::below(root).read("/proc/self/status")?, "VmLck:")?.checked_mul(1024)
}

/// Memory settings of the machine other than limits: huge pages, overcommit, swap, containers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryRules {
    /// The selected word in `transparent_hugepage/enabled`: `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
    /// `vm.overcommit_memory`.
    pub overcommit: Option<u64>,
    pub swap_bytes: Option<u64>,
    pub max_mappings: Option<u64>,
    /// The file or variable that shows that this process runs in a container, if there is one.
    pub container: Option<&'static str>,
}

pub fn memory_rules(root: &Path) -> MemoryRules {
    let files = Files::below(root);
    let enabled = files.read("/sys/kernel/mm/transparent_hugepage/enabled");
    let chosen = |text: String| text.split_once('[')?.1.split_once(']').map(|(word, _)| word.to_owned());
    let environ =
        || files.read("/proc/1/environ").is_some_and(|text| text.split('\0').any(|of| of.starts_with("container=")));
    let signs = [
        ("/.dockerenv", root.join(".dockerenv").exists()),
        ("/run/.containerenv", root.join("run/.containerenv").exists()),
        ("KUBERNETES_SERVICE_HOST", root == Path::new("/") && std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()),
    ];
    let container = signs.into_iter().find_map(|(sign, found)| found.then_some(sign));
    MemoryRules {
        huge_pages: enabled.and_then(chosen),
        overcommit: files.number("/proc/sys/vm/overcommit_memory"),
        swap_bytes: files.read("/proc/meminfo").and_then(|text| field(&text, "SwapTotal:")?.checked_mul(1024)),
        max_mappings: files.number("/proc/sys/vm/max_map_count"),
        container: container.or_else(|| environ().then_some("/proc/1/environ")),
    }
}

/// Returns the branch of the NVIDIA kernel module, such as 580 for `580.159.04`; `None` if the module is not loaded.
pub fn nvidia_branch(root: &Path) -> Option<u32> {
    Files::below(root).read("/sys/module/nvidia/version")?.trim().split('.').next()?.parse().ok()
}

/// Returns the paths at which the kernel shows NVIDIA GPUs to this process, whether or not there is a driver library.
pub fn nvidia_devices(root: &Path) -> Vec<String> {
    let entries = |folder: &str| {
        let read = std::fs::read_dir(root.join(folder.trim_start_matches('/')));
        let names = read.into_iter().flatten().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.collect::<Vec<_>>()
    };
    let is_device = |name: &String| name.strip_prefix("nvidia").is_some_and(|number| number.parse::<u32>().is_ok());
    let nodes = entries("/dev").into_iter().filter(is_device).map(|name| format!("/dev/{name}"));
    let buses = entries("/proc/driver/nvidia/gpus").into_iter().map(|bus| format!("/proc/driver/nvidia/gpus/{bus}"));
    let mut found: Vec<_> = nodes.chain(buses).collect();
    found.sort();
    found
}

#[cfg(all(test, not(miri)))] // Files only: no unsafe code to check.
mod tests {
    use super::super::files::tree;
    use super::*;

    const MEMINFO: &str =
        "MemTotal: 1024000 kB\nMemAvailable: 819200 kB\nCommitLimit: 500000 kB\nCommitted_AS: 499000 kB\n";
    const STATUS: &str = "VmSize:\t   40960 kB\nVmLck:\t  8 kB\nVmData:\t 10240 kB\n";
    const MIB: usize = 1 << 20;

    fn limits(address: &str, data: &str) -> String {
        format!(
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max data size             {data}            unlimited            bytes     \n\
             Max processes             96365                96365                processes \n\
             Max open files            20000                20000                files     \n\
             Max locked memory         8388608              8388608              bytes     \n\
             Max address space         {address}            unlimited            bytes     \n"
        )
    }

    #[test]
    fn limits_are_read_and_unlimited_is_none() {
        let root = tree::of(&[("/proc/self/limits", limits("unlimited", "12345"))]);
        let found = process_limits(root.path());
        assert_eq!((found.locked_bytes, found.address_bytes, found.data_bytes), (Some(8 << 20), None, Some(12345)));
        assert_eq!((found.open_files, found.threads), (Some(20000), Some(96365)));
        assert_eq!(process_limits(Path::new("/nowhere")), ProcessLimits::default());
    }

    #[test]
    fn the_remedy_matches_the_limit_that_refused() {
        let none = limits("unlimited", "unlimited");
        let group = [
            ("/proc/self/cgroup", "0::/app\n"),
            tree::V2,
            ("/sys/fs/cgroup/app/memory.max", "104857600"),
            ("/sys/fs/cgroup/app/memory.current", "94371840"),
        ];
        let many: String = "1000-2000 rw-p 00000000 00:00 0\n".repeat(30);
        let small = 64 << 10;
        for (bytes, limits, extra, remedy) in [
            (MIB, none.clone(), vec![], UNKNOWN),
            // 40 MiB of addresses are in use; the limits are 41 and 42 MiB.
            (2 * MIB, limits("42991616", "unlimited"), vec![], ADDRESSES),
            (MIB, limits("44040192", "unlimited"), vec![], UNKNOWN),
            (2 * MIB, limits("unlimited", "11534336"), vec![], DATA),
            (2 * MIB, none.clone(), vec![("/proc/sys/vm/overcommit_memory", "2\n")], OVERCOMMIT),
            (2 * MIB, none.clone(), vec![("/proc/sys/vm/overcommit_memory", "0\n")], UNKNOWN),
            (small, none.clone(), vec![("/proc/sys/vm/overcommit_memory", "2\n")], UNKNOWN),
            (11 * MIB, none.clone(), group.to_vec(), CGROUP),
            (9 * MIB, none.clone(), group.to_vec(), UNKNOWN),
            (801 * MIB, none.clone(), vec![], MACHINE),
            (MIB, none.clone(), vec![("/proc/sys/vm/max_map_count", "31"), ("/proc/self/maps", &many)], MAPPINGS),
            (MIB, none.clone(), vec![("/proc/sys/vm/max_map_count", "65530"), ("/proc/self/maps", &many)], UNKNOWN),
        ] {
            let fixed =
                [("/proc/self/limits", limits.as_str()), ("/proc/self/status", STATUS), ("/proc/meminfo", MEMINFO)];
            let files: Vec<_> = fixed.into_iter().chain(extra.iter().copied()).collect();
            assert_eq!(memory_remedy(tree::of(&files).path(), bytes), remedy, "{bytes} B, {limits}, {extra:?}");
        }
        assert_eq!(memory_remedy(Path::new("/nowhere"), 1), UNKNOWN);
        let used_up = format!("VmSize:\t {} kB\n", (NEARLY_ALL_ADDRESSES >> 10) + 1);
        assert_eq!(memory_remedy(tree::of(&[("/proc/self/status", used_up)]).path(), MIB), ADDRESS_SPACE);
    }

    #[test]
    fn rules_and_signs_of_devices_are_read() {
        let root = tree::of(&[
            ("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("/proc/sys/vm/overcommit_memory", "1\n"),
            ("/proc/meminfo", "SwapTotal: 4 kB\n"),
            ("/.dockerenv", ""),
            ("/dev/nvidia0", ""),
            ("/dev/nvidiactl", ""),
            ("/proc/driver/nvidia/gpus/0000:3b:00.0/information", ""),
        ]);
        let rules = memory_rules(root.path());
        assert_eq!(rules.huge_pages.as_deref(), Some("madvise"));
        assert_eq!((rules.overcommit, rules.swap_bytes), (Some(1), Some(4096)));
        assert_eq!((rules.container, rules.max_mappings), (Some("/.dockerenv"), None));
        assert_eq!(nvidia_devices(root.path()), ["/dev/nvidia0", "/proc/driver/nvidia/gpus/0000:3b:00.0"]);
        assert_eq!(memory_rules(Path::new("/nowhere")), MemoryRules::default());
        assert!(nvidia_devices(Path::new("/nowhere")).is_empty());
    }
}
