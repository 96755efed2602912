//! Whether memory is short: how long tasks wait for it, and whether limits were hit.
//!
//! | sign | meaning | counts |
//! | --- | --- | --- |
//! | `memory.pressure` of the nearest group that has it | tasks of this group waited for memory | always |
//! | `/proc/pressure/memory` | tasks of this machine waited | without the file above, or if the machine is nearly full |
//! | `oom` of `memory.events` rose | a limit was hit and reclaiming freed nothing | always: severe |
//! | `max` or `high` of `memory.events`, or `memory.failcnt`, rose | a limit was hit | if the group is nearly full: severe |
//!
//! "Nearly full" separates two harmless cases from a shortage. First, a loader that streams files hits its group's limit all the
//! time, and each time the kernel drops unneeded page cache. Second, another group that thrashes within its own limit raises the
//! machine's pressure, although memory released by this process would not help that group. On the other hand, a pool that fills
//! the machine with pinned memory may be the last process to wait, so the second row counts as well if the machine is nearly
//! full.
//!
//! The gauge finds its files once, when it is opened; each reading opens them again and keeps only counts.

use std::path::{Path, PathBuf};

use super::cgroup::{self, Cgroup, LimitHits};
use super::files::Files;
use super::memory;

/// Percent of the last ten seconds in which at least one task waited: systemd's default threshold for telling services to
/// drop caches (200 ms of 2 s).
const SOME_PERCENT: f64 = 10.0;

/// Percent of the last ten seconds in which all tasks waited: the kernel documentation's example of a threshold for `full`
/// (50 ms of 1 s). systemd-oomd starts to kill at 60.
const FULL_PERCENT: f64 = 5.0;

/// A group or a machine is nearly full if less than its total divided by this number is available. A group full of page cache is
/// not nearly full, because page cache counts as available. The threshold leaves room for a few more buffers: 512 MiB of 8 GiB.
const NEARLY_FULL_DIVISOR: u64 = 16;

/// How short memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pressure {
    /// No readable sign of a shortage.
    Calm,
    /// Tasks wait for memory: idle memory should be released sooner.
    Some,
    /// Work has stopped for lack of memory, or is about to: idle memory should be released now.
    Severe,
}

/// Reads the signs of a shortage on request.
#[derive(Debug)]
pub struct PressureGauge {
    files: Files,
    /// Stalls in this file always count.
    own: Option<PathBuf>,
    /// Stalls in this file count only on a machine that is nearly full.
    of_machine: Option<PathBuf>,
    groups: Vec<(Cgroup, LimitHits)>,
}

const MACHINE: &str = "/proc/pressure/memory";

impl PressureGauge {
    /// Opens a gauge of all signs below `root`; `None` if no sign can be read.
    pub fn from_kernel(root: &Path) -> Option<Self> {
        let files = Files::below(root);
        let groups = cgroup::groups(&files);
        let has_stalls = |path: &PathBuf| files.read(path).is_some_and(|text| stall(&text).is_some());
        let machine = Some(PathBuf::from(MACHINE)).filter(has_stalls);
        let group = groups.iter().map(|group| group.file("memory.pressure")).find(has_stalls);
        let (own, of_machine) = if group.is_some() { (group, machine) } else { (machine, None) };
        let counted = |group: Cgroup| group.limit_hits(&files).map(|hits| (group, hits));
        let groups: Vec<_> = groups.into_iter().filter_map(counted).collect();
        (own.is_some() || !groups.is_empty()).then_some(Self { files, own, of_machine, groups })
    }

    /// Returns a gauge of one file, which may appear, change and vanish at any time.
    pub fn from_file(path: &Path) -> Self {
        let own = Some(std::path::absolute(path).unwrap_or_else(|_| path.to_owned()));
        Self { files: Files::below(Path::new("/")), own, of_machine: None, groups: Vec::new() }
    }

    /// Returns the worst sign: stalls of the last ten seconds, and limit hits since the last reading or the opening.
    pub fn read(&mut self) -> Pressure {
        let stalls = self.stalls(self.own.as_deref());
        // The machine's memory is read only if its stalls could change the result.
        let machine = self.stalls(self.of_machine.as_deref());
        let machine = if machine > stalls && self.is_machine_nearly_full() { machine } else { Pressure::Calm };
        stalls.max(machine).max(self.limits())
    }

