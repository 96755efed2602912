//! How much memory this process may use: the machine's memory, or the tightest limit of the cgroups that contain the process.
//!
//! - `total` is the least of the machine's memory and all limits. A limit at or above the machine's size is ignored.
//! - `available` is the least of what the machine and each limited group have left. It may come from another group than
//!   `total`: a wide group can be full while a narrow group inside it is empty.
//! - Page cache that can be dropped counts as available, as in the kernel's own `MemAvailable`.

use std::fmt;
use std::path::{Path, PathBuf};

use super::cgroup::{self, Cgroup, GroupLimit};
use super::files::Files;
#[cfg(target_os = "linux")]
use super::files::field;

/// Memory that this process may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostMemory {
    /// All memory that this process may use.
    pub total_bytes: u64,
    /// Bytes that are free or can be reclaimed now; at most the total.
    pub available_bytes: u64,
    /// The limit that sets the total.
    pub origin: LimitOrigin,
}

/// The origin of the total.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitOrigin {
    /// The limit in this file of a cgroup.
    Cgroup(PathBuf),
    /// The machine's memory.
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

/// Reads below `root` how much memory this process may use; `None` if `/proc/meminfo` has no total.
pub fn memory(root: &Path) -> Option<HostMemory> {
    MemoryGauge::open(root)?.read()
}

/// Reads repeatedly how much memory this process may use. The cgroups are determined once.
#[derive(Debug)]
pub struct MemoryGauge {
    files: Files,
    machine_bytes: u64,
    groups: Vec<Cgroup>,
}

impl MemoryGauge {
    /// Opens a gauge below `root`; `None` if `/proc/meminfo` has no total.
    pub fn open(root: &Path) -> Option<Self> {
        let files = Files::below(root);
        let machine_bytes = machine(&files)?.total_bytes;
        let groups = cgroup::groups(&files);
        Some(Self { files, machine_bytes, groups })
    }

    /// Returns the total and its origin. Reads two files for each group.
    pub fn limit(&self) -> (u64, LimitOrigin) {
        let mut least = (self.machine_bytes, LimitOrigin::Machine);
        for (_, limit) in self.limited() {
            // Of equal limits, the limit of the group nearest to the process is reported.
            if limit.bytes < least.0 {
                least = (limit.bytes, LimitOrigin::Cgroup(limit.file));
            }
        }
        least
    }

    /// Reads the total and the available bytes.
    pub fn read(&self) -> Option<HostMemory> {
        let mut available_bytes = machine(&self.files)?.available_bytes;
        for (group, limit) in self.limited() {
            available_bytes = available_bytes.min(group.available_bytes(&self.files, &limit));
        }
        let (total_bytes, origin) = self.limit();
        Some(HostMemory { total_bytes, available_bytes, origin })
    }

    /// Returns the groups with a limit below the machine's memory, the group nearest to the process first.
    fn limited(&self) -> impl Iterator<Item = (&Cgroup, GroupLimit)> {
        let limits = self.groups.iter().filter_map(|group| Some((group, group.limit(&self.files)?)));
        limits.filter(|(_, limit)| limit.bytes < self.machine_bytes)
    }
}

/// Reads the machine's memory, without cgroup limits.
#[cfg(target_os = "linux")]
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

/// Returns the machine's memory. Systems other than Linux report only the total.
#[cfg(not(target_os = "linux"))]
#[allow(unsafe_code)] // Calls libc.
pub(super) fn machine(_files: &Files) -> Option<HostMemory> {
    // SAFETY: the call takes a number and writes to no memory.
    let number = |name| u64::try_from(unsafe { libc::sysconf(name) }).ok();
    let total_bytes = number(libc::_SC_PHYS_PAGES)?.checked_mul(number(libc::_SC_PAGESIZE)?)?;
    Some(HostMemory { total_bytes, available_bytes: total_bytes, origin: LimitOrigin::Machine })
}

#[cfg(all(test, not(miri)))] // Files only: no unsafe code to check.
mod tests {
    use proptest::prelude::*;

    use super::super::files::tree::{self, V1, V2};
    use super::*;

    const MIB: u64 = 1 << 20;
    /// 1,000 MiB, 800 of them available.
    const MEMINFO: (&str, &str) =
        ("/proc/meminfo", "MemTotal:  1024000 kB\nMemFree: 102400 kB\nMemAvailable: 819200 kB\n");
    const MACHINE: &str = "1000 800 machine";

    /// Returns the memory of a process with these memberships, on a machine with `MEMINFO`, these mounts, and `path=content` of
    /// files below `/sys/fs/cgroup`: `,` ends a line, `:` is a blank, `M` represents MiB.
    fn memory_in(cgroup: &str, mounts: (&str, &str), files: &str) -> HostMemory {
        let word = |word: &str| {
            let mib = word.strip_suffix('M').and_then(|count| count.parse::<u64>().ok());
            mib.map_or(word.to_owned(), |count| (count * MIB).to_string())
        };
        let line = |line: &str| line.split(':').map(word).collect::<Vec<_>>().join(" ") + "\n";
        let fixed =
            [MEMINFO, mounts, ("/proc/self/cgroup", cgroup)].map(|(path, text)| (path.to_owned(), text.to_owned()));
        let groups = files.split(' ').map(|file| {
            let (path, content) = file.split_once('=').unwrap();
            (format!("/sys/fs/cgroup/{path}"), content.split(',').map(line).collect())
        });
        memory(tree::of(&fixed.into_iter().chain(groups).collect::<Vec<(String, String)>>()).path()).unwrap()
    }

