//! The cgroups of this process, from its own up to the highest visible one, and the contents of their files.
//!
//! ```text
//!   /proc/self/cgroup     0::/app/worker                      the group's path in its hierarchy
//!   /proc/self/mountinfo  .. / /sys/fs/cgroup .. cgroup2      the mount point of that hierarchy, and the group at its root
//!                            ▼
//!   /sys/fs/cgroup/app/worker, /sys/fs/cgroup/app, /sys/fs/cgroup
//! ```
//!
//! The limits of all groups in a chain apply. There are up to two chains: version 2, and version 1 with the `memory` controller.
//! If both versions are mounted, the controller is in one of them, and the groups of the other version have no limits.
//!
//! In a container the path may name groups that are not mounted there, and in a namespace the mount's root may be named from
//! outside (`/..`). Such a path cannot be followed, so the container's mount point is used in place of the process's own group.
//!
//! | | version 2 | version 1 |
//! | --- | --- | --- |
//! | limits | `memory.max`, `memory.high` | `memory.limit_in_bytes`, `hierarchical_memory_limit` of `memory.stat` |
//! | used | `memory.current` | `memory.usage_in_bytes` |
//! | page cache | `inactive_file`, `active_file` | `total_inactive_file`, `total_active_file` |
//! | limit hits | `memory.events.local`, else `memory.events` | `memory.failcnt` |
//!
//! `memory.high` counts as a limit: above it the kernel slows every allocation down until memory is reclaimed, and pinned
//! memory cannot be reclaimed.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use super::files::{Files, field};

/// The version of the kernel's cgroup interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CgroupVersion {
    V1,
    V2,
}

/// A directory of a cgroup hierarchy.
#[derive(Debug, Clone)]
pub(super) struct Cgroup {
    pub(super) version: CgroupVersion,
    pub(super) dir: PathBuf,
}

/// The most memory that a group may use, and the file that sets it.
#[derive(Debug)]
pub(super) struct GroupLimit {
    pub(super) bytes: u64,
    pub(super) file: PathBuf,
}

/// The number of times that a group hit its limits since it was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct LimitHits {
    /// Allocations that hit a limit, so that the kernel reclaimed memory first.
    pub(super) reclaimed: u64,
    /// Allocations for which reclaiming freed nothing.
    pub(super) out_of_memory: u64,
}

impl Cgroup {
    /// Returns the group's tightest limit. An unlimited group has no limit in version 2, and a limit that no machine reaches in
    /// version 1.
    pub(super) fn limit(&self, files: &Files) -> Option<GroupLimit> {
        let from_file = |name| Some(GroupLimit { bytes: files.number(self.file(name))?, file: self.file(name) });
        let limits = match self.version {
            CgroupVersion::V2 => [from_file("memory.max"), from_file("memory.high")],
            // The hierarchical limit covers ancestors that are not mounted here.
            CgroupVersion::V1 => [from_file("memory.limit_in_bytes"), self.hierarchical_limit(files)],
        };
        limits.into_iter().flatten().min_by_key(|limit| limit.bytes)
    }

    fn hierarchical_limit(&self, files: &Files) -> Option<GroupLimit> {
        let file = self.file("memory.stat");
        Some(GroupLimit { bytes: field(&files.read(&file)?, "hierarchical_memory_limit")?, file })
    }

    /// Returns the bytes that are left under `limit` once all droppable page cache is dropped.
    pub(super) fn available_bytes(&self, files: &Files, limit: &GroupLimit) -> u64 {
        let usage = match self.version {
            CgroupVersion::V1 => "memory.usage_in_bytes",
            CgroupVersion::V2 => "memory.current",
        };
        let used = files.number(self.file(usage)).unwrap_or(0);
        let stat = files.read(self.file("memory.stat")).unwrap_or_default();
        limit.bytes.saturating_sub(used.saturating_sub(self.droppable_bytes(&stat)))
    }

    /// Returns the bytes of file pages, except pages that must be written first. The kernel counts locked pages and shared memory
    /// separately.
    fn droppable_bytes(&self, stat: &str) -> u64 {
        let [inactive, active, dirty, writeback] = match self.version {
            CgroupVersion::V1 => ["total_inactive_file", "total_active_file", "total_dirty", "total_writeback"],
            CgroupVersion::V2 => ["inactive_file", "active_file", "file_dirty", "file_writeback"],
        };
        let bytes = |key| field(stat, key).unwrap_or(0);
        let cached = bytes(inactive).saturating_add(bytes(active));
        cached.saturating_sub(bytes(dirty).saturating_add(bytes(writeback)))
    }

