//! Name lookups beyond the ways that `programs` tests.

use std::process::Command;

use crate::fixture::{Lookup, build, library, run_to_success, skipped};

#[test]
fn lookups_without_a_driver_and_with_rtld_next_are_unchanged() {
    let run = |preload: bool| {
        let mut command = Command::new(build().path().join("symbols"));
        build().environment(&mut command);
        command.envs(preload.then(|| ("LD_PRELOAD", library())));
        run_to_success(&mut command).out
    };
    let expected = "default 0, self 0, text 1, next 0\ninner outer\nputs 1, none 0\ndriver 0, unloaded 1\n";
    assert_eq!(run(false), expected);
    // `RTLD_NEXT` from the program itself finds the export of this library, as from any object that precedes it.
    assert_eq!(run(true), expected.replace("next 0", "next 1"));
}

#[test]
fn calls_pass_through_another_wrapper_library_once() {
    let alone = run_to_success(&mut build().command(Lookup::Linked, "steps"));
    let paths = [library(), build().path().join("libwrapper.so")].map(|path| path.display().to_string());
    let run = |preload: String| run_to_success(build().command(Lookup::Linked, "steps").env("LD_PRELOAD", preload));
    let ours_first = run(format!("{}:{}", paths[0], paths[1]));
    assert_eq!(ours_first.out, alone.out, "{ours_first:?}");
    assert!(ours_first.pin_calls() <= 8, "{ours_first:?}");
    assert!(ours_first.err.contains(&format!("wrapped {}", ours_first.pin_calls())), "{ours_first:?}");
    // The wrapper already has the real functions, so nothing is served.
    let ours_behind = run(format!("{}:{}", paths[1], paths[0]));
    assert_eq!((ours_behind.out, ours_behind.err.contains("wrapped 24")), (alone.out, true), "{}", ours_behind.err);
}

#[test]
fn only_driver_functions_and_dlsym_are_exported() {
    let Ok(output) = Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(library()).output() else {
        return skipped("no nm on this machine");
    };
    let text = String::from_utf8(output.stdout).unwrap();
    let exported: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(exported.len() >= 27, "{exported:?}");
    assert!(exported.iter().all(|name| name.starts_with("cu") || *name == "dlsym"), "{exported:?}");
}