    fn stalls(&self, file: Option<&Path>) -> Pressure {
        let text = file.and_then(|file| self.files.read(file));
        text.and_then(|text| stall(&text)).map_or(Pressure::Calm, Stall::pressure)
    }

    fn is_machine_nearly_full(&self) -> bool {
        memory::machine(&self.files).is_some_and(|machine| nearly_full(machine.available_bytes, machine.total_bytes))
    }

    fn limits(&mut self) -> Pressure {
        let Self { files, groups, .. } = self;
        let mut pressure = Pressure::Calm;
        // No early return: the stored counts of all groups must advance.
        for (group, seen) in groups {
            let Some(hits) = group.limit_hits(files) else { continue };
            let before = std::mem::replace(seen, hits);
            let met_a_limit = hits.reclaimed > before.reclaimed && is_nearly_full(group, files);
            if hits.out_of_memory > before.out_of_memory || met_a_limit {
                pressure = Pressure::Severe;
            }
        }
        pressure
    }
}

fn is_nearly_full(group: &Cgroup, files: &Files) -> bool {
    group.limit(files).is_some_and(|limit| nearly_full(group.available_bytes(files, &limit), limit.bytes))
}

fn nearly_full(available_bytes: u64, total_bytes: u64) -> bool {
    available_bytes < total_bytes.div_ceil(NEARLY_FULL_DIVISOR)
}

/// Percentages of the last ten seconds in which at least one task (`some`) and all tasks (`full`) waited.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Stall {
    pub some_percent: f64,
    pub full_percent: f64,
}

impl Stall {
    fn pressure(self) -> Pressure {
        if self.full_percent >= FULL_PERCENT {
            Pressure::Severe
        } else if self.some_percent >= SOME_PERCENT {
            Pressure::Some
        } else {
            Pressure::Calm
        }
    }
}

/// Parses `some avg10=0.00 ..` and `full avg10=0.00 ..`; `None` if the text has neither.
pub fn stall(text: &str) -> Option<Stall> {
    let percent = |kind| text.lines().find_map(|line| avg10(line, kind));
    let (some, full) = (percent("some"), percent("full"));
    (some.is_some() || full.is_some())
        .then(|| Stall { some_percent: some.unwrap_or(0.0), full_percent: full.unwrap_or(0.0) })
}

fn avg10(line: &str, kind: &str) -> Option<f64> {
    let mut words = line.split_ascii_whitespace();
    if words.next()? != kind {
        return None;
    }
    let share = words.find_map(|word| word.strip_prefix("avg10="))?;
    // Digits and a point only: the kernel never writes other forms that Rust parses (`inf`, `1e9`, `+5`).
    let plain = share.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let percent: f64 = share.parse().ok().filter(|_| plain)?;
    (percent <= 100.0).then_some(percent)
}

#[cfg(all(test, not(miri)))] // Files only: no unsafe code to check.
mod tests {
    use proptest::prelude::*;
    use tempfile::TempDir;

    use super::super::files::tree::{self, V1, V2};
    use super::*;

    const CGROUP: (&str, &str) = ("/proc/self/cgroup", "0::/app\n");
    const OWN: &str = "/sys/fs/cgroup/app/memory.pressure";
    const EVENTS: &str = "/sys/fs/cgroup/app/memory.events";
    const LOCAL: &str = "/sys/fs/cgroup/app/memory.events.local";
    const STAT: &str = "/sys/fs/cgroup/app/memory.stat";

    fn psi(some: &str, full: &str) -> String {
        format!(
            "some avg10={some} avg60=99.00 avg300=99.00 total=18446744073709551615\n\
             full avg10={full} avg60=99.00 avg300=99.00 total=7\n"
        )
    }

    fn events(high: u64, max: u64, oom: u64) -> String {
        format!("low 9\nhigh {high}\nmax {max}\noom {oom}\noom_kill 9\noom_group_kill 9\n")
    }

