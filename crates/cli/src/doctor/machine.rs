//! Checks of the machine: NUMA nodes, huge pages, limits, cgroups, memory pressure, the shared limit.

use std::path::Path;

use pinpool::SharedLimitChoice;
use pinpool::source::Source;
use pinpool::unstable::backend::{GRANULE_BYTES, lock_limit};
use pinpool::unstable::config::{Config, env};
use pinpool::unstable::{Finding, shared_limit};
use pinpool_observe::diagnosis::words::counted;
use pinpool_os::format::Size;
use pinpool_os::host::limits::{self, MemoryRules, ProcessLimits};
use pinpool_os::host::{self, HostMemory, LimitOrigin, PressureGauge};

/// A lower limit on open files or threads is a problem, because loaders typically need more.
const FEW: u64 = 256;

pub(super) fn examine(config: &Config, chosen: Option<&dyn Source>, max_bytes: Option<u64>) -> Vec<Finding> {
    let root = Path::new("/");
    let (rules, process) = (limits::memory_rules(root), limits::process_limits(root));
    let backend = chosen.map_or("", |source| source.name());
    vec![
        numa(&host::numa_nodes(root), chosen.and_then(|source| source.numa_node())),
        huge_pages(&rules),
        locked(&process, lock_limit(), backend),
        addresses(process.address_bytes, max_bytes),
        count("open-files", "ulimit -n", process.open_files),
        count("threads", "ulimit -u", process.threads),
        mappings(&rules, backend, max_bytes),
        available(host::memory(root).as_ref()),
        overcommit(&rules),
        pressure(PressureGauge::from_kernel(root).is_some()),
        shared_limit(config),
    ]
}

fn numa(nodes: &[u32], of_memory: Option<u32>) -> Finding {
    match (nodes, of_memory) {
        ([] | [_], _) => Finding::ok("numa", "one NUMA node"),
        (nodes, Some(node)) => Finding::ok("numa", format!("NUMA nodes {nodes:?}; memory is allocated on node {node}")),
        (nodes, None) => Finding::note("numa", format!("NUMA nodes {nodes:?}; the node of the GPU is unknown"))
            .remedy("set PINPOOL_NUMA_NODE to the GPU's node (nvidia-smi topo -m), or copies may be 30 % slower"),
    }
}

/// Returns a warning with this remedy if `is_problem`, otherwise a finding without a problem.
fn warn_if(is_problem: bool, check: &'static str, found: String, remedy: &str) -> Finding {
    if is_problem { Finding::warning(check, found).remedy(remedy) } else { Finding::ok(check, found) }
}

fn huge_pages(rules: &MemoryRules) -> Finding {
    const CHECK: &str = "huge-pages";
    let Some(word) = &rules.huge_pages else { return Finding::note(CHECK, "this kernel does not report its setting") };
    let found = format!("transparent_hugepage/enabled is {word}");
    const REMEDY: &str = "write madvise to /sys/kernel/mm/transparent_hugepage/enabled: 4 KiB pages pin slower";
    warn_if(word == "never", CHECK, found, REMEDY)
}

/// Checks `ulimit -l`, which applies to `mlock` only, not to memory that a driver pins.
fn locked(process: &ProcessLimits, binding: Option<u64>, backend: &str) -> Finding {
    const CHECK: &str = "locked-memory";
    let Some(limit) = process.locked_bytes.map(Size) else { return Finding::ok(CHECK, "unlimited (ulimit -l)") };
    let problem = match (binding, backend) {
        (None, _) => return Finding::ok(CHECK, format!("{limit} (ulimit -l); CAP_IPC_LOCK exempts this process")),
        (Some(_), "vmm" | "register" | "cuda") => {
            return Finding::ok(CHECK, format!("{limit} (ulimit -l); does not apply to memory pinned by the driver"));
        }
        (Some(_), "mlock") => "which is the limit of a pool",
        (Some(_), _) => "too little for mlock",
    };
    Finding::warning(CHECK, format!("{limit} (ulimit -l), {problem}"))
        .remedy("raise it (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=) or grant CAP_IPC_LOCK")
}

/// Checks the limit of the address space. A pool reserves addresses for its whole limit.
fn addresses(limit: Option<u64>, max_bytes: Option<u64>) -> Finding {
    let is_low = |limit: u64| max_bytes.is_none_or(|max_bytes| limit / 2 < max_bytes);
    let remedy = "a full pool needs more: raise it (`ulimit -v unlimited`) or lower PINPOOL_MAX_BYTES";
    ulimit("address-space", "ulimit -v", limit.map(|limit| (Size(limit).to_string(), is_low(limit))), remedy)
}

