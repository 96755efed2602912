//! `why` for a process, a recording, a trace, a log, and other files.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::record::recorded;
use crate::tf_lines::{AFTER, RAISE, after};
use crate::tool::{heap, on, pinpool, scratch, until};

/// A recording of threads that wait for each other at a limit of two buffers.
pub(crate) fn throttled(path: &Path) {
    let builder = heap().name("train").max_bytes(8 << 20).wait(Duration::from_secs(60));
    let pool = builder.trace(path.to_owned()).build().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..30 {
                    let held = pool.get(4 << 20).unwrap();
                    std::thread::sleep(Duration::from_millis(4));
                    drop(held);
                }
            });
        }
    });
}

#[test]
fn a_recording_is_given_the_advice_of_its_pool() {
    let (_dir, path) = scratch("t.gz");
    throttled(&path);
    let ran = on("why", &path, &[]).exits(1);
    assert!(ran.stdout.starts_with("limit_too_small: "), "{}", ran.stdout);
    for line in ["\n  to do: raise PINPOOL_MAX_BYTES to ", "\n  all threads lost "] {
        assert!(ran.stdout.contains(line), "{}", ran.stdout);
    }
}

#[test]
fn a_killed_process_has_no_recorded_end() {
    let (_dir, path) = scratch("t.trace");
    let mut load = pinpool(&["load", "--synthetic", "60", "--batch-files", "1", "--idle", "60"]);
    let mut load = load.arg("--record").arg(&path).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    until("the gets are recorded", || on("why", &path, &[]).stdout.contains("60 requests"));
    load.kill().unwrap();
    load.wait().unwrap();
    let ran = on("why", &path, &[]);
    assert!(ran.stdout.contains("\n  the end of the pool is not recorded: "), "{}{}", ran.stdout, ran.stderr);
}

#[test]
fn the_last_diagnosis_of_each_pool_in_a_log_counts_and_alarms_come_first() {
    let (_dir, path) = scratch("run.log");
    let log = "INFO pool[a] diagnosis: warming_up: held 0B->1.0GiB\nWARN pool[b] diagnosis: limit_too_small: 300 of 1000 requests \
               waited (all threads lost 9.5s in 10.0s); raise PINPOOL_MAX_BYTES to 6.2GiB\nINFO pool[a] diagnosis: healthy: 9 of 9\nINFO pool[2] \
               diagnosis: healthy: 5 of 5\n";
    fs::write(&path, log).unwrap();
    let ran = on("why", &path, &[]).exits(1);
    let lines: Vec<_> = ran.stdout.lines().collect();
    assert!(lines[0].starts_with("b: limit_too_small: 300 of 1000"), "{lines:?}");
    assert_eq!(lines[1..], ["  to do: raise PINPOOL_MAX_BYTES to 6.2GiB", "2 healthy: a, pool 2"]);
    let all = on("why", &path, &["--all"]).stdout;
    assert!(all.ends_with("a: healthy: 9 of 9\npool 2: healthy: 5 of 5\n"), "{all}");
    // An unpinned pool is an alarm if another pool is pinned.
    let unpinned = "INFO pool[c] diagnosis: not_pinned: copies use pageable memory\n";
    for (created, code) in [("", 0), ("INFO pool[a] created: backend=mlock pinned=kernel max=1.0GiB\n", 1)] {
        fs::write(&path, format!("{created}{unpinned}")).unwrap();
        assert_eq!(on("why", &path, &[]).code(), code, "{created}");
    }
}