    /// Opens a gauge of these files; then writes each file of `steps` and reads the gauge.
    fn follow(files: &[(&str, &str)], steps: &[(&str, &str, Pressure)]) -> (TempDir, PressureGauge) {
        let root = tree::of(files);
        let mut gauge = PressureGauge::from_kernel(root.path()).unwrap();
        for (path, content, pressure) in steps {
            tree::write(&root, path, content);
            assert_eq!(gauge.read(), *pressure, "{path}: {content}");
        }
        (root, gauge)
    }

    /// Writes the files and reads the gauge as [`follow`] does, in a group of 1,600 bytes, all used.
    fn follow_full(more: &[(&str, &str)], steps: &[(&str, &str, Pressure)]) -> (TempDir, PressureGauge) {
        let group = [
            CGROUP,
            V2,
            ("/sys/fs/cgroup/app/memory.max", "1600\n"),
            ("/sys/fs/cgroup/app/memory.current", "1600\n"),
            (EVENTS, &events(1, 1, 0)),
        ];
        follow(&[&group, more].concat(), steps)
    }

    #[test]
    fn a_gauge_follows_its_file() {
        let root = tempfile::tempdir().unwrap();
        let mut gauge = PressureGauge::from_file(&root.path().join("pressure"));
        assert_eq!(gauge.read(), Pressure::Calm, "no file yet");
        for (some, full, pressure) in [
            ("0.00", "0.00", Pressure::Calm),
            ("9.99", "4.99", Pressure::Calm),
            ("10.00", "4.99", Pressure::Some),
            ("10.00", "5.00", Pressure::Severe),
            ("0.00", "5.00", Pressure::Severe),
            ("100.00", "100.00", Pressure::Severe),
            ("0.00", "0.00", Pressure::Calm),
        ] {
            tree::write(&root, "pressure", &psi(some, full));
            assert_eq!(gauge.read(), pressure, "{some} {full}");
        }
    }

    #[test]
    fn the_groups_own_stalls_come_before_the_machines() {
        let (waits, calm) = (psi("50.00", "0.00"), psi("0.00", "0.00"));
        let steps = [(OWN, &*calm, Pressure::Calm), (OWN, &psi("12.50", "0.00"), Pressure::Some)];
        follow(&[CGROUP, V2, (MACHINE, &waits), (OWN, &calm)], &steps);
    }

    #[test]
    fn the_machines_stalls_count_alone_or_when_it_is_nearly_full() {
        let waits = psi("50.00", "0.00");
        follow(&[(MACHINE, &waits)], &[(MACHINE, &waits, Pressure::Some)]);

        let meminfo = |available: u64| format!("MemTotal: 1600 kB\nMemAvailable: {available} kB\n");
        let steps = [(1600, Pressure::Calm), (100, Pressure::Calm), (99, Pressure::Severe)];
        let steps = steps.map(|(available, pressure)| (meminfo(available), pressure));
        let steps = steps.each_ref().map(|(text, pressure)| ("/proc/meminfo", text.as_str(), *pressure));
        follow(&[CGROUP, V2, (MACHINE, &psi("50.00", "20.00")), (OWN, &psi("0.00", "0.00"))], &steps);
    }

    #[test]
    fn a_limit_hit_in_a_full_group_is_severe_once() {
        follow_full(
            &[],
            &[
                // Hits before the gauge was opened do not count.
                (EVENTS, &events(1, 1, 0), Pressure::Calm),
                (EVENTS, &events(2, 1, 0), Pressure::Severe),
                (EVENTS, &events(2, 1, 0), Pressure::Calm),
                (EVENTS, &events(2, 2, 0), Pressure::Severe),
                (EVENTS, &events(2, 2, 0), Pressure::Calm),
            ],
        );
    }

    #[test]
    fn reclaimable_page_cache_is_no_pressure() {
        follow_full(
            &[(STAT, "inactive_file 100\n")],
            &[
                (EVENTS, &events(1, 2, 0), Pressure::Calm),
                // The hit was read while memory was left.
                (STAT, "inactive_file 99\n", Pressure::Calm),
                (EVENTS, &events(1, 3, 0), Pressure::Severe),
                (STAT, "inactive_file 800\n", Pressure::Calm),
                (EVENTS, &events(1, 3, 1), Pressure::Severe),
            ],
        );
    }