fn count(check: &'static str, how: &str, limit: Option<u64>) -> Finding {
    ulimit(check, how, limit.map(|limit| (limit.to_string(), limit < FEW)), &format!("raise it (`{how} 4096`)"))
}

/// Returns the finding for `limit`, which contains the limit and whether it is low, or `None` if there is no limit.
fn ulimit(check: &'static str, how: &str, limit: Option<(String, bool)>, remedy: &str) -> Finding {
    let (limit, is_low) = limit.unwrap_or_else(|| ("unlimited".to_owned(), false));
    warn_if(is_low, check, format!("{limit} ({how})"), remedy)
}

/// Checks the limit of memory mappings. The driver may map each granule separately.
fn mappings(rules: &MemoryRules, backend: &str, max_bytes: Option<u64>) -> Finding {
    const CHECK: &str = "mappings";
    let Some(limit) = rules.max_mappings else { return Finding::note(CHECK, "vm.max_map_count is unreadable") };
    let granules = max_bytes.unwrap_or(0) / GRANULE_BYTES as u64;
    let is_low = backend == "vmm" && granules > limit / 10 * 9;
    let remedy = format!("a full pool has {granules} granules: set vm.max_map_count to {} or more", granules * 2);
    warn_if(is_low, CHECK, format!("vm.max_map_count is {limit}"), &remedy)
}

fn available(memory: Option<&HostMemory>) -> Finding {
    const CHECK: &str = "memory";
    let Some(memory) = memory else {
        return Finding::warning(CHECK, "the memory of the machine is unknown (/proc/meminfo)")
            .remedy("set PINPOOL_MAX_BYTES: the default limit needs this number");
    };
    let origin = match &memory.origin {
        LimitOrigin::Cgroup(file) => format!(", the limit in {}", file.display()),
        LimitOrigin::Machine => "; no cgroup limit".to_owned(),
    };
    let [total, available] = [memory.total_bytes, memory.available_bytes].map(Size);
    let is_low = memory.available_bytes < memory.total_bytes / 16;
    let found = format!("{available} of {total} available{origin}");
    warn_if(is_low, CHECK, found, "free memory, or raise the limit of the cgroup")
}

fn overcommit(rules: &MemoryRules) -> Finding {
    const CHECK: &str = "overcommit";
    let Some(mode) = rules.overcommit else { return Finding::note(CHECK, "vm.overcommit_memory is unreadable") };
    const REMEDY: &str = "the kernel may refuse memory while some is free: set vm.overcommit_memory=0";
    warn_if(mode == 2, CHECK, format!("vm.overcommit_memory is {mode}"), REMEDY)
}

fn pressure(is_reported: bool) -> Finding {
    match is_reported {
        true => Finding::ok("pressure", "the kernel reports memory pressure (PSI)"),
        false => Finding::note("pressure", "no memory pressure reports (PSI): idle memory is released by timeout only")
            .remedy("boot the kernel with psi=1"),
    }
}

fn shared_limit(config: &Config) -> Finding {
    const CHECK: &str = "shared-limit";
    let name = match &config.ledger {
        SharedLimitChoice::None if env::is_one_of_several() => {
            let found = "none, but torchrun or Ray started several processes: each has a separate limit";
            return Finding::note(CHECK, found).remedy("set PINPOOL_LEDGER=auto to share one limit");
        }
        SharedLimitChoice::None => return Finding::ok(CHECK, "none: the limit applies to this process only"),
        SharedLimitChoice::Auto if !env::is_one_of_several() => {
            return Finding::ok(CHECK, "none: no sign of other processes of this job on the host");
        }
        name => name.to_string(),
    };
    match shared_limit::report(&name) {
        Ok(Some(report)) if !report.members.is_empty() => {
            let limit = report.max_bytes.map_or_else(|| "none".to_owned(), |bytes| Size(bytes).to_string());
            let (held, members) = (Size(report.held_bytes), counted(report.members.len() as u64, "pool"));
            Finding::ok(CHECK, format!("{name}: limit {limit}, {held} held by {members}"))
        }
        Ok(_) => Finding::ok(CHECK, format!("{name}: no pool yet; the first one sets the limit")),
        Err(error) => Finding::error(CHECK, error.to_string()),
    }
}
