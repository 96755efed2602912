//! Exit status, stdout and stderr of the built tool.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use flate2::Compression;
use flate2::write::GzEncoder;
use pinpool::{Backend, Pool, PoolBuilder};
use serde_json::Value;
use tempfile::TempDir;

pub(crate) use test_common::scratch::scratch;
use test_common::tool::interrupted;
pub(crate) use test_common::tool::{Ran, ended, finish, number, program, signal};
pub(crate) use test_common::until::until;

/// The tool on the `heap` backend, without the environment of the test.
pub(crate) fn pinpool(args: &[&str]) -> Command {
    program(env!("CARGO_BIN_EXE_pinpool"), args)
}

pub(crate) fn run(args: &[&str]) -> Ran {
    finish(&mut pinpool(args))
}

/// A command on the file at `path`.
pub(crate) fn on(command: &str, path: impl AsRef<Path>, args: &[&str]) -> Ran {
    finish(pinpool(&[command]).arg(path.as_ref()).args(args))
}

/// A pool of this process on the heap, without the environment of the test.
pub(crate) fn heap() -> PoolBuilder {
    Pool::builder().without_env().backend(Backend::Heap).maintenance_thread(false)
}

/// A recording of pools with these names and numbers of requests.
pub(crate) fn recorded_pools(dir: &Path, name: &str, pools: &[(&'static str, usize)]) -> PathBuf {
    let path = dir.join(name);
    let build = |&(name, requests): &(&'static str, usize)| (heap().name(name).trace(path.clone()).build(), requests);
    let built: Vec<_> = pools.iter().map(build).collect();
    for (pool, requests) in &built {
        (0..*requests).for_each(|_| drop(pool.as_ref().unwrap().get(1 << 20).unwrap()));
    }
    path
}

/// Returns a number from the pool statistics in the JSON of a load.
fn of_pool(printed: &Value, at: &str) -> u64 {
    printed["stats"].pointer(at).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {at} in {printed}"))
}

/// A file with this name and content.
pub(crate) fn written(dir: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

pub(crate) fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(bytes).unwrap();
    gzip.finish().unwrap()
}

fn load(dir: &TempDir, args: &[&str]) -> Ran {
    finish(pinpool(&["load", "--json", "--verify"]).args(args).arg(dir.path()))
}

/// 200 files of 0 to 1,990 bytes in two directories, 199,000 bytes in all.
pub(crate) fn tree() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    ["cat", "dog"].iter().for_each(|class| fs::create_dir(dir.path().join(class)).unwrap());
    for number in 0..200 {
        let class = if number % 2 == 0 { "cat" } else { "dog" };
        let bytes: Vec<u8> = (0..=255).cycle().skip(number).take(number * 10).collect();
        fs::write(dir.path().join(format!("{class}/{number:03}.jpg")), bytes).unwrap();
    }
    dir
}

#[test]
fn a_tree_is_loaded_verified_and_reported() {
    let dir = tree();
    symlink("cat/100.jpg", dir.path().join("link")).unwrap();
    symlink(".", dir.path().join("loop")).unwrap();
    let ran = load(&dir, &["--batch-files", "32", "--epochs", "2", "--shuffle", "9"]).exits(0);
    let printed = ran.figures();
    assert_eq!(printed["backend"], "heap");
    assert_eq!(printed["ended"], "complete");
    assert_eq!((printed["files"].as_u64(), printed["samples"].as_u64()), (Some(201), Some(402)));
    assert_eq!(printed["failed_files"], 0);
    assert_eq!(printed["bytes"], 2 * (199_000 + 1000));
    assert_eq!((printed["batches"].as_u64(), printed["verified_batches"].as_u64()), (Some(14), Some(14)));
    assert_eq!((of_pool(&printed, "/requests/served"), of_pool(&printed, "/requests/returned")), (14, 14));
    assert_eq!(of_pool(&printed, "/memory/pin/count"), 1, "every miss is carved from one granule");
    assert!(number(&printed, "pinned_bytes") <= of_pool(&printed, "/memory/peak_held_bytes"), "{printed}");
    for name in ["seconds", "gb_per_s", "epochs", "max_in_flight_batches"] {
        assert!(printed[name].as_f64().unwrap() > 0.0, "{name}: {printed}");
    }
    // Without a GPU the tool reports that it has none.
    if !printed["destination"].as_str().unwrap().starts_with("CUDA device") {
        assert!(printed["destination"].as_str().unwrap().contains("host sink"));
        ran.check_stderr("copying to a host sink");
    }
    ran.check_stderr("loop leads back");
}

#[test]
fn unreadable_files_are_named_counted_and_skipped() {
    let dir = tree();
    symlink("nowhere", dir.path().join("dangling")).unwrap();
    let mut failing = vec!["dangling: No such file or directory".to_string()];
    let locked = dir.path().join("locked");
    fs::write(&locked, b"secret").unwrap();
    fs::set_permissions(&locked, fs::Permissions::from_mode(0o000)).unwrap();
    // Root can read the file.
    let readable = File::open(&locked).is_ok();
    if !readable {
        failing.push("locked: Permission denied".to_string());
    }
    // A kernel file that is shorter than its reported length, if there is one.
    let seqnum = Path::new("/sys/kernel/uevent_seqnum");
    if let (Ok(meta), Ok(text)) = (seqnum.metadata(), fs::read(seqnum))
        && meta.len() > text.len() as u64
    {
        symlink(seqnum, dir.path().join("short")).unwrap();
        failing.push(format!("short: truncated: {} of the {} bytes planned", text.len(), meta.len()));
    }
    let ran = load(&dir, &[]).exits(1);
    failing.iter().for_each(|words| ran.check_stderr(words));
    let printed = ran.figures();
    assert_eq!(printed["failed_files"], failing.len());
    assert_eq!(printed["files"], 200 + usize::from(readable));
}

#[test]
fn a_strict_run_stops_at_the_first_failure() {
    let dir = tree();
    let ran = load(&dir, &["--strict", "/nowhere/one", "/nowhere/two"]).exits(1);
    ran.check_stderr("/nowhere/one");
    ran.check_stderr("--strict");
    assert!(!ran.stderr.contains("/nowhere/two"), "{}", ran.stderr);
    let printed = ran.figures();
    assert_eq!((printed["ended"].as_str(), printed["batches"].as_u64()), (Some("strict"), Some(0)));
}

#[test]
fn invalid_settings_are_errors_and_unknown_names_are_warnings() {
    let dir = tree();
    for variable in ["PINPOOL_WAIT", "PINPOOL_ZERO", "PINPOOL_ON_FULL", "PINPOOL_MAX_BYTES"] {
        let ran = finish(pinpool(&["load", "--json"]).env(variable, "12 bananas")).exits(2);
        ran.check_stderr(&format!("{variable}=12 bananas"));
    }
    let ran = finish(pinpool(&["load", "--json"]).arg(dir.path()).env("PINPOOL_PURPLE", "1")).exits(0);
    ran.check_stderr("PINPOOL_PURPLE=1");

    let mut contradiction = pinpool(&["load"]);
    let ran = finish(contradiction.env("PINPOOL_POOL_SIZE_LIMIT", "0").env("PINPOOL_AUTO_RESIZE", "1")).exits(2);
    ran.check_stderr("PINPOOL_AUTO_RESIZE");
    assert_eq!(ran.stdout, "");
}

#[test]
fn env_names_all_problems_at_once() {
    let mut command = pinpool(&["env"]);
    command.env("PINPOOL_WAIT", "soon").env("PINPOOL_ZERO", "ture").env("PINPOOL_MAXBYTES", "1G");
    let ran = finish(command.env("PINPOOL_POOL_SIZE_LIMIT", "0").env("PINPOOL_AUTO_RESIZE", "1")).exits(2);
    for line in [
        "warning: PINPOOL_MAXBYTES=1G: unknown and ignored; did you mean PINPOOL_MAX_BYTES?\n",
        "error: PINPOOL_WAIT=soon: not a time",
        "error: PINPOOL_ZERO=ture: neither 0 (no, off, false) nor 1 (yes, on, true); correct it, or leave it out for the default 0\n",
        "error: PINPOOL_AUTO_RESIZE=1: contradicts PINPOOL_POOL_SIZE_LIMIT=0",
    ] {
        ran.check_stderr(line);
    }
}

#[test]
fn env_lists_common_variables_and_those_that_are_set() {
    let names = |ran: &Ran| -> Vec<String> {
        ran.stdout.lines().skip(1).map(|line| line.split(' ').next().unwrap().to_owned()).collect()
    };
    let ran = finish(pinpool(&["env"]).env("PINPOOL_ZERO", "1"));
    let few =
        ["MAX_BYTES", "RESERVE", "LEDGER", "WAIT", "ON_FULL", "BACKEND", "IDLE_TIMEOUT", "TRACE", "SOCKET", "ZERO"];
    let few: Vec<_> = few.iter().map(|name| format!("PINPOOL_{name}")).collect();
    assert_eq!((names(&ran), ran.code()), (few, 0), "{}", ran.stderr);
    ran.check_stderr("more have their defaults: `pinpool doctor --settings --all` lists them");
    let all = finish(&mut pinpool(&["env", "--all"]));
    let known: Vec<_> =
        pinpool::unstable::config::env::VARIABLES.iter().map(|variable| variable.name.to_owned()).collect();
    assert_eq!((names(&all), all.stderr.as_str()), (known, ""));
    assert!(!all.stdout.contains("REQUIRE_GPU"));
}

#[test]
fn env_opens_nothing_and_names_settings_without_effect() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, socket) = (dir.path().join("t"), dir.path().join("s"));
    let ran = finish(pinpool(&["env"]).env("PINPOOL_TRACE", &trace).env("PINPOOL_SOCKET", &socket));
    assert_eq!((ran.code(), trace.exists(), socket.exists()), (0, false, false), "{}", ran.stderr);
    let ran = finish(pinpool(&["env"]).env("PINPOOL_IDLE_TIMEOUT", "5s").env("PINPOOL_PRESET", "tensorflow")).exits(0);
    ran.check_stderr("warning: PINPOOL_IDLE_TIMEOUT=5s: has no effect under PINPOOL_PRESET=tensorflow\n");
}