#[test]
fn diagnoses_in_a_log_have_priority() {
    let dir = tempfile::tempdir().unwrap();
    let (path, page) = (dir.path().join("run.log"), dir.path().join("page.html"));
    let after = after("9000", "8990", "4000", "0.444939", "0.5");
    let found = "sizes_never_recur: 4500 of 9000 requests missed";
    fs::write(&path, format!("{after}\nWARN pool[train] diagnosis: {found}; batch to fewer sizes\n")).unwrap();
    let said = on("why", &path, &[]).stdout;
    assert!(said.starts_with(found), "{said}");
    let lines = on("why", &path, &["--lines"]).stdout;
    assert!(lines.contains(&format!("train: {found}")) && !lines.contains("PINPOOL_POOL_SIZE_LIMIT"), "{lines}");
    assert_eq!(crate::report::report(&path, &page).code(), 0);
    let page = fs::read_to_string(page).unwrap();
    assert!(page.contains("\"is_alarm\":true") && page.contains("\"name\":\"sizes_never_recur\""));
}

#[test]
fn lines_of_tensorflow_are_diagnosed() {
    let (_dir, path) = scratch("tf.log");
    fs::write(&path, after("9000", "8990", "0", "0", "0.001")).unwrap();
    let ran = on("why", &path, &["--json"]);
    assert_eq!((ran.code(), &ran.figures()["pools"][0]["cause"]), (0, &"steady".into()), "{}", ran.stderr);
}

#[test]
fn a_clock_that_jumps_during_a_log_changes_only_the_printed_times() {
    let dir = tempfile::tempdir().unwrap();
    let (path, page) = (dir.path().join("run.log"), dir.path().join("page.html"));
    let all = |times: [&str; 5]| {
        let messages = [
            AFTER.to_owned(),
            RAISE.to_owned(),
            "pool[train] diagnosis: healthy: 9 of 9 requests were served immediately, 2.0MiB held".to_owned(),
            after("71532", "71532", "1000", "0.0139798", "0.0143013"),
            "pool[train] diagnosis: pool_full: 300 of 1000 requests waited; raise PINPOOL_MAX_BYTES to 6.2GiB"
                .to_owned(),
        ];
        let lines =
            times.iter().zip(messages).map(|(time, message)| format!("2018-06-27 {time}: I a.rs:7] {message}\n"));
        fs::write(&path, lines.collect::<String>()).unwrap();
        let lines = on("why", &path, &["--lines", "--json"]).stdout;
        assert!(times[0] != times[1] && lines.contains(times[3]), "{lines}");
        let lines = times.iter().fold(lines, |lines, time| lines.replace(time, ""));
        assert_eq!(crate::report::report(&path, &page).code(), 0);
        (lines, on("why", &path, &["--all"]).stdout, fs::read_to_string(&page).unwrap())
    };
    let steady = all(["10:00:01.5", "10:00:02.5", "10:00:03.5", "10:00:04.5", "10:00:05.5"]);
    assert!(steady.1.starts_with("pool_full: 300 of 1000"), "{}", steady.1);
    // The clock jumps back an hour, then forward three hours.
    assert_eq!(all(["10:00:01.5", "09:00:02.5", "09:00:03.5", "12:00:04.5", "12:00:05.5"]), steady);
}

#[test]
fn a_target_without_diagnosis_is_refused_with_the_reason() {
    let (dir, path) = scratch("few.log");
    fs::write(&path, "hello\n").unwrap();
    on("why", &path, &[]).exits(1).check_stderr("no complete message of the pool in 1 line:");
    on("top", &path, &[]).check_stderr("few.log: a file, not a process: `pinpool why`");
    fs::write(dir.path().join("cut.trace"), &fs::read(recorded(dir.path(), "t.trace")).unwrap()[..40]).unwrap();
    let ran = on("why", dir.path().join("cut.trace"), &[]).exits(1);
    ran.check_stderr(
        "too short for a diagnosis: at least 20 requests and 0.1 s are needed; the recording is truncated",
    );
    // No process has this ID.
    let ran = on("why", "4194305", &[]).exits(1);
    ran.check_stderr("no process serves its statistics there; start it with PINPOOL_SOCKET=1");
    on("why", dir.path().join("nothing"), &[]).exits(1).check_stderr("nothing: ");
}
