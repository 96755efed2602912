//! Looking names up, alongside the ways of `programs`.

use std::process::Command;

use crate::fixture::{Lookup, build, library, run_to_success, skipped};

#[test]
fn look_ups_without_a_driver_and_by_the_next_of_a_name_are_as_they_were() {
    let run = |preload: bool| {
        let mut command = Command::new(build().path().join("symbols"));
        build().environment(&mut command);
        command.envs(preload.then(|| ("LD_PRELOAD", library())));
        run_to_success(&mut command).out
    };
    let expected = "default 0, self 0, text 1, next 0\ninner outer\nputs 1, none 0\n";
    assert_eq!(run(false), expected);
    // `RTLD_NEXT` from the program itself finds the export of this library, as from everything that is before it.
    assert_eq!(run(true), expected.replace("next 0", "next 1"));
}

#[test]
fn another_library_before_the_driver_is_passed_once_and_not_in_a_circle() {
    let alone = run_to_success(&mut build().command(Lookup::Linked, "steps"));
    let paths = [library(), build().path().join("libwrapper.so")].map(|path| path.display().to_string());
    let run = |preload: String| run_to_success(build().command(Lookup::Linked, "steps").env("LD_PRELOAD", preload));
    let ours_first = run(format!("{}:{}", paths[0], paths[1]));
    assert_eq!(ours_first.out, alone.out, "{ours_first:?}");
    assert!(ours_first.pin_calls() <= 8, "{ours_first:?}");
    assert!(ours_first.err.contains(&format!("wrapped {}", ours_first.pin_calls())), "{ours_first:?}");
    // The other one has the real functions already, and nothing is served.
    let ours_behind = run(format!("{}:{}", paths[1], paths[0]));
    assert_eq!((ours_behind.out, ours_behind.err.contains("wrapped 24")), (alone.out, true), "{}", ours_behind.err);
}

#[test]
fn nothing_but_functions_of_the_driver_and_dlsym_is_exported() {
    let Ok(output) = Command::new("nm").args(["-D", "--defined-only", "--format=posix"]).arg(library()).output() else {
        return skipped("no nm on this machine");
    };
    let text = String::from_utf8(output.stdout).unwrap();
    let exported: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(exported.len() >= 27, "{exported:?}");
    assert!(exported.iter().all(|name| name.starts_with("cu") || *name == "dlsym"), "{exported:?}");
}