    /// Returns the total MiB, the available MiB, and the origin of the total.
    fn text(memory: &HostMemory) -> String {
        format!("{} {} {}", memory.total_bytes / MIB, memory.available_bytes / MIB, memory.origin)
            .replace("cgroup limit /sys/fs/cgroup/", "")
    }

    #[test]
    fn without_cgroups_the_machine_sets_the_total() {
        let old = "MemTotal: 1024000 kB\nMemFree: 102400 kB\nCached: 204800 kB\nShmem: 51200 kB\n";
        for (meminfo, expected) in
            [(MEMINFO.1, MACHINE), (old, "1000 250 machine"), ("MemTotal: 1024000 kB", "1000 1000 machine")]
        {
            assert_eq!(text(&memory(tree::of(&[(MEMINFO.0, meminfo)]).path()).unwrap()), expected);
        }
    }

    #[test]
    fn version_2_takes_the_tightest_limit_and_the_fullest_group() {
        for (group, files, expected) in [
            // The tightest level sets the total, the fullest level the available bytes.
            (
                "/app/worker",
                "app/worker/memory.max=200M app/worker/memory.current=50M app/memory.max=600M app/memory.current=590M",
                "200 10 app/worker/memory.max",
            ),
            (
                "/app/worker",
                "app/worker/memory.max=200M app/worker/memory.current=590M app/memory.max=600M app/memory.current=50M",
                "200 0 app/worker/memory.max",
            ),
            (
                "/app/worker",
                "app/worker/memory.max=max app/worker/memory.current=0M app/memory.max=300M app/memory.current=100M",
                "300 200 app/memory.max",
            ),
            // Page cache that can be dropped is not used.
            (
                "/app",
                "app/memory.max=400M app/memory.current=400M app/memory.stat=anon:1,inactive_file:100M,active_file:50M,\
                 file_dirty:20M,file_writeback:10M,unevictable:99",
                "400 120 app/memory.max",
            ),
        ] {
            assert_eq!(text(&memory_in(&format!("0::{group}\n"), V2, files)), expected, "{files}");
        }
        // In a namespace the root of the mount is the process's own group.
        for path in ["/", "/..", "/../other"] {
            let seen = |files| text(&memory_in(&format!("0::{path}\n"), V2, files));
            assert_eq!(seen("memory.max=300M memory.current=100M"), "300 200 memory.max", "{path}");
            let high = "memory.max=300M memory.current=100M memory.high=250M";
            assert_eq!(seen(high), "250 150 memory.high", "{path}");
        }
        // A limit at or above the machine's memory is ignored.
        for limit in ["1000M", "1001M", "9223372036854771712", "max", "18446744073709551616"] {
            let files = format!("app/memory.max={limit} app/memory.current=1000M");
            assert_eq!(text(&memory_in("0::/app\n", V2, &files)), MACHINE, "{limit}");
        }
    }

    #[test]
    fn version_1_includes_the_limits_of_its_ancestors() {
        for (ancestors, expected) in [
            ("500M", "500 300 memory/docker/ab/memory.limit_in_bytes"),
            ("400M", "400 200 memory/docker/ab/memory.stat"),
        ] {
            let files = format!(
                "memory/docker/ab/memory.limit_in_bytes=500M memory/docker/ab/memory.usage_in_bytes=300M \
                 memory/docker/ab/memory.stat=inactive_file:7,active_file:7,hierarchical_memory_limit:{ancestors},\
                 total_inactive_file:60M,total_active_file:50M,total_dirty:10M \
                 memory/docker/memory.limit_in_bytes=9223372036854771712"
            );
            assert_eq!(text(&memory_in("7:cpu,cpuacct:/\n4:memory:/docker/ab\n", V1, &files)), expected);
        }
    }

    #[test]
    fn hybrid_takes_the_limit_from_where_the_controller_is() {
        let mounts = format!("{}41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n", V1.1);
        for (limit, expected) in
            [("9223372036854771712", MACHINE), ("500M", "500 200 memory/app/memory.limit_in_bytes")]
        {
            let files = format!(
                "unified/app/cgroup.procs=1 memory/app/memory.limit_in_bytes={limit} memory/app/memory.usage_in_bytes=300M"
            );
            assert_eq!(text(&memory_in("4:memory:/app\n0::/app\n", (V1.0, &mounts), &files)), expected);
        }
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
            let root = tree::of(&[
                MEMINFO,
                V2,
                ("/proc/self/cgroup", "0::/app\n"),
                ("/sys/fs/cgroup/app/memory.max", &limit),
                ("/sys/fs/cgroup/app/memory.current", &used),
                ("/sys/fs/cgroup/app/memory.stat", &format!("{key} {value}")),
            ]);
            let memory = memory(root.path()).unwrap();
            prop_assert!(memory.total_bytes <= 1000 * MIB);
            prop_assert!(memory.available_bytes <= memory.total_bytes.min(800 * MIB));
        }
    }
}
