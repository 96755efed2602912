//! Runs `steps.c` with and without the library and compares the output.

use std::process::Command;

use crate::fixture::{LOOKUPS, Lookup, ProgramRun, build, library, log_of, preload, run_to_success, tool};

/// Runs the program alone and served, checks that both print the same, and returns both results and the log.
fn run_alone_and_served(lookup: Lookup, what: &str) -> (ProgramRun, ProgramRun, String) {
    let (alone, (served, log)) = (run_to_success(&mut build().command(lookup, what)), run_served(lookup, what, &[]));
    assert_eq!(alone.out, served.out, "{lookup:?}\n{log}");
    (alone, served, log)
}

/// Runs the program served, with these variables, and returns its result and the log.
fn run_served(lookup: Lookup, what: &str, variables: &[(&str, &str)]) -> (ProgramRun, String) {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    (run_to_success(preload(build().command(lookup, what), &log).envs(variables.iter().copied())), log_of(&log))
}

#[test]
fn every_lookup_gives_the_same_output_with_fewer_pin_calls() {
    for lookup in LOOKUPS {
        let (alone, served, log) = run_alone_and_served(lookup, "steps");
        assert_eq!((alone.pin_calls(), alone.calls("cuMemFreeHost")), (24, 24), "{lookup:?}: {alone:?}");
        assert!(served.pin_calls() <= 8, "{lookup:?}: {served:?}");
        assert_eq!(served.calls("cuMemFreeHost"), 0, "{lookup:?}: {served:?}");
        assert_eq!(served.calls("cuCtxRecordEvent"), 24, "{lookup:?}: {served:?}");
        assert_eq!(served.calls("cuDevicePrimaryCtxGetState"), 3, "only the first free looks for contexts: {served:?}");
        assert!(log.contains("preset=adaptive backend=cuda pinned=driver"), "{lookup:?}: {log}");
    }
}

#[test]
fn pinpool_run_serves_memory_and_keeps_the_output() {
    let Some(tool) = tool() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (log, program) = (folder.path().join("log"), build().command(Lookup::Dlsym, "steps"));
    let mut command = Command::new(tool);
    command.arg("run").arg("max_bytes=64MiB").arg("--stats").arg("--log").arg(&log).arg("--");
    command.arg(program.get_program()).args(program.get_args());
    build().environment(&mut command);
    let (alone, served, log) =
        (run_to_success(&mut build().command(Lookup::Dlsym, "steps")), run_to_success(&mut command), log_of(&log));
    assert_eq!(alone.out, served.out);
    assert!(served.pin_calls() <= 8, "{served:?}");
    for line in ["backend=cuda pinned=driver", "PINPOOL_MAX_BYTES=64MiB (variable)", "requests: served=24 "] {
        assert!(log.contains(line), "no `{line}` in {log}");
    }
}

#[test]
fn threads_may_free_buffers_during_their_copies() {
    let (alone, served, _) = run_alone_and_served(Lookup::Dlsym, "threads");
    assert!(served.pin_calls() < alone.pin_calls() / 2, "{served:?}");
}

#[test]
fn driver_queries_treat_buffers_as_driver_memory() {
    for lookup in [Lookup::Linked, Lookup::ProcAddress] {
        let (alone, ..) = run_alone_and_served(lookup, "facts");
        assert!(alone.out.contains("4: device 1 1 1, refused"), "{}", alone.out);
    }
}

#[test]
fn invalid_calls_fail_as_they_do_without_the_library() {
    for lookup in LOOKUPS {
        let (.., log) = run_alone_and_served(lookup, "misuse");
        let lines = ["not served by the pool, but by the driver's own function: write-combined", "flags 0xf0"];
        assert!(lines.iter().all(|line| log.contains(line)), "{lookup:?}: {log}");
    }
}

