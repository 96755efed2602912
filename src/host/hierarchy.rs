//! Which control groups hold this process: from its own up to the highest that is visible.
//!
//! ```text
//!   /proc/self/cgroup     0::/app/worker                      the group's path in its hierarchy
//!   /proc/self/mountinfo  .. / /sys/fs/cgroup .. cgroup2      where that hierarchy shows, and from which group down
//!                            ▼
//!   /sys/fs/cgroup/app/worker, /sys/fs/cgroup/app, /sys/fs/cgroup
//! ```
//!
//! A limit of any of them holds. There are up to two chains: version 2, and version 1 with the `memory` controller;
//! where both are mounted the controller is in one of them, and the groups of the other have no limits to tell.
//!
//! In a container the path may name groups that are not mounted there, and in a namespace the mount's root may be named
//! from outside (`/..`). Then the path cannot be followed, and the mount point, which is what the container was given,
//! stands for the process's own group.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use super::files::Files;
use super::group::{Group, Version};

/// The groups that hold this process and may account its memory, each chain from its own group upwards.
pub(super) fn groups(files: &Files) -> Vec<Group> {
    let memberships = files.read("/proc/self/cgroup").unwrap_or_default();
    let mounts = files.read("/proc/self/mountinfo").unwrap_or_default();
    let mounts: Vec<Mount> = mounts.lines().filter_map(Mount::parse).collect();
    memberships.lines().filter_map(Membership::parse).flat_map(|membership| membership.chain(&mounts, files)).collect()
}

/// A line of `/proc/self/cgroup`: `number:controllers:path`.
#[derive(Debug, PartialEq, Eq)]
struct Membership<'a> {
    version: Version,
    path: &'a Path,
}

impl<'a> Membership<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let mut parts = line.splitn(3, ':');
        let (number, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let version = match (number, controllers) {
            ("0", "") => Version::V2,
            (_, controllers) if controllers.split(',').any(|name| name == "memory") => Version::V1,
            _ => return None,
        };
        path.starts_with('/').then(|| Self { version, path: Path::new(path) })
    }

    fn chain(&self, mounts: &[Mount], files: &Files) -> Vec<Group> {
        let mut ours = mounts.iter().filter(|mount| mount.version == self.version);
        // The mount that shows most ancestors; the last of equals lies on top.
        let shown = ours.clone().filter_map(|mount| Some((mount, self.below(&mount.root)?)));
        let found = shown.rev().min_by_key(|(mount, _)| mount.root.components().count());
        let found = found.or_else(|| Some((ours.next_back()?, Path::new(""))));
        let Some((mount, below)) = found else { return Vec::new() };

        let mut chain = Vec::new();
        for ancestor in below.ancestors() {
            let group = Group { version: self.version, dir: mount.point.join(ancestor) };
            // A group of version 1 may not account what is below it; the first one that is asked is our own.
            if !chain.is_empty() && !group.accounts_descendants(files) {
                break;
            }
            chain.push(group);
        }
        chain
    }

    /// The path below a mount's root, where it leads through no `..`.
    fn below(&self, root: &Path) -> Option<&'a Path> {
        let below = self.path.strip_prefix(root).ok()?;
        below.components().all(|part| matches!(part, Component::Normal(_))).then_some(below)
    }
}

/// A line of `/proc/self/mountinfo` that mounts a hierarchy which may account memory.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    version: Version,
    /// The group that shows at the mount point.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// `id parent device root point options [tags..] - type source super-options`
    fn parse(line: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let version = match (kind.next()?, kind.nth(1)) {
            ("cgroup2", _) => Version::V2,
            ("cgroup", Some(options)) if options.split(',').any(|name| name == "memory") => Version::V1,
            _ => return None,
        };
        let mut place = place.split(' ').skip(3);
        let (root, point) = (unescaped(place.next()?), unescaped(place.next()?));
        (root.is_absolute() && point.is_absolute()).then_some(Self { version, root, point })
    }
}

/// The kernel writes blanks, line ends and backslashes in paths as `\` and three octal digits.
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

#[cfg(all(test, not(miri)))] // Files only: no unsafe code to look at.
mod tests {
    use proptest::prelude::*;

    use super::super::files::tree;
    use super::*;

    fn dirs(cgroup: &str, mountinfo: &str) -> Vec<String> {
        let root = tree::of(&[("/proc/self/cgroup", cgroup), ("/proc/self/mountinfo", mountinfo)]);
        groups(&Files::below(root.path())).iter().map(|group| group.dir.display().to_string()).collect()
    }

    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n";

