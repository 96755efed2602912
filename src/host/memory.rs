//! How much memory this process may use: the machine's, or the tightest limit of the control groups that hold it.
//!
//! - `total` is the least of the machine's memory and all limits. A limit at or above the machine's size is ignored.
//! - `available` is the least of what the machine and each limited group have left. It may come from another group than
//!   `total`: a wide group can be full while a narrow one inside it is empty.
//! - Page cache that can be dropped counts as available, as in the kernel's own `MemAvailable`.

use std::fmt;
use std::path::{Path, PathBuf};

use super::control_group;
use super::files::{Files, field};

/// Memory that this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostMemory {
    /// All of it.
    pub(crate) total_bytes: u64,
    /// What is free or can be reclaimed now; at most the total.
    pub(crate) available_bytes: u64,
    /// The limit that sets the total.
    pub(crate) origin: LimitOrigin,
}

/// Where the total comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LimitOrigin {
    /// A control group's file.
    Cgroup(PathBuf),
    /// The machine.
    Machine,
}

impl fmt::Display for LimitOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cgroup(file) => write!(f, "cgroup limit {}", file.display()),
            Self::Machine => f.write_str("machine"),
        }
    }
}

/// Memory that this process may use, read below `root`; `None` where `/proc/meminfo` has no total.
pub(crate) fn memory(root: &Path) -> Option<HostMemory> {
    let files = Files::below(root);
    let machine = machine(&files)?;
    let mut memory = machine.clone();
    for group in control_group::groups(&files) {
        let Some(limit) = group.limit(&files).filter(|limit| limit.bytes < machine.total_bytes) else { continue };
        memory.available_bytes = memory.available_bytes.min(group.available_bytes(&files, &limit));
        // Of equal limits the one nearest to the process is reported.
        if limit.bytes < memory.total_bytes {
            memory.total_bytes = limit.bytes;
            memory.origin = LimitOrigin::Cgroup(limit.file);
        }
    }
    Some(memory)
}

/// The machine's memory without any limit of a control group.
pub(super) fn machine(files: &Files) -> Option<HostMemory> {
    let text = files.read("/proc/meminfo")?;
    let bytes = |key| field(&text, key)?.checked_mul(1024);
    let total_bytes = bytes("MemTotal:")?;
    // Linux before 3.14 has no `MemAvailable`.
    let free_and_cached = || {
        let cached = bytes("Cached:")?.saturating_sub(bytes("Shmem:").unwrap_or(0));
        bytes("MemFree:")?.checked_add(cached)
    };
    let available_bytes = bytes("MemAvailable:").or_else(free_and_cached).unwrap_or(total_bytes);
    Some(HostMemory { total_bytes, available_bytes: available_bytes.min(total_bytes), origin: LimitOrigin::Machine })
}

#[cfg(all(test, not(miri)))] // Files only: no unsafe code to look at.
mod tests {
    use proptest::prelude::*;

    use super::super::files::tree;
    use super::*;