#[test]
fn a_capture_in_progress_stays_valid_and_memory_in_flight_is_not_reused() {
    let alone = run_to_success(&mut build().command(Lookup::Dlsym, "capture"));
    assert!(alone.out.contains("end of the capture 901"), "the driver alone invalidates it: {alone:?}");
    for lookup in LOOKUPS {
        let expected = "free during a capture 0\nend of the capture 0\ncopied 11 11\nreplayed 22 22\n";
        let (served, log) = run_served(lookup, "capture", &[]);
        assert_eq!(served.out, expected, "{lookup:?}: {log}");
        // The library queried events only after the capture.
        assert!(!log.contains("invalidated"), "{log}");
        // A refused end leaves the capture in progress, unless it was over before.
        let (served, log) = run_served(lookup, "refused-ends", &[]);
        assert_eq!(served.out, "end by another thread 908\nunseen end 0\nsecond end 903\n", "{lookup:?}: {log}");
        assert!(served.calls("cuCtxRecordEvent") >= 24 && served.pin_calls() <= 9, "{lookup:?}: {served:?}\n{log}");
    }
}

#[test]
fn a_forked_child_is_not_served_and_its_parent_continues() {
    let (alone, (served, log)) =
        (run_to_success(&mut build().command(Lookup::Dlsym, "fork")), run_served(Lookup::Dlsym, "fork", &[]));
    assert!(served.out.starts_with("child 0, then "), "{served:?}\n{log}");
    // In a new PID namespace, the child may have its parent's process ID.
    let preloaded = format!("{}:{}", library().display(), build().path().join("libsame_pid.so").display());
    let (served, log) = run_served(Lookup::Dlsym, "fork", &[("LD_PRELOAD", &preloaded)]);
    assert!(served.out.starts_with("child 0, then "), "{served:?}\n{log}");
    let sums = [&alone, &served].map(|ran| ran.out.split_once("then").unwrap().1.to_owned());
    assert_eq!(sums[0], sums[1]);
}

#[test]
fn the_next_context_is_served_after_a_device_reset() {
    let (_, served, log) = run_alone_and_served(Lookup::ProcAddress, "reset");
    assert!(log.contains("has ended, and its memory with it"), "{log}");
    assert_eq!(log.matches("backend=cuda pinned=driver").count(), 2, "{log}");
    assert!(served.pin_calls() <= 16, "{served:?}");
}

/// As on a device, the runtime retains a context through a private table, the next context has the handle of the old context,
/// and the memory of the old context is unmapped. A hook sees the reset, or no hook sees it.
#[test]
fn memory_of_an_unseen_context_is_not_reused_after_a_reset() {
    let adversarial = ("MOCK_DRIVER_ADVERSARIAL", "RecurringHandles,ResetUnmaps,DeadEventAborts");
    let variables = [adversarial, ("PINPOOL_PRELOAD_STATS", "1")];
    // An unseen reset must not coincide with a query of an event, so there each free waits for its events.
    for (what, sync) in [("reset-by-table", "0"), ("reset-unseen", "1")] {
        let variables = [&variables[..], &[("PINPOOL_PRELOAD_SYNC", sync)]].concat();
        let (served, log) = run_served(Lookup::ProcAddress, what, &variables);
        assert_eq!(log.matches("requests: served=").count(), 2, "of the context that ended, and of the other: {log}");
        assert!(served.out.contains("the same handle"), "{what}: {served:?}\n{log}");
        assert_eq!(log.matches("has ended, and its memory with it").count(), 1, "{log}");
        assert_eq!(served.calls("cuMemHostAlloc"), 2, "{what}: one region for each context: {served:?}\n{log}");
    }
}

#[test]
fn memory_is_not_zeroed_during_or_after_a_reset() {
    let adversarial = ("MOCK_DRIVER_ADVERSARIAL", "ResetUnmaps");
    let variables = [adversarial, ("PINPOOL_ZERO", "1"), ("PINPOOL_MAX_BYTES", "512MiB")];
    for what in ["zero-reset", "reset-while-zeroing"] {
        let (served, log) = run_served(Lookup::ProcAddress, what, &variables);
        assert!(served.out.contains("alive") && log.contains("has ended"), "{served:?}\n{log}");
    }
}