    #[test]
    fn every_ancestor_up_to_the_mount_point_is_named() {
        assert_eq!(
            dirs("0::/app/worker\n", V2),
            ["/sys/fs/cgroup/app/worker", "/sys/fs/cgroup/app", "/sys/fs/cgroup/"]
        );
        assert_eq!(dirs("0::/\n", V2), ["/sys/fs/cgroup/"]);
    }

    #[test]
    fn a_mount_of_a_subtree_shows_what_is_below_it() {
        let subtree = "30 23 0:26 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        assert_eq!(dirs("4:memory:/docker/ab\n", subtree), ["/sys/fs/cgroup/memory/"]);
        assert_eq!(dirs("4:memory:/docker/ab/x\n", subtree), ["/sys/fs/cgroup/memory/x", "/sys/fs/cgroup/memory/"]);
        let both = format!("{subtree}{V1}");
        assert_eq!(dirs("4:memory:/docker/ab\n", &both)[0], "/sys/fs/cgroup/memory/docker/ab", "the wider view wins");
    }

    #[test]
    fn of_mounts_that_show_the_same_the_last_lies_on_top() {
        let two = format!("{V2}{}", V2.replace("/sys/fs/cgroup", "/cg"));
        assert_eq!(dirs("0::/app\n", &two)[0], "/cg/app");
    }

    #[test]
    fn a_path_that_cannot_be_followed_ends_at_the_mount_point() {
        let outside = "30 23 0:26 /.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(dirs("0::/\n", outside), ["/sys/fs/cgroup/"]);
        assert_eq!(dirs("0::/../sibling\n", V2), ["/sys/fs/cgroup/"]);
        assert_eq!(dirs("0::/../a/b\n", &outside.replace("/..", "/../a")), ["/sys/fs/cgroup/b", "/sys/fs/cgroup/"]);
        let elsewhere = "30 23 0:26 /docker/ab /cg rw - cgroup2 cgroup2 rw\n";
        assert_eq!(dirs("0::/user.slice\n", elsewhere), ["/cg/"]);
    }

    #[test]
    fn hybrid_mounts_give_both_chains() {
        let unified = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let cpu = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        assert_eq!(
            dirs("5:devices:/\n4:memory:/app\n1:cpu:/\n0::/\n", &format!("{cpu}{V1}{unified}")),
            ["/sys/fs/cgroup/memory/app", "/sys/fs/cgroup/memory/", "/sys/fs/cgroup/unified/"]
        );
    }

    #[test]
    fn version_1_ends_where_a_group_does_not_account_its_children() {
        let root = tree::of(&[
            ("/proc/self/cgroup", "4:hugetlb,memory:/a/b/c\n"),
            ("/proc/self/mountinfo", V1),
            // Our own says nothing of our own memory.
            ("/sys/fs/cgroup/memory/a/b/c/memory.use_hierarchy", "0"),
            ("/sys/fs/cgroup/memory/a/b/memory.use_hierarchy", "1"),
            ("/sys/fs/cgroup/memory/a/memory.use_hierarchy", "0"),
        ]);
        let found = groups(&Files::below(root.path()));
        let found: Vec<_> =
            found.iter().map(|group| group.dir.strip_prefix("/sys/fs/cgroup/memory").unwrap()).collect();
        assert_eq!(found, [Path::new("a/b/c"), Path::new("a/b")]);
    }

    #[test]
    fn nothing_is_found_without_a_hierarchy() {
        assert!(dirs("", "").is_empty());
        assert!(dirs("0::/app\n", "").is_empty());
        assert!(dirs("", V2).is_empty());
        assert!(dirs("4:memory:/app\n", V2).is_empty(), "no mount of its version");
        assert!(groups(&Files::below(Path::new("/nowhere"))).is_empty());
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
        fn nonsense_is_survived(cgroup in "(0::|4:memory:)?[/.a-c:, \\\\0-7\n-]{0,60}", mounts in "[/ .a-c\\\\0-7\n-]{0,80}( - cgroup2? c rw,memory)?") {
            for dir in dirs(&cgroup, &mounts) {
                prop_assert!(dir.starts_with('/'));
            }
        }

        #[test]
        fn a_truncated_table_is_survived(cut in 0..V2.len() + V1.len()) {
            let whole = format!("{V2}{V1}");
            let found = dirs("4:memory:/app\n0::/app\n", &whole[..cut]);
            prop_assert!(matches!(found.len(), 0 | 2 | 4));
        }
    }
}
