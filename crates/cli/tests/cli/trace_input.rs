//! `pinpool trace` on recordings without an end, and on empty and damaged ones.

use std::fs;
use std::path::Path;

use crate::record::recorded;
use crate::tool::on;

#[test]
fn a_pickle_is_refused_with_what_to_do_instead() {
    for name in ["host.4.pickle", "object.pickle"] {
        // A file that `generate.py` wrote.
        let path = Path::new(crate::ROOT).join("tests/data/torch_snapshot").join(name);
        for command in ["replay", "advise"] {
            let ran = on(command, &path, &[]).refuses(1);
            assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
            ran.check_stderr(&format!("{}: ", path.display()));
            ran.check_stderr("this is a pickle");
            ran.check_stderr("record a trace instead: PINPOOL_TRACE=FILE");
        }
    }
}

#[test]
fn version_0_and_empty_traces_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let whole = fs::read(recorded(dir.path(), "t.trace")).unwrap();
    let version_0 = [&whole[..8], &[0; 4], &whole[12..]].concat();
    let out = dir.path().join("out.json");
    for (name, bytes, why) in [
        ("zero.trace", version_0.as_slice(), "format version 0, and this build reads version 4"),
        ("head.trace", &whole[..12], "nothing to print"),
        ("half.trace", &whole[..10], "truncated in its head"),
        ("empty", b"", "not a recording"),
    ] {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        let ran = on("trace", &path, &["-o", out.to_str().unwrap()]);
        assert_eq!(ran.code(), 1, "{name}");
        ran.check_stderr(&format!("{name}: "));
        ran.check_stderr(why);
        assert!(!ran.stderr.contains("out.json") && !out.exists(), "{name}: {}", ran.stderr);
    }
}