#[test]
fn a_setting_overrides_its_variable() {
    let dir = tree();
    let mut command =
        pinpool(&["load", "--json", "--set", "BACKEND=heap,PINPOOL_POOL_SIZE_LIMIT=7", "--batch-files", "9"]);
    let ran = finish(command.arg(dir.path()).env("PINPOOL_POOL_SIZE_LIMIT", "50"));
    let printed = ran.figures();
    assert_eq!((printed["backend"].as_str(), of_pool(&printed, "/limits/pool_size_limit")), (Some("heap"), 7));
    let ran = finish(pinpool(&["load", "--json"]).arg(dir.path()).env("PINPOOL_POOL_SIZE_LIMIT", "50"));
    assert_eq!(of_pool(&ran.figures(), "/limits/pool_size_limit"), 50);
}

#[test]
fn a_pool_that_evicts_logs_tensorflows_lines() {
    let dir = tempfile::tempdir().unwrap();
    for number in 1..=1300 {
        fs::write(dir.path().join(format!("{number:04}")), vec![7; number]).unwrap();
    }
    let set = "PRESET=tensorflow,ROUNDING=exact,POOL_SIZE_LIMIT=10";
    let others = tempfile::tempdir().unwrap();
    let recording = others.path().join("t.gz").display().to_string();
    let ran = load(&dir, &["--batch-files", "1", "--set", set, "--record", &recording]).exits(0);
    let tried = run(&["advise", &recording, "--try", "ROUNDING=pow2"]).exits(0);
    assert!(tried.stdout.contains("ROUNDING=pow2"), "a rounding of the recorded preset: {}", tried.stdout);
    let line = ran.stderr.lines().find(|line| line.contains("PoolAllocator: After ")).expect(&ran.stderr);
    ran.check_stderr("] Raising pool_size_limit_ from 10 to ");
    let printed = ran.figures();
    assert_eq!((of_pool(&printed, "/limits/checks"), of_pool(&printed, "/limits/raises")), (1, 1));

    // 2018-06-27 18:09:11.701458: I src/engine/stock.rs:109] message
    let (prefix, message) = line.split_once("] ").unwrap();
    let (time, place) = prefix.split_at(26);
    assert_eq!(time.replace(|c: char| c.is_ascii_digit(), "9"), "9999-99-99 99:99:99.999999");
    let line_number = place.strip_prefix(": I src/").and_then(|place| place.split_once(".rs:")).expect(place).1;
    assert!(line_number.parse::<u32>().is_ok(), "{line_number}");
    assert!(message.contains(" get requests, put_count=") && message.contains("evicted_count=1000 "), "{message}");
}