    const MIB: u64 = 1 << 20;
    /// 1,000 MiB, of which 800 are available.
    const MEMINFO: (&str, &str) =
        ("/proc/meminfo", "MemTotal:  1024000 kB\nMemFree: 102400 kB\nMemAvailable: 819200 kB\n");
    const V2: (&str, &str) = ("/proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
    const V1: (&str, &str) =
        ("/proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
    const UNLIMITED_V1: &str = "9223372036854771712\n";

    fn seen(files: &[(&str, &str)]) -> (u64, u64, String) {
        in_mib(&memory(tree::of(files).path()).unwrap())
    }

    fn seen_in(group: &str, files: &[(&str, &str)]) -> (u64, u64, String) {
        in_mib(&memory_in(group, files))
    }

    fn in_mib(memory: &HostMemory) -> (u64, u64, String) {
        (memory.total_bytes / MIB, memory.available_bytes / MIB, memory.origin.to_string())
    }

    /// The memory of a process in the group `group` of version 2, with files named below `/sys/fs/cgroup`.
    fn memory_in(group: &str, files: &[(&str, &str)]) -> HostMemory {
        let membership = format!("0::{group}\n");
        let files: Vec<_> = files.iter().map(|(path, text)| (format!("/sys/fs/cgroup{path}"), *text)).collect();
        let mut all = vec![MEMINFO, V2, ("/proc/self/cgroup", membership.as_str())];
        all.extend(files.iter().map(|(path, text)| (path.as_str(), *text)));
        memory(tree::of(&all).path()).unwrap()
    }

    fn mib(count: u64) -> String {
        format!("{}\n", count * MIB)
    }

    #[test]
    fn without_control_groups_the_machine_sets_the_total() {
        assert_eq!(seen(&[MEMINFO]), (1000, 800, "machine".into()));
        let old = ("/proc/meminfo", "MemTotal: 1024000 kB\nMemFree: 102400 kB\nCached: 204800 kB\nShmem: 51200 kB\n");
        assert_eq!(seen(&[old]), (1000, 250, "machine".into()));
        assert_eq!(seen(&[("/proc/meminfo", "MemTotal: 1024000 kB")]), (1000, 1000, "machine".into()));
    }

    #[test]
    fn the_tightest_level_sets_the_total_and_the_fullest_what_is_available() {
        let worker = "/app/worker/memory.max";
        // Limit and use of the own group, limit and use of its parent; the total, what is available, and the file.
        for (own, own_used, parent, parent_used, total, available, file) in [
            ("200", 50, 600, 590, 200, 10, worker),
            ("200", 590, 600, 50, 200, 0, worker),
            ("max", 0, 300, 100, 300, 200, "/app/memory.max"),
        ] {
            let own = own.parse().map_or("max\n".to_owned(), mib);
            let files = [
                (worker, own.as_str()),
                ("/app/worker/memory.current", &mib(own_used)),
                ("/app/memory.max", &mib(parent)),
                ("/app/memory.current", &mib(parent_used)),
            ];
            let expected = (total, available, format!("cgroup limit /sys/fs/cgroup{file}"));
            assert_eq!(seen_in("/app/worker", &files), expected);
        }
    }

    #[test]
    fn in_a_namespace_the_root_of_the_mount_is_the_own_group() {
        let (limit, high, used) = (mib(300), mib(250), mib(100));
        for path in ["/", "/..", "/../other"] {
            let mut files = vec![("/memory.max", limit.as_str()), ("/memory.current", &used)];
            assert_eq!(seen_in(path, &files), (300, 200, "cgroup limit /sys/fs/cgroup/memory.max".into()), "{path}");
            files.push(("/memory.high", &high));
            assert_eq!(seen_in(path, &files), (250, 150, "cgroup limit /sys/fs/cgroup/memory.high".into()), "{path}");
        }
    }

    #[test]
    fn page_cache_that_can_be_dropped_is_not_used() {
        let [inactive, active, dirty, writeback] = [100, 50, 20, 10].map(mib);
        let stat = format!(
            "anon 1\ninactive_file {inactive}active_file {active}file_dirty {dirty}file_writeback {writeback}unevictable 99\n"
        );
        let full = mib(400);
        let files = [("/app/memory.max", full.as_str()), ("/app/memory.current", &full), ("/app/memory.stat", &stat)];
        assert_eq!(seen_in("/app", &files).1, 120);
    }

    #[test]
    fn a_limit_of_the_machines_size_or_more_is_none() {
        let all = mib(1000);
        for limit in [mib(1000), mib(1001), UNLIMITED_V1.into(), "max\n".into(), "18446744073709551616\n".into()] {
            let files = [("/app/memory.max", limit.as_str()), ("/app/memory.current", &all)];
            assert_eq!(seen_in("/app", &files), (1000, 800, "machine".into()), "{limit}");
        }
    }

    #[test]
    fn version_1_includes_the_limits_of_its_ancestors() {
        let (limit, used) = (mib(500), mib(300));
        let stat = |hierarchical: u64| {
            format!(
                "inactive_file 7\nactive_file 7\nhierarchical_memory_limit {}\ntotal_inactive_file {}\n\
                 total_active_file {}\ntotal_dirty {}\n",
                hierarchical * MIB,
                60 * MIB,
                50 * MIB,
                10 * MIB
            )
        };
        let (same, tighter) = (stat(500), stat(400));
        let mut app = vec![
            MEMINFO,
            V1,
            ("/proc/self/cgroup", "7:cpu,cpuacct:/\n4:memory:/docker/ab\n"),
            ("/sys/fs/cgroup/memory/docker/ab/memory.limit_in_bytes", &limit),
            ("/sys/fs/cgroup/memory/docker/ab/memory.usage_in_bytes", &used),
            ("/sys/fs/cgroup/memory/docker/ab/memory.stat", &same),
            ("/sys/fs/cgroup/memory/docker/memory.limit_in_bytes", UNLIMITED_V1),
        ];
        let at = "cgroup limit /sys/fs/cgroup/memory/docker/ab";
        assert_eq!(seen(&app), (500, 300, format!("{at}/memory.limit_in_bytes")));
        app[5].1 = &tighter;
        assert_eq!(seen(&app), (400, 200, format!("{at}/memory.stat")));
    }

    #[test]
    fn hybrid_takes_the_limit_from_where_the_controller_is() {
        let mounts = format!("{}41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n", V1.1);
        let (limit, used) = (mib(500), mib(300));
        let mut app = vec![
            MEMINFO,
            ("/proc/self/mountinfo", mounts.as_str()),
            ("/proc/self/cgroup", "4:memory:/app\n0::/app\n"),
            ("/sys/fs/cgroup/unified/app/cgroup.procs", "1\n"),
            ("/sys/fs/cgroup/memory/app/memory.limit_in_bytes", UNLIMITED_V1),
            ("/sys/fs/cgroup/memory/app/memory.usage_in_bytes", &used),
        ];
        assert_eq!(seen(&app), (1000, 800, "machine".into()));
        app[4].1 = &limit;
        assert_eq!(seen(&app), (500, 200, "cgroup limit /sys/fs/cgroup/memory/app/memory.limit_in_bytes".into()));
    }

    #[test]
    fn a_malformed_meminfo_gives_no_memory() {
        assert_eq!(memory(Path::new("/nowhere")), None);
        for text in ["", "MemTotal:", "MemTotal: x kB", "MemTotal: 18446744073709551615 kB"] {
            assert_eq!(memory(tree::of(&[("/proc/meminfo", text)]).path()), None, "{text}");
        }
    }

    #[test]
    fn this_machine_has_memory() {
        let seen = memory(Path::new("/")).unwrap();
        assert!(seen.total_bytes > 0 && seen.available_bytes <= seen.total_bytes, "{seen:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

        #[test]
        fn malformed_group_files_never_add_memory(
            limit in "[0-9a-z +-]{0,24}", used in "[0-9]{0,24}", key in "(in)?active_file|file_dirty|[a-z_]{0,9}", value in "[0-9x.-]{0,22}",
        ) {
            let stat = format!("{key} {value}");
            let files = [("/app/memory.max", limit.as_str()), ("/app/memory.current", &used), ("/app/memory.stat", &stat)];
            let memory = memory_in("/app", &files);
            prop_assert!(memory.total_bytes <= 1000 * MIB);
            prop_assert!(memory.available_bytes <= memory.total_bytes.min(800 * MIB));
        }
    }
}
