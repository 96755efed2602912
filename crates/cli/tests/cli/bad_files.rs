//! Truncated and damaged files, files of another kind, and files made to exhaust memory: each command ends with a message and an exit
//! status, and prints the intact part.

use std::fs::File;
use std::path::PathBuf;
use std::process::Stdio;

use tempfile::TempDir;

use crate::record::recorded;
use crate::tf_lines::AFTER;
use crate::tool::{finish, on, packed, pinpool, written};

/// 66 MiB of zeros in less than 100 KB.
fn bomb(dir: &TempDir) -> PathBuf {
    written(dir.path(), "bomb.gz", packed(&vec![0; 1 << 20]).repeat(66))
}

#[test]
fn a_compressed_line_without_an_end_is_refused_by_its_length() {
    let dir = TempDir::new().unwrap();
    let ran = on("inspect", bomb(&dir), &[]).refuses(1);
    ran.check_stderr("bomb.gz");
    ran.check_stderr("line 1 is longer than 64 MiB");
}

#[test]
fn a_progress_bar_of_more_than_64_mib_is_read_to_its_end() {
    let dir = TempDir::new().unwrap();
    let bar = packed(&b"epoch 3: 42 %\r".repeat(80_000)).repeat(64);
    let path = written(dir.path(), "bar.gz", [bar, packed(format!("{AFTER}\n").as_bytes())].concat());
    let ran = on("inspect", &path, &[]).exits(0);
    assert!(ran.stdout.contains("1 message in"), "{}", ran.stdout);
}

#[test]
fn the_intact_part_of_a_truncated_compressed_log_is_shown() {
    let dir = TempDir::new().unwrap();
    // The file has two members, and the second is truncated.
    let whole = packed(format!("{AFTER}\n").repeat(3).as_bytes());
    let other: Vec<u8> =
        (0..20_000_u32).flat_map(|n| format!("{}\n", n.wrapping_mul(2_654_435_761)).into_bytes()).collect();
    let other = packed(&other);
    let path = written(dir.path(), "cut.gz", [&whole[..], &other[..other.len() / 2]].concat());
    let ran = on("inspect", &path, &[]).exits(1);
    assert!(ran.stdout.contains("3 messages in"), "{}", ran.stdout);
    ran.check_stderr("cut.gz: read up to line ");
    ran.check_stderr("the compressed data is truncated");
    let json = on("inspect", &path, &["--json"]);
    assert_eq!((json.code(), json.stdout.lines().count()), (1, 4));
    assert!(json.stdout.contains("\"stopped\":\"read up to line "), "{}", json.stdout);
}

#[test]
fn inspect_names_the_commands_for_a_recording_and_for_a_trace() {
    let dir = TempDir::new().unwrap();
    for name in ["t.trace", "t.gz"] {
        let ran = on("inspect", recorded(dir.path(), name), &[]).exits(1);
        ran.check_stderr("this is a recording, not a log: use `pinpool why` without --lines");
    }
    let ran = on("inspect", written(dir.path(), "w", "# limit 5\na 1 4096\nf 1\n"), &[]).exits(1);
    ran.check_stderr("`pinpool advise` reads traces of requests");
}

#[test]
fn a_recording_of_a_newer_version_is_named_everywhere() {
    let dir = TempDir::new().unwrap();
    let path = written(dir.path(), "new.trace", [&b"PINPOOLT"[..], &u32::MAX.to_le_bytes(), &[0; 20]].concat());
    let page = dir.path().join("page.html");
    let (page, other) = (["-o", page.to_str().unwrap()], [path.to_str().unwrap()]);
    let alone = ["why", "trace", "replay", "advise"].map(|command| (command, &[][..]));
    for (command, args) in alone.into_iter().chain([("report", &page[..]), ("diff", &other)]) {
        let ran = on(command, &path, args).refuses(1);
        assert_eq!(ran.stderr.lines().count(), 1, "{command}: {}", ran.stderr);
        ran.check_stderr("format version 4294967295");
    }
}

#[test]
fn what_the_system_refuses_is_named_with_a_remedy() {
    let dir = TempDir::new().unwrap();
    let folder = dir.path().to_str().unwrap();
    let (page, missing) = (dir.path().join("page.html"), dir.path().join("none/x"));
    let log = written(dir.path(), "log", AFTER);
    let (page, missing, log) = (page.to_str().unwrap(), missing.to_str().unwrap(), log.to_str().unwrap());
    for (args, words) in [
        (&["inspect", folder][..], "name a file"),
        (&["replay", folder], "name a file"),
        (&["advise", folder], "name a file"),
        (&["report", folder, "-o", page], "name a file"),
        (&["inspect", missing], "check its name"),
        (&["replay", missing], "check its name"),
        (&["advise", missing], "check its name"),
        (&["report", missing, "-o", page], "check its name"),
        (&["report", log, "-o", missing], "check its name and that the directory exists"),
        (&["report", log, "-o", folder], "name a file"),
        (&["report", log, "-o", "/dev/full"], "free space there"),
    ] {
        let ran = finish(&mut pinpool(args));
        assert_eq!(ran.code(), 1, "{args:?}: {}", ran.stderr);
        ran.check_stderr(words);
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let dir = TempDir::new().unwrap();
    let log = written(dir.path(), "log", format!("{AFTER}\n").repeat(1_000));
    let trace = written(dir.path(), "w", "a 1 4096\nf 1\n".repeat(500));
    for args in [
        vec!["inspect", "--json", log.to_str().unwrap()],
        vec!["replay", "--json", trace.to_str().unwrap()],
        vec!["env", "--all"],
        vec!["--help"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let ran = finish(pinpool(&args).stdout(Stdio::from(writer)));
        assert_eq!((ran.code(), ran.stderr.as_str()), (0, ""), "{args:?}");
        let ran = finish(pinpool(&args).stdout(Stdio::from(File::options().write(true).open("/dev/full").unwrap())));
        assert_eq!(ran.code(), 1, "{args:?}");
        ran.check_stderr("stdout: ");
    }
}

#[test]
fn too_many_pools_in_a_log_are_an_error_with_the_limit() {
    let dir = TempDir::new().unwrap();
    let raises: String = (0..1_200)
        .rev()
        .map(|n| format!("Raising pool_size_limit_ from {} to {}\n", 1_000 + n, (1_000 + n) * 11 / 10))
        .collect();
    on("inspect", written(dir.path(), "log", raises), &[]).exits(1).check_stderr("more than 1000 pools");
}