/// The path of a file in `tests/data`.
pub(crate) fn data(name: &str) -> String {
    format!("{}/tests/data/{name}", crate::ROOT)
}

#[test]
fn a_replay_prints_a_table_for_each_workload_or_json() {
    let [cosmoflow, jitter] = ["cosmoflow", "jitter_3"].map(|name| data(&format!("workloads/{name}.trace.gz")));
    let two = run(&["replay", &cosmoflow, &jitter]).exits(0);
    let row =
        |head: &str| two.stdout.lines().filter_map(|line| line.strip_prefix(head)).map(str::trim).collect::<Vec<_>>();
    assert_eq!((row("pins  "), row("not served in time")), (vec!["24", "7"], vec!["0", "0"]));
    assert_eq!((row("requests  ")[0], row("limit  ")[0]), ("20,000", "none"), "{}", two.stdout);

    let ceiled = ["replay", "--json", "--source", "separate", "--set", "MAX_BYTES=60MiB,WAIT=1s", &cosmoflow];
    let printed = run(&ceiled).figures();
    assert_eq!((&printed["workload"], &printed["source"]), (&"cosmoflow".into(), &"separate".into()));
    assert_eq!((&printed["gets"], &printed["fallbacks"]), (&20_000.into(), &0.into()));
    assert!(number(&printed, "peak_pinned_bytes") <= number(&printed, "max_bytes"), "{printed}");
    let json = run(&["replay", "--json", &cosmoflow, &jitter]);
    assert_eq!(json.stdout.lines().filter(|line| serde_json::from_str::<Value>(line).is_ok()).count(), 2);
}

