//! Call stacks of sampled requests.

use std::fs;
use std::path::Path;

use pinpool::unstable::{ManualClock, run_due_work};
use pinpool::{PinnedBuf, Pool};
use pinpool_observe::diagnosis::{Cause, diagnose_recording};
use pinpool_replay::{Event, Recording};

use crate::recordings::read_recording;
use crate::report::report;
use crate::tool::{finish, pinpool, scratch, until};

const GETS: usize = 1200;

#[inline(never)]
fn get_and_keep(pool: &Pool) -> PinnedBuf {
    pool.get(4096).unwrap()
}

/// A recording of ten minutes in which one buffer in twenty is not returned.
fn leaking(path: &Path) -> Recording {
    let clock = ManualClock::default();
    let builder =
        Pool::builder().without_env().backend(pinpool::Backend::Heap).call_stacks(1).unstable_clock(clock.clone());
    let pool = builder.trace(path.to_owned()).build().unwrap();
    for at in 0..GETS {
        match at % 20 {
            0 => std::mem::forget(get_and_keep(&pool)),
            _ => drop(pool.get(4096).unwrap()),
        }
        clock.advance_us(600_000_000 / GETS as u64);
        run_due_work(&pool);
    }
    // The recording has no end record while buffers are in use, and a new file has no header yet.
    let is_get = |event: &Event| matches!(event, Event::Get { .. });
    let gets = |read: Recording| read.records.iter().filter(|record| is_get(&record.event)).count();
    until("the gets are in the file", || read_recording(path).map_or(0, gets) == GETS);
    read_recording(path).unwrap()
}

#[test]
fn a_leak_is_named_by_the_function_that_got_it() {
    let (dir, path) = scratch("t.trace");
    let recording = leaking(&path);

    let page = dir.path().join("report.html");
    assert_eq!(report(&path, &page).code(), 0);
    let page = fs::read_to_string(page).unwrap();
    let row = page.lines().find(|line| line.contains("(untagged), most allocated at ")).unwrap();
    assert!(row.contains("::get_and_keep"), "{row}");

    let converted = |format: &str| {
        let out = dir.path().join(format);
        finish(pinpool(&["trace", "--format", format, "-o"]).arg(&out).arg(&path)).exits(0);
        String::from_utf8_lossy(&fs::read(out).unwrap()).into_owned()
    };
    let text = converted("text");
    assert!(text.lines().any(|line| line.contains("## sampled: ") && line.contains("::get_and_keep")), "{text}");
    // Each kept buffer appears in its entry, and in its block at the end.
    assert_eq!(converted("pytorch").matches("call_stacks::get_and_keep").count(), 2 * GETS / 20);

    let pools = diagnose_recording(&recording);
    let diagnosis = &pools[0].diagnosis;
    assert_eq!(diagnosis.cause, Cause::Leak, "{diagnosis}");
    assert!(diagnosis.found.ends_with("::get_and_keep)"), "{diagnosis}");
}

#[test]
fn load_keeps_call_stacks_if_asked_and_a_retired_setting_is_a_warning() {
    let (_dir, path) = scratch("t.trace");
    let load = ["load", "--synthetic", "2", "--call-stacks", "1", "--set", "CALL_STACKS=7,BACKEND=heap", "--record"];
    finish(pinpool(&load).arg(&path)).exits(0).check_stderr(
        "PINPOOL_CALL_STACKS=7: retired and ignored; set call_stacks in Rust or C, or use `pinpool load --call-stacks`",
    );
    let sampled = |event: &Event| matches!(event, Event::Sampled { .. });
    assert!(read_recording(&path).unwrap().records.iter().any(|record| sampled(&record.event)));
}
