//! `load --record` and `pinpool trace`: recording, printing and converting, and refused files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::tool::{finish, on, packed, pinpool, written};

/// A recorded load with these arguments.
pub(crate) fn recorded_load(dir: &Path, name: &str, args: &[&str]) -> PathBuf {
    let path = dir.join(name);
    finish(pinpool(&["load", "--json"]).args(args).arg("--record").arg(&path)).exits(0);
    path
}

/// Returns the recording of a load of a few hundred files, compressed if `name` ends in `gz`. Each kind is recorded only once.
pub(crate) fn recorded(dir: &Path, name: &str) -> PathBuf {
    static RECORDED: [OnceLock<Vec<u8>>; 2] = [const { OnceLock::new() }; 2];
    let bytes = RECORDED[usize::from(name.ends_with("gz"))].get_or_init(|| {
        let made = tempfile::tempdir().unwrap();
        fs::read(recorded_load(made.path(), name, &["--synthetic", "300", "--batch-bytes", "1MiB"])).unwrap()
    });
    written(dir, name, bytes)
}

#[test]
fn the_text_of_a_recording_is_replayed_like_the_recording() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["t.trace", "t.trace.gz"] {
        let path = recorded(dir.path(), name);
        let ran = on("trace", &path, &[]);
        assert_eq!((ran.code(), ran.stderr.as_str()), (0, ""));
        assert!(ran.stdout.contains("## pin: ") && ran.stdout.contains("## pool 0: PINPOOL_PRESET=adaptive"));
        let text = dir.path().join("text.trace");
        fs::write(&text, &ran.stdout).unwrap();
        let play = |path: &Path| {
            // The text contains no limit.
            let mut printed = on("replay", path, &["--json", "--set", "MAX_BYTES=none"]).exits(0).figures();
            // The text contains no pin calls to which the costs could be fitted.
            for key in ["workload", "costs", "driver_seconds", "lost_seconds"] {
                printed.as_object_mut().unwrap().remove(key).unwrap();
            }
            printed
        };
        let printed = play(&path);
        assert!(printed["gets"].as_u64().unwrap() > 20, "{printed}");
        assert_eq!(printed, play(&text));
    }
}

#[test]
fn unreadable_and_unwritable_files_are_errors_with_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let whole = fs::read(recorded(dir.path(), "t.trace")).unwrap();
    let file = |name: &str, bytes: &[u8]| written(dir.path(), name, bytes);
    let bomb = packed(&[&whole[..12], &vec![0; 64 << 20]].concat());
    let lines = packed(&vec![b'\n'; 5 << 20]);
    for (path, words) in [
        (file("bomb.gz", &bomb), "block of 0 bytes"),
        (file("lines.gz", &lines), "at most 4000000 lines"),
        (file("empty", b""), "no requests"),
        (file("noise", &[0xff; 5000]), "line 1"),
        (file("no_gets.trace", b"t 100\n"), "no requests"),
        (dir.path().join("absent"), "absent"),
        (dir.path().to_owned(), "directory"),
    ] {
        let name = path.file_name().unwrap().to_str().unwrap();
        for command in [vec!["advise"], vec!["replay", "--set", "PRESET=adaptive"]] {
            let ran = finish(pinpool(&command).arg(&path));
            assert_eq!(ran.code(), 1, "{command:?} {name}: {}{}", ran.stdout, ran.stderr);
            assert!(ran.stderr.contains(words) && ran.stderr.contains(name), "{command:?} {name}: {}", ran.stderr);
        }
    }
    // The intact part of a truncated file is used, and the exit status is 1. A cut between two blocks cannot be detected.
    let cut = file("cut.trace", &whole[..whole.len() - 1]);
    for command in [vec!["trace"], vec!["advise"], vec!["replay", "--json"]] {
        let ran = finish(pinpool(&command).arg(&cut));
        assert_eq!(ran.code(), 1, "{command:?}: {}", ran.stderr);
        assert!(!ran.stdout.is_empty(), "{command:?}");
        ran.check_stderr("cut.trace: the recording is truncated");
        ran.check_stderr(" records before that are read");
    }
    on("trace", &cut, &["-o", "/no/such/folder/out"]).exits(1).check_stderr("/no/such/folder/out: ");
}
