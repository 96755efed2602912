//! The machine around the pool: nodes, huge pages, limits, control groups, pressure, swap.

use std::path::Path;

use pinpool::source::Source;
use pinpool::unstable::backend::GRANULE_BYTES;
use pinpool::unstable::backend::lock_limit;
use pinpool::unstable::config::{Config, LedgerName, env};
use pinpool::unstable::{Finding, Level, ledger};
use pinpool::{Backend, Pool};
use pinpool_cli::table::format_about;
use pinpool_os::host::limits::{self, MemoryRules, ProcessLimits};
use pinpool_os::host::{self, HostMemory, LimitOrigin, PressureGauge};

/// Fewer open files or threads than this are soon used up by a loader.
const FEW: u64 = 256;

/// Everything of the machine that a pool meets.
pub(super) fn examine(config: &Config, chosen: Option<&dyn Source>, max_bytes: Option<u64>) -> Vec<Finding> {
    let root = Path::new("/");
    let (rules, process, memory) = (limits::memory_rules(root), limits::process_limits(root), host::memory(root));
    let backend = chosen.map_or("", |source| source.name());
    vec![
        numa(&host::numa_nodes(root), chosen.and_then(|source| source.numa_node())),
        huge_pages(&rules),
        locked(&process, lock_limit(), backend),
        addresses(&process, max_bytes),
        count("open-files", "ulimit -n", process.open_files),
        count("threads", "ulimit -u", process.threads),
        mappings(&rules, backend, max_bytes),
        of_memory(memory.as_ref()),
        overcommit(&rules),
        swap(&rules, chosen.is_some_and(|source| source.is_pinned())),
        pressure(PressureGauge::of_kernel(root).is_some()),
        container(&rules),
        ledger(config, env::is_one_of_several()),
    ]
}

fn numa(nodes: &[u32], of_memory: Option<u32>) -> Finding {
    const CHECK: &str = "numa";
    match (nodes, of_memory) {
        ([] | [_], _) => Finding::ok(CHECK, "one NUMA node"),
        (nodes, Some(node)) => Finding::ok(CHECK, format!("NUMA nodes {nodes:?}, memory comes from node {node}")),
        (nodes, None) => Finding::note(CHECK, format!("NUMA nodes {nodes:?}, and none is known to be near the GPU"))
            .remedy(
                "set PINPOOL_NUMA_NODE to the node of the GPU (nvidia-smi topo -m), else copies may run 30 % slower",
            ),
    }
}

fn huge_pages(rules: &MemoryRules) -> Finding {
    const CHECK: &str = "huge-pages";
    match rules.huge_pages.as_deref() {
        Some("never") => {
            Finding::warning(CHECK, "transparent_hugepage/enabled is never: pages of 4 KiB take longer to pin")
                .remedy("write madvise to /sys/kernel/mm/transparent_hugepage/enabled")
        }
        Some(word) => Finding::ok(CHECK, format!("transparent_hugepage/enabled is {word}")),
        None => Finding::note(CHECK, "this kernel shows no setting of huge pages"),
    }
}

/// Whether this process shares its limit with others of the host, tried as a pool does.
fn ledger(config: &Config, is_one_of_several: bool) -> Finding {
    const CHECK: &str = "ledger";
    let name = match &config.ledger {
        LedgerName::Disabled if is_one_of_several => {
            let found = "torchrun or Ray runs this process as one of several, and each has a ceiling of its own";
            return Finding::note(CHECK, found)
                .remedy("set PINPOOL_LEDGER=auto, so that one ceiling holds for all of them");
        }
        LedgerName::Disabled => return Finding::ok(CHECK, "none: the ceiling is this process's alone"),
        LedgerName::Auto if !is_one_of_several => {
            return Finding::ok(CHECK, "none: nothing shows that this process is one of several on the host");
        }
        name => name.to_string(),
    };
    let builder = Pool::builder().without_env().backend(Backend::Heap).max_bytes(config.max_bytes);
    if let Err(error) = builder.background_thread(false).setting("PINPOOL_LEDGER", &name).build() {
        // A pool that does not name it is built without it.
        let level = if config.ledger == LedgerName::Auto { Level::Warning } else { Level::Error };
        return Finding::new(CHECK, level, error.to_string())
            .remedy("free space in /dev/shm, or set PINPOOL_LEDGER=none and a PINPOOL_MAX_BYTES for each process");
    }
    match ledger::report(&name) {
        Ok(Some(report)) if !report.owners.is_empty() => {
            let ceiling = report.max_bytes.map_or_else(|| "none".to_owned(), format_about);
            let (held, owners) = (format_about(report.held_bytes), report.owners.len());
            Finding::ok(CHECK, format!("{name}: ceiling {ceiling}, {owners} owners hold {held}"))
        }
        Ok(_) => Finding::ok(CHECK, format!("{name}: no owner yet; the first sets its ceiling")),
        Err(error) => Finding::error(CHECK, error.to_string()),
    }
}