#[test]
fn a_replay_ignores_the_environment() {
    let workload = data("workloads/resnet50_w0_cpu.trace.gz");
    let plain = run(&["replay", "--json", &workload]);
    let mut command = pinpool(&["replay", "--json", &workload]);
    let replayed = finish(
        command.env("PINPOOL_PRESET", "tensorflow").env("PINPOOL_MAX_BYTES", "1MiB").env("PINPOOL_IDLE_TIMEOUT", "0s"),
    );
    assert_eq!((plain.code(), &plain.stdout), (0, &replayed.stdout));
}

#[test]
fn rust_log_silences_the_log_but_not_the_failures() {
    let dir = tree();
    let ran = finish(pinpool(&["load", "--json", "/nowhere"]).arg(dir.path()).env("RUST_LOG", "off"));
    assert_eq!(ran.stderr, "pinpool: /nowhere: No such file or directory (os error 2)\n");
}

#[test]
fn an_empty_directory_exits_with_4() {
    let dir = tempfile::tempdir().unwrap();
    let ran = load(&dir, &[]).exits(4);
    ran.check_stderr("nothing to load");
    let printed = ran.figures();
    assert_eq!((printed["files"].as_u64(), printed["bytes"].as_u64()), (Some(0), Some(0)));
}

#[test]
fn wrong_arguments_are_refused_with_the_usage_status() {
    let wrong: [&[&str]; 14] = [
        &[],
        &["frobnicate"],
        &["load", "--frobnicate"],
        &["load", "--batch-bytes", "0"],
        &["load", "--batch-bytes", "12 bananas"],
        &["load", "--batch-files", "0"],
        &["load", "--epochs", "0"],
        &["load", "--threads", "0"],
        &["load", "--synthetic", "0"],
        &["load", "--set", "MAX_BYTES=99999999999GiB"],
        &["load", "--set", "MAX_BYTES=0"],
        &["load", "--synthetic", "4294967295"],
        &["load", "--set", "BACKEND=purple"],
        &["load", "--synthetic", "3", "/tmp"],
    ];
    for args in wrong {
        let ran = run(args);
        assert_eq!((ran.code(), ran.stdout.as_str()), (2, ""), "{args:?}\n{}", ran.stderr);
        if args.last() == Some(&"0") {
            assert!(ran.stderr.contains(" is not in 1..") || ran.stderr.contains("less than 1B"), "{}", ran.stderr);
        }
        let words = ["Usage", "error: invalid value"];
        assert!(words.iter().any(|words| ran.stderr.contains(words)), "{args:?}\n{}", ran.stderr);
    }
    for args in [&["why", "a", "b", "c"][..], &["advise", "a", "b"], &["advise", "a", "--set", "MAX_BYTES=1GiB"]] {
        let ran = run(args);
        assert_eq!((ran.code(), ran.stderr.lines().count()), (2, 1), "{args:?}: {}", ran.stderr);
    }
    for args in [&["--help"][..], &["--version"], &["load", "--help"]] {
        let ran = run(args);
        assert_eq!((ran.code(), ran.stderr.as_str()), (0, ""), "{args:?}");
    }
}

#[test]
fn a_closed_stderr_is_no_failure() {
    let dir = tree();
    // Without stderr, the missing path cannot be reported.
    let mut command = pinpool(&["load", "--json", "/nowhere"]);
    let mut child = command.arg(dir.path()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    let mut stdout = String::new();
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    assert_eq!(serde_json::from_str::<Value>(&stdout).unwrap()["files"], 200);
}

#[test]
fn an_interrupt_ends_the_run_with_its_statistics() {
    let load = ["load", "--json", "--verify", "--epochs", "1000000", "--synthetic", "100"];
    let (log, stdout) = interrupted(&mut pinpool(&load));
    assert!(log.contains("interrupted") && !log.contains("panicked"), "{log}");
    let printed: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(printed["ended"], "interrupted");
    assert_eq!(printed["failed_files"], 0);
    assert_eq!(printed["batches"], printed["verified_batches"]);
    let mut idle = pinpool(&["load", "--json", "--synthetic", "4", "--idle", "600"]);
    let (log, _) = interrupted(idle.env("RUST_LOG", "pinpool::load=info/idle for"));
    assert!(log.contains("interrupted: the statistics are incomplete"), "{log}");
}