    /// Returns how often this group's own limits were hit; `None` if the kernel does not count the hits.
    pub(super) fn limit_hits(&self, files: &Files) -> Option<LimitHits> {
        if self.version == CgroupVersion::V1 {
            let reclaimed = files.number(self.file("memory.failcnt"))?;
            return Some(LimitHits { reclaimed, out_of_memory: 0 });
        }
        // `memory.events` also counts hits of the limits of descendants, but before Linux 5.2 there is no other file.
        let events = files.read(self.file("memory.events.local")).or_else(|| files.read(self.file("memory.events")))?;
        let count = |key| field(&events, key).unwrap_or(0);
        Some(LimitHits { reclaimed: count("max").saturating_add(count("high")), out_of_memory: count("oom") })
    }

    /// Returns whether the memory of descendants counts in this group: always in version 2, and in version 1 since Linux 5.11.
    pub(super) fn accounts_descendants(&self, files: &Files) -> bool {
        self.version == CgroupVersion::V2 || files.number(self.file("memory.use_hierarchy")) != Some(0)
    }

    pub(super) fn file(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.join(name)
    }
}

/// Returns the groups that contain this process and may account its memory. Each chain begins with the process's own group,
/// followed by its ancestors.
pub(super) fn groups(files: &Files) -> Vec<Cgroup> {
    let memberships = files.read("/proc/self/cgroup").unwrap_or_default();
    let mounts = files.read("/proc/self/mountinfo").unwrap_or_default();
    let mounts: Vec<CgroupMount> = mounts.lines().filter_map(CgroupMount::parse).collect();
    memberships.lines().filter_map(Membership::parse).flat_map(|membership| membership.chain(&mounts, files)).collect()
}

/// Maximum length of a group's path. The kernel opens no longer path (`PATH_MAX`), and a chain stores a path for each of its
/// levels.
const PATH_BYTES_MAX: usize = 4096;

/// A line of `/proc/self/cgroup`: `number:controllers:path`.
#[derive(Debug, PartialEq, Eq)]
struct Membership<'a> {
    version: CgroupVersion,
    path: &'a Path,
}

impl<'a> Membership<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut parts = line.splitn(3, ':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let version = match (number, controllers) {
            ("0", "") => CgroupVersion::V2,
            (_, controllers) if controllers.split(',').any(|name| name == "memory") => CgroupVersion::V1,
            _ => return None,
        };
        (path.starts_with('/') && path.len() <= PATH_BYTES_MAX).then(|| Self { version, path: Path::new(path) })
    }

    fn chain(&self, mounts: &[CgroupMount], files: &Files) -> Vec<Cgroup> {
        let mut candidates = mounts.iter().filter(|mount| mount.version == self.version);
        // Chooses the mount that shows the most ancestors. Of several such mounts, the last one hides the earlier ones.
        let shown = candidates.clone().filter_map(|mount| Some((mount, self.below(&mount.root)?)));
        let found = shown.rev().min_by_key(|(mount, _)| mount.root.components().count());
        let found = found.or_else(|| Some((candidates.next_back()?, Path::new(""))));
        let Some((mount, below)) = found else { return Vec::new() };

        let mut chain = Vec::new();
        for ancestor in below.ancestors() {
            let group = Cgroup { version: self.version, dir: mount.point.join(ancestor) };
            // A version 1 group can be set not to account its descendants. The process's own group comes first and always counts.
            if !chain.is_empty() && !group.accounts_descendants(files) {
                break;
            }
            chain.push(group);
        }
        chain
    }

    /// Returns the path below a mount's root; `None` if the path is not below the root, or contains `..`.
    fn below(&self, root: &Path) -> Option<&'a Path> {
        let below = self.path.strip_prefix(root).ok()?;
        below.components().all(|part| matches!(part, Component::Normal(_))).then_some(below)
    }
}

/// A line of `/proc/self/mountinfo` for a hierarchy that may account memory.
#[derive(Debug, PartialEq, Eq)]
struct CgroupMount {
    version: CgroupVersion,
    /// The group that is visible at the mount point.
    root: PathBuf,
    point: PathBuf,
}

impl CgroupMount {
    /// Parses `id parent device root point options [tags..] - type source super-options`.
    fn parse(line: &str) -> Option<Self> {
        let (location, filesystem) = line.split_once(" - ")?;
        let mut filesystem = filesystem.split(' ');
        let version = match (filesystem.next()?, filesystem.nth(1)) {
            ("cgroup2", _) => CgroupVersion::V2,
            ("cgroup", Some(options)) if options.split(',').any(|name| name == "memory") => CgroupVersion::V1,
            _ => return None,
        };
        let mut location = location.split(' ').skip(3);
        let (root, point) = (unescaped(location.next()?), unescaped(location.next()?));
        (root.is_absolute() && point.is_absolute()).then_some(Self { version, root, point })
    }
}