#[test]
fn a_capture_ends_with_its_context() {
    for lookup in [Lookup::Dlsym, Lookup::ProcAddress] {
        let (_, served, log) = run_alone_and_served(lookup, "ends-capturing");
        assert!(served.calls("cuCtxRecordEvent") >= 48 && served.pin_calls() <= 16, "{lookup:?}: {served:?}\n{log}");
        assert!(!log.contains("not served"), "{lookup:?}: {log}");
    }
}

#[test]
fn requests_above_the_limit_do_not_wait_for_captures_or_stuck_work() {
    // 40 waits would exceed the time limit of a test.
    for (what, wait) in [("over-captured", "1h"), ("over-held", "2s")] {
        let (ran, log) = run_served(Lookup::Dlsym, what, &[("PINPOOL_MAX_BYTES", "4MiB"), ("PINPOOL_WAIT", wait)]);
        assert_eq!(ran.out, "over\n", "{log}");
        assert!(ran.pin_calls() > 30, "{what}: {ran:?}");
    }
}

#[test]
fn a_free_waits_only_with_the_option_sync() {
    let (ready, not_ready) = ("after the free 0\n", "after the free 600\n");
    assert_eq!(run_to_success(&mut build().command(Lookup::Dlsym, "barrier")).out, ready);
    // The copy ends only after the free.
    assert_eq!(run_served(Lookup::Dlsym, "barrier", &[("HOLD", "1")]).0.out, not_ready);
    for failing in ["", "cuEventCreate:1=2"] {
        let variables = [("PINPOOL_PRELOAD_SYNC", "1"), ("MOCK_DRIVER_FAIL", failing)];
        assert_eq!(run_served(Lookup::Dlsym, "barrier", &variables).0.out, ready);
    }
}

#[test]
fn a_full_or_misconfigured_pool_leaves_allocation_to_the_driver() {
    let alone = run_to_success(&mut build().command(Lookup::Dlsym, "steps"));
    for (name, value, reason) in [
        ("PINPOOL_MAX_BYTES", "64KiB", "do not fit within the limit"),
        ("PINPOOL_MAX_BYTES", "much", "the pool could not be created, "),
        ("MOCK_DRIVER_FAIL", "cuMemHostAlloc:1=2,cuMemHostAlloc:2=2", "CUDA_ERROR_OUT_OF_MEMORY"),
    ] {
        let (ran, log) = run_served(Lookup::Dlsym, "steps", &[(name, value)]);
        assert!(ran.out == alone.out && log.contains(reason), "{name}={value}: {ran:?}\n{log}");
        // Only a free of served memory looks for contexts.
        assert_eq!(ran.calls("cuDevicePrimaryCtxGetState") > 0, name == "MOCK_DRIVER_FAIL", "{ran:?}");
    }
}

#[test]
fn a_refused_event_is_recorded_later_and_loses_no_memory() {
    let alone = run_to_success(&mut build().command(Lookup::Dlsym, "steps"));
    for refused in ["cuEventCreate:1=2", "cuCtxRecordEvent:1=2", "cuCtxRecordEvent:2=999"] {
        let (served, log) = run_served(Lookup::Dlsym, "steps", &[("MOCK_DRIVER_FAIL", refused)]);
        assert_eq!(served.out, alone.out, "{refused}: {log}");
        // A sweep repeats the refused record.
        assert_eq!(served.calls("cuCtxRecordEvent"), if refused.starts_with("cuEvent") { 24 } else { 25 }, "{refused}");
        assert!(served.pin_calls() <= 8 && !log.contains(" quarantined: "), "{refused}: {log}");
    }
}

