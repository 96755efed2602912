//! `pinpool-bench soak`: short runs, and runs that must fail.

use serde_json::Value;

use crate::{bench, run};
use test_common::tool::{finish, interrupted, number};

const SHORT: [&str; 5] = ["soak", "--json", "--ops", "40000", "--seed"];

#[test]
fn a_short_soak_is_clean_and_its_counts_add_up() {
    for (backend, threads) in [("heap", "1"), ("auto", "3")] {
        let variables = [("PINPOOL_BACKEND", backend), ("PINPOOL_TRACE", "/dev/zero")];
        let ran = finish(bench(&SHORT).args(["7", "--threads", threads]).envs(variables));
        assert_eq!(ran.code(), 0, "{backend}: {}", ran.stderr);
        let report = ran.figures();
        assert!(backend == "auto" || report["backend"] == backend, "{report}");
        let of = |name: &str| number(&report, name);
        assert!(of("ops") >= 40_000, "{report}");
        assert_eq!(of("ops"), of("gets") + of("puts") + of("copies") + of("given") + of("taken"));
        assert_eq!((of("gets"), of("given"), of("bad_checks")), (of("puts"), of("taken"), 0));
        // Each buffer is checked before its return, and after each copy.
        assert_eq!(of("checks"), of("puts") + of("copies"));
        assert!(of("copies") > 0 && of("given") > 0 && report["failures"].as_array().unwrap().is_empty(), "{report}");
        for at in ["start_bytes", "warm_bytes", "end_bytes"] {
            assert!(report["resident"][at].as_u64().unwrap() > 0, "{at}: {report}");
        }
    }
}

#[test]
fn a_soak_on_the_mock_driver_copies_to_it() {
    let lib = tempfile::tempdir().unwrap();
    let lib = crate::mock_driver(lib.path());
    for backend in ["vmm", "register", "cuda"] {
        let ran = finish(bench(&SHORT).args(["3", "--backend", backend]).env("LD_LIBRARY_PATH", &lib));
        assert_eq!(ran.code(), 0, "{backend}: {}", ran.stderr);
        assert_eq!(ran.figures()["backend"], backend);
        assert!(number(&ran.figures(), "copies") > 0);
    }
}

#[test]
fn an_interrupted_soak_prints_its_report() {
    let mut command = bench(&["soak", "--json", "--seconds", "60", "--threads", "2"]);
    // The interrupt handler is installed before the first line of the log.
    command.env("RUST_LOG", "info");
    let (_, stdout) = interrupted(&mut command);
    let report: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((number(&report, "bad_checks"), number(&report, "gets")), (0, number(&report, "puts")));
}

#[test]
fn a_soak_of_no_operations_is_refused() {
    assert_eq!(run(&["soak", "--ops", "0"]).code(), 2);
}