/// Reads a path in which the kernel wrote blanks, line ends and backslashes as `\` and three octal digits.
fn unescaped(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal = match tail {
            &[a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] if first == b'\\' => {
                Some((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'))
            }
            _ => None,
        };
        bytes.push(octal.unwrap_or(first));
        rest = if octal.is_some() { &tail[3..] } else { tail };
    }
    OsString::from_vec(bytes).into()
}

#[cfg(all(test, not(miri)))] // Files only: no unsafe code to check.
mod tests {
    use proptest::prelude::*;

    use super::super::files::tree;
    use super::*;

    fn dirs(cgroup: &str, mountinfo: &str) -> Vec<String> {
        let root = tree::of(&[("/proc/self/cgroup", cgroup), ("/proc/self/mountinfo", mountinfo)]);
        groups(&Files::below(root.path())).iter().map(|group| group.dir.display().to_string()).collect()
    }

    const V2: &str = "30 23 0:26 / /v2 rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "35 31 0:32 / /v1 rw,relatime - cgroup cgroup rw,memory\n";

    #[test]
    fn a_chain_goes_from_the_own_group_to_the_mount_point() {
        let subtree = "30 23 0:26 /docker/ab /v1 ro - cgroup cgroup rw,memory\n";
        let outside = "30 23 0:26 /.. /v2 rw - cgroup2 cgroup2 rw\n";
        let elsewhere = "30 23 0:26 /docker/ab /cg rw - cgroup2 cgroup2 rw\n";
        let twice = format!("{V2}{}", V2.replace("/v2", "/cg"));
        let cpu = "32 31 0:29 / /cpu rw - cgroup cgroup rw,cpu\n";
        for (case, cgroup, mountinfo, chain) in [
            ("every ancestor", "0::/app/worker\n", V2, "/v2/app/worker /v2/app /v2/"),
            ("the root", "0::/\n", V2, "/v2/"),
            ("the mount of a subtree", "4:memory:/docker/ab\n", subtree, "/v1/"),
            ("below the mount of a subtree", "4:memory:/docker/ab/x\n", subtree, "/v1/x /v1/"),
            ("the wider view wins", "4:memory:/docker/ab\n", &[subtree, V1].concat(), "/v1/docker/ab /v1/docker /v1/"),
            ("of mounts that show the same the last lies on top", "0::/app\n", &twice, "/cg/app /cg/"),
            ("a root named from outside", "0::/\n", outside, "/v2/"),
            ("a path that leads outside", "0::/../sibling\n", V2, "/v2/"),
            ("both", "0::/../a/b\n", &outside.replace("/..", "/../a"), "/v2/b /v2/"),
            ("a path that is not mounted", "0::/user.slice\n", elsewhere, "/cg/"),
            ("hybrid", "5:devices:/\n4:memory:/app\n1:cpu:/\n0::/\n", &[cpu, V1, V2].concat(), "/v1/app /v1/ /v2/"),
            ("no groups", "", "", ""),
            ("no mounts", "0::/app\n", "", ""),
            ("no membership", "", V2, ""),
            ("no mount of its version", "4:memory:/app\n", V2, ""),
        ] {
            assert_eq!(dirs(cgroup, mountinfo).join(" "), chain, "{case}");
        }
        assert!(groups(&Files::below(Path::new("/nowhere"))).is_empty());
    }

    #[test]
    fn version_1_ends_where_a_group_does_not_account_its_children() {
        let root = tree::of(&[
            ("/proc/self/cgroup", "4:hugetlb,memory:/a/b/c\n"),
            ("/proc/self/mountinfo", V1),
            // The file of the process's own group concerns only its descendants.
            ("/v1/a/b/c/memory.use_hierarchy", "0"),
            ("/v1/a/b/memory.use_hierarchy", "1"),
            ("/v1/a/memory.use_hierarchy", "0"),
        ]);
        let found = groups(&Files::below(root.path()));
        let found: Vec<_> = found.iter().map(|group| group.dir.as_path()).collect();
        assert_eq!(found, [Path::new("/v1/a/b/c"), Path::new("/v1/a/b")]);
    }

    #[test]
    fn escaped_paths_are_read_back() {
        for (escaped, plain) in [("/a\\040b", "/a b"), ("/a\\134", "/a\\"), ("/\\04", "/\\04"), ("/\\999", "/\\999")] {
            assert_eq!(unescaped(escaped), Path::new(plain));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

        #[test]
        fn malformed_files_give_only_absolute_paths(cgroup in "(0::|4:memory:)?[/.a-c:, \\\\0-7\n-]{0,60}", mounts in "[/ .a-c\\\\0-7\n-]{0,80}( - cgroup2? c rw,memory)?") {
            for dir in dirs(&cgroup, &mounts) {
                prop_assert!(dir.starts_with('/'));
            }
        }

        #[test]
        fn a_truncated_mount_table_gives_whole_chains_or_none(cut in 0..V2.len() + V1.len()) {
            let whole = format!("{V2}{V1}");
            let found = dirs("4:memory:/app\n0::/app\n", &whole[..cut]);
            prop_assert!(matches!(found.len(), 0 | 2 | 4));
        }
    }
}