#[test]
fn an_unseen_capture_or_a_green_context_stops_the_service_once() {
    // The default stream reveals a capture on a stream that is ordered with it.
    let (blocking, log) = run_served(Lookup::Dlsym, "unseen-blocking", &[]);
    assert!(blocking.out.starts_with("end of the capture 0\n"), "{blocking:?}");
    let is_served = ["not served", "no longer served"].iter().all(|text| !log.contains(text));
    assert!(blocking.pin_calls() <= 8 && is_served, "{blocking:?}");
    let (other, log) = run_served(Lookup::Dlsym, "unseen", &[]);
    assert!(other.out.starts_with("end of the capture 901\n"), "{other:?}");
    assert_eq!(other.out.lines().last(), blocking.out.lines().last());
    assert_eq!((other.calls("cuCtxRecordEvent"), other.calls("cuMemFreeHost")), (1, 24), "{other:?}");
    assert_eq!(log.matches("no longer served").count(), 1, "{log}");
    // Memory that is freed after the green context was created is not reused.
    let (green, log) = run_served(Lookup::Dlsym, "green", &[]);
    assert_eq!((&*green.out, green.calls("cuCtxRecordEvent"), green.calls("cuMemFreeHost")), ("reused 0\n", 1, 8));
    assert_eq!(log.matches("no longer served: the program has created a green context").count(), 1, "{log}");
}

#[test]
fn a_buffer_is_reused_after_the_work_of_every_device() {
    for lookup in [Lookup::Linked, Lookup::ProcAddress] {
        let (alone, served, log) = run_alone_and_served(lookup, "devices");
        assert_eq!([alone.out, served.out.clone()], ["arrived 44 44\n"; 2], "{lookup:?}\n{log}");
        assert_eq!(served.calls("cuCtxRecordEvent"), 2, "{lookup:?}: {served:?}");
        let (served, _) = run_served(lookup, "switches", &[]);
        assert!((1000..1020).contains(&served.calls("cuCtxGetId")), "a switch queries one context: {served:?}");
    }
}

/// As on a device, the runtime retains a primary context and makes it current by private functions.
#[test]
fn a_buffer_is_reused_after_the_work_of_unseen_primary_contexts() {
    let recurring = "RecurringHandles,ResetUnmaps,DeadEventAborts";
    for (what, switches) in [
        ("devices-unseen", recurring),
        ("devices-reset-unseen", recurring),
        ("devices-reset-unseen", "ResetUnmaps,DeadEventAborts"),
    ] {
        let variables = [("HOLD", "1"), ("MOCK_DRIVER_ADVERSARIAL", switches)];
        let (served, log) = run_served(Lookup::Dlsym, what, &variables);
        assert_eq!(served.out, "arrived 44 44\n", "{log}");
        assert_eq!(served.calls("cuCtxRecordEvent"), 4, "{what}: two frees, and a new context: {served:?}");
        // The program itself retains one context by this function. The library releases each reference that it takes.
        let calls = ["cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2"].map(|name| served.calls(name));
        assert_eq!(calls[0], 1 + calls[1], "{what}: {served:?}");
    }
}

#[test]
fn registered_memory_is_not_served_and_is_logged_once_at_exit() {
    for lookup in LOOKUPS {
        let (_, served, log) = run_alone_and_served(lookup, "registers");
        assert_eq!(served.calls("cuMemHostRegister_v2"), 3, "{lookup:?}: {served:?}");
        let line = "not served: the program pinned its own memory by 3 calls of cuMemHostRegister (24576 bytes)";
        assert_eq!((log.matches(line).count(), log.lines().count()), (1, 1), "{lookup:?}: {log}");
    }
}

#[test]
fn a_refused_registration_is_not_counted() {
    for (failing, lines) in [("cuMemHostRegister_v2:2=2", 1), ("cuMemHostRegister_v2:1+=2", 0)] {
        let (_, log) = run_served(Lookup::Dlsym, "registers", &[("MOCK_DRIVER_FAIL", failing)]);
        assert_eq!((log.matches("by 2 calls of").count(), log.lines().count()), (lines, lines), "{failing}: {log}");
    }
}

#[test]
fn the_programs_detect_memory_that_is_reused_too_early() {
    let folder = tempfile::tempdir().unwrap();
    let completed_events = build().path().join("libcompleted_events.so");
    for (what, noticed) in [("steps", "is wrong"), ("devices", "arrived 55 55")] {
        let mut command = preload(build().command(Lookup::Dlsym, what), &folder.path().join("log"));
        command.env("HOLD", "1").env("LD_PRELOAD", format!("{}:{}", library().display(), completed_events.display()));
        let output = command.output().unwrap();
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(out.contains(noticed), "{what}: {output:?}");
    }
}