/// `ulimit -l` binds `mlock` alone: what a driver pins does not count.
fn locked(process: &ProcessLimits, binding: Option<u64>, backend: &str) -> Finding {
    const CHECK: &str = "locked-memory";
    let Some(limit) = process.locked_bytes else { return Finding::ok(CHECK, "unlimited (ulimit -l)") };
    let limit = format_about(limit);
    match (binding, backend) {
        (None, _) => {
            Finding::ok(CHECK, format!("{limit} (ulimit -l), which does not bind this process (CAP_IPC_LOCK)"))
        }
        (Some(_), "vmm" | "register" | "cuda") => {
            Finding::ok(CHECK, format!("{limit} (ulimit -l), which does not count what the driver pins"))
        }
        (Some(_), "mlock") => Finding::warning(CHECK, format!("{limit} (ulimit -l), and so is the ceiling"))
            .remedy("raise it (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=) or grant CAP_IPC_LOCK"),
        (Some(_), _) => Finding::warning(CHECK, format!("{limit} (ulimit -l), too little for mlock"))
            .remedy("raise it (`ulimit -l`, LimitMEMLOCK=, --ulimit memlock=) or grant CAP_IPC_LOCK"),
    }
}

/// A pool reserves addresses for its whole ceiling.
fn addresses(process: &ProcessLimits, max_bytes: Option<u64>) -> Finding {
    const CHECK: &str = "address-space";
    match process.address_bytes {
        None => Finding::ok(CHECK, "unlimited (ulimit -v)"),
        Some(limit) if max_bytes.is_none_or(|max_bytes| limit / 2 < max_bytes) => {
            let found = format!("{} (ulimit -v), too little beside a full pool", format_about(limit));
            Finding::warning(CHECK, found).remedy("raise it (`ulimit -v unlimited`) or lower PINPOOL_MAX_BYTES")
        }
        Some(limit) => Finding::ok(CHECK, format!("{} (ulimit -v)", format_about(limit))),
    }
}

fn count(check: &'static str, how: &str, limit: Option<u64>) -> Finding {
    match limit {
        None => Finding::ok(check, format!("unlimited ({how})")),
        Some(limit) if limit < FEW => {
            Finding::warning(check, format!("{limit} ({how})")).remedy(format!("raise it (`{how} 4096`)"))
        }
        Some(limit) => Finding::ok(check, format!("{limit} ({how})")),
    }
}

/// The driver may map each granule by itself.
fn mappings(rules: &MemoryRules, backend: &str, max_bytes: Option<u64>) -> Finding {
    const CHECK: &str = "mappings";
    let Some(limit) = rules.max_mappings else { return Finding::note(CHECK, "vm.max_map_count cannot be read") };
    let granules = max_bytes.unwrap_or(0) / GRANULE_BYTES as u64;
    if backend == "vmm" && granules > limit / 10 * 9 {
        let found = format!("vm.max_map_count is {limit}, and a full pool has {granules} granules");
        return Finding::warning(CHECK, found).remedy(format!("set vm.max_map_count to {} or more", granules * 2));
    }
    Finding::ok(CHECK, format!("vm.max_map_count is {limit}"))
}

fn of_memory(memory: Option<&HostMemory>) -> Finding {
    const CHECK: &str = "memory";
    let Some(memory) = memory else {
        return Finding::warning(CHECK, "the memory of the machine is not known (/proc/meminfo)")
            .remedy("set PINPOOL_MAX_BYTES: there is no ceiling without it");
    };
    let [total, available] = [memory.total_bytes, memory.available_bytes].map(format_about);
    let found = match &memory.origin {
        LimitOrigin::Cgroup(file) => format!("{available} of {total} available, the limit of {}", file.display()),
        LimitOrigin::Machine => format!("{available} of {total} available; no cgroup sets less"),
    };
    if memory.available_bytes < memory.total_bytes / 16 {
        return Finding::warning(CHECK, found).remedy("free memory, or raise the limit of the cgroup");
    }
    Finding::ok(CHECK, found)
}

fn overcommit(rules: &MemoryRules) -> Finding {
    const CHECK: &str = "overcommit";
    match rules.overcommit {
        Some(2) => Finding::warning(CHECK, "vm.overcommit_memory is 2: memory may be refused while some is free")
            .remedy("set vm.overcommit_memory=0, or raise vm.overcommit_ratio"),
        Some(mode) => Finding::ok(CHECK, format!("vm.overcommit_memory is {mode}")),
        None => Finding::note(CHECK, "vm.overcommit_memory cannot be read"),
    }
}

fn swap(rules: &MemoryRules, is_pinned: bool) -> Finding {
    const CHECK: &str = "swap";
    match rules.swap_bytes {
        Some(0) => Finding::ok(CHECK, "none"),
        Some(bytes) if is_pinned => {
            Finding::ok(CHECK, format!("{}; pinned memory is never swapped", format_about(bytes)))
        }
        Some(bytes) => {
            Finding::note(CHECK, format!("{}, to which memory that is not pinned may go", format_about(bytes)))
        }
        None => Finding::note(CHECK, "cannot be read"),
    }
}

fn pressure(has_signs: bool) -> Finding {
    const CHECK: &str = "pressure";
    if has_signs {
        return Finding::ok(CHECK, "the kernel reports when memory is short");
    }
    Finding::note(CHECK, "the kernel does not report when memory is short: idle memory goes back by time alone")
        .remedy("start the kernel with psi=1")
}

fn container(rules: &MemoryRules) -> Finding {
    const CHECK: &str = "container";
    match rules.container {
        Some(sign) => Finding::note(CHECK, format!("in a container ({sign}): limits are those of the container")),
        None => Finding::ok(CHECK, "no sign of a container"),
    }
}
