//! `pinpool run`: the program replaces the tool. `crates/preload/tests` tests that its memory is served.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use crate::tool::{finish, pinpool, scratch, written};

/// `pinpool run` with a library that does nothing.
fn run(arguments: &[&str]) -> Command {
    let mut command = pinpool(&["run"]);
    command.env("PINPOOL_PRELOAD_LIB", library()).args(arguments);
    command
}

/// Returns the path of a shared library: the C library that this test has loaded.
fn library() -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let line = maps.lines().find(|line| line.contains("/libc.so.6")).expect("a C library");
    line[line.find('/').unwrap()..].to_owned()
}

fn script(folder: &TempDir, text: &str, mode: u32) -> String {
    let path = written(folder.path(), "script", text);
    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn the_program_keeps_its_arguments_output_exit_status_and_signals() {
    let ran = finish(run(&["--", "sh", "-c", "echo \"$0 $1\"; exit 7"]).args(["a b", "--log"]));
    assert_eq!((ran.stdout.as_str(), ran.code()), ("a b --log\n", 7), "{}", ran.stderr);
    assert_eq!(run(&["--", "sh", "-c", "kill -TERM $$"]).status().unwrap().signal(), Some(15));
    assert_eq!(run(&["--", "sh", "-c", "kill -PIPE $$"]).status().unwrap().signal(), Some(13), "not ignored");
}

#[test]
fn the_library_is_loaded_first_and_settings_reach_the_program() {
    let show =
        "echo $LD_PRELOAD; echo $PINPOOL_MAX_BYTES $PINPOOL_PRELOAD_STATS $PINPOOL_PRELOAD_SYNC $PINPOOL_PRELOAD_LOG";
    let mut command = run(&["max_bytes=2GiB", "--stats", "--sync", "--log", "relative", "--", "sh", "-c", show]);
    let ran = finish(command.env("LD_PRELOAD", library()));
    let log = std::path::absolute("relative").unwrap();
    assert_eq!(ran.stdout, format!("{0}:{0}\n2GiB 1 1 {1}\n", library(), log.display()), "{}", ran.stderr);
}

#[test]
fn the_help_names_frameworks_that_are_not_served() {
    let ran = finish(&mut pinpool(&["man", "run"]));
    for name in ["JAX", "current TensorFlow", "SGLang", "pinned_use_cuda_host_register", "cuMemHostRegister"] {
        assert!(ran.stdout.contains(name), "no {name} in {}", ran.stdout);
    }
}

#[test]
fn a_program_that_cannot_run_has_the_exit_status_of_a_shell() {
    let folder = tempfile::tempdir().unwrap();
    let ran = finish(&mut run(&["--", "no-such-program-anywhere"])).exits(127);
    ran.check_stderr("no-such-program-anywhere: No such file");
    finish(&mut run(&["--", &script(&folder, "#!/bin/sh\n", 0o644)])).exits(126).check_stderr("Permission denied");
    finish(&mut run(&["--", "./no/such/path"])).exits(127);
}

#[test]
fn wrong_settings_and_a_missing_library_start_nothing() {
    finish(&mut run(&["max_byte=2GiB", "--", "echo", "started"])).refuses(2).check_stderr("MAX_BYTE");
    finish(&mut run(&["echo", "--", "echo", "started"])).refuses(2);
    let ran = finish(run(&["--", "echo", "started"]).env("PINPOOL_PRELOAD_LIB", "/nowhere/lib.so")).refuses(1);
    ran.check_stderr("PINPOOL_PRELOAD_LIB=/nowhere/lib.so: No such file");
    let (_folder, copy) = scratch("pinpool");
    fs::hard_link(env!("CARGO_BIN_EXE_pinpool"), &copy)
        .or_else(|_| fs::copy(Path::new(env!("CARGO_BIN_EXE_pinpool")), &copy).map(drop))
        .unwrap();
    let ran =
        finish(Command::new(&copy).args(["run", "--", "echo", "started"]).env_remove("PINPOOL_PRELOAD_LIB")).refuses(1);
    ran.check_stderr("cargo build --release -p pinpool-preload");
}

#[test]
fn a_program_that_preloads_nothing_runs_with_a_warning() {
    let folder = tempfile::tempdir().unwrap();
    let ran = finish(&mut run(&["--", &script(&folder, "#!/bin/sh\necho ran\n", 0o4755)]));
    assert_eq!((ran.code(), ran.stdout.as_str()), (0, "ran\n"), "set-user-ID has no effect on a script");
    let source = written(folder.path(), "static.c", "int main(void) { return 5; }\n");
    let program = folder.path().join("static");
    let compiled = Command::new("cc").arg("-static").arg(source).arg("-o").arg(&program).output();
    if !compiled.is_ok_and(|compiled| compiled.status.success()) {
        return;
    }
    let ran = finish(&mut run(&["--", program.to_str().unwrap()])).exits(5);
    ran.check_stderr(
        "neither dynamically linked for this machine nor a script: its memory is not served from the pool",
    );
}

#[test]
fn a_log_that_cannot_be_written_is_refused_before_the_program_starts() {
    let (folder, started) = scratch("started");
    let missing = folder.path().join("missing/log");
    for log in [missing.to_str().unwrap(), folder.path().to_str().unwrap(), "/proc/self/status/log"] {
        let ran = finish(&mut run(&["--log", log, "--", "touch", started.to_str().unwrap()]));
        assert_eq!(ran.code(), 2, "{log}: {}", ran.stderr);
        ran.check_stderr("cannot be written: ");
        assert!(!started.exists(), "{log}");
    }
    let link = folder.path().join("link");
    symlink("target", &link).unwrap();
    for log in [&folder.path().join("log-%p"), &link] {
        finish(&mut run(&["--log", log.to_str().unwrap(), "--", "true"])).exits(0);
    }
    assert!(link.is_symlink());
}

#[test]
fn an_unknown_setting_names_the_options() {
    for setting in ["log=x", "verbose"] {
        finish(&mut run(&[setting, "--", "true"])).exits(2).check_stderr("--log FILE, --stats and --sync");
    }
}

#[test]
fn variables_of_the_library_are_known() {
    let ran = finish(pinpool(&["env"]).env("PINPOOL_PRELOAD_LOG", "x").env("PINPOOL_PRELOADED", "x"));
    assert!(!ran.stderr.contains("PINPOOL_PRELOAD_LOG"), "{}", ran.stderr);
    ran.check_stderr("PINPOOL_PRELOADED=x: unknown and ignored");
}