    #[test]
    fn limits_of_groups_below_are_theirs_and_those_of_ancestors_count() {
        let below = [(EVENTS, &*events(1, 50, 5), Pressure::Calm), (LOCAL, &events(0, 1, 0), Pressure::Severe)];
        follow_full(&[(LOCAL, &events(0, 0, 0))], &below);
        let above = "/sys/fs/cgroup/memory.events.local";
        follow_full(&[(above, &events(0, 0, 0))], &[(above, &events(0, 0, 1), Pressure::Severe)]);
    }

    #[test]
    fn version_1_counts_failed_charges() {
        let failcnt = "/sys/fs/cgroup/memory/app/memory.failcnt";
        let files = [
            ("/proc/self/cgroup", "4:memory:/app\n"),
            V1,
            ("/sys/fs/cgroup/memory/app/memory.limit_in_bytes", "1600\n"),
            ("/sys/fs/cgroup/memory/app/memory.usage_in_bytes", "1600\n"),
            (failcnt, "41\n"),
        ];
        follow(&files, &[(failcnt, "41\n", Pressure::Calm), (failcnt, "42\n", Pressure::Severe)]);
    }

    #[test]
    fn counts_that_fall_or_vanish_are_calm() {
        let texts = ["", "max", "max -1", "max 99999999999999999999999", &events(0, 0, 0)];
        let (root, mut gauge) = follow_full(&[], &texts.map(|text| (EVENTS, text, Pressure::Calm)));
        std::fs::remove_dir_all(root.path()).unwrap();
        assert_eq!(gauge.read(), Pressure::Calm);
    }

    #[test]
    fn without_any_sign_there_is_no_gauge() {
        assert!(PressureGauge::from_kernel(Path::new("/nowhere")).is_none());
        assert!(PressureGauge::from_kernel(tree::of(&[CGROUP, V2, (MACHINE, ""), (OWN, "nonsense")]).path()).is_none());
    }

    #[test]
    fn this_machine_is_read() {
        let has_stalls = std::fs::read_to_string(MACHINE).is_ok_and(|text| stall(&text).is_some());
        let mut gauge = PressureGauge::from_kernel(Path::new("/"));
        assert!(gauge.is_some() || !has_stalls);
        // Any result may be correct.
        let _: Option<Pressure> = gauge.as_mut().map(PressureGauge::read);
    }

    #[test]
    fn malformed_text_is_no_stall() {
        for share in ["", "x", "-5", "+50", "1e2", "inf", "NaN", "100.01", "999999999999999999999999", "5.0.0", "."] {
            assert_eq!(stall(&psi(share, share)), None, "{share}");
        }
        for text in ["", "some", "some avg60=50.00", "someavg10=50.00", "some avg10 = 50", "avg10=50.00 some"] {
            assert_eq!(stall(text), None, "{text}");
        }
        assert_eq!(stall("full avg10=7"), Some(Stall { some_percent: 0.0, full_percent: 7.0 }));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

        #[test]
        fn a_truncated_file_is_no_worse_than_the_whole(some in 0u32..=10_000, full in 0u32..=10_000, cut in 0.0..1.0) {
            let percent = |hundredths: u32| format!("{}.{:02}", hundredths / 100, hundredths % 100);
            let whole = psi(&percent(some), &percent(full));
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
            let cut = (whole.len() as f64 * cut) as usize;
            let of = |text: &str| stall(text).map_or(Pressure::Calm, Stall::pressure);
            prop_assert!(of(&whole[..cut]) <= of(&whole));
        }

        #[test]
        fn any_events_are_read_once(texts in prop::collection::vec("((max|high|oom) [0-9]{0,22}\n){0,4}", 1..5)) {
            let (root, mut gauge) = follow_full(&[], &[]);
            for text in &texts {
                tree::write(&root, EVENTS, text);
                gauge.read();
                prop_assert_eq!(gauge.read(), Pressure::Calm, "a second reading finds nothing new");
            }
        }
    }
}
