//! `advise --try` and `advise`.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use pinpool::{Backend, Preset};
use pinpool_testing::{SinkMemory, SinkStream};
use serde_json::Value;

use crate::tool::{Ran, finish, heap, number, on, pinpool, scratch, written};

/// Returns a trace with batches of `held` buffers of each size, which are requested and returned together.
fn batches(rounds: usize, held: usize, sizes: &[u64]) -> String {
    let mut text = String::new();
    for _ in 0..rounds {
        let buffers = sizes.iter().cycle().take(held * sizes.len()).enumerate();
        for (id, size) in buffers.clone() {
            let _ = writeln!(text, "a {id} {size}");
        }
        text += "t 10000\n";
        for (id, _) in buffers {
            let _ = writeln!(text, "f {id}");
        }
        text += "t 10000\n";
    }
    text
}

#[test]
fn an_unpinned_pool_among_pinned_ones_is_named_before_any_setting() {
    let (_dir, path) = scratch("t.gz");
    let build =
        |name, backend| heap().name(name).backend(backend).trace(path.clone()).max_bytes(4 << 20).build().unwrap();
    let pools = [build("train", Backend::Mlock), build("eval", Backend::Heap)];
    let (stream, mut device) = (SinkStream::new().unwrap(), SinkMemory::new(4096));
    for pool in pools.iter().cycle().take(60) {
        pool.get(4096).unwrap().copy_to(&stream, &mut device).unwrap();
        stream.synchronize().unwrap();
    }
    drop(pools);
    on("advise", &path, &[]).refuses(1).check_stderr("t.gz: no setting of eval helps: not_pinned: ");
    let why = on("why", &path, &[]);
    assert!(why.code() == 1 && why.stdout.starts_with("eval: not_pinned: "), "{}", why.stdout);
}

#[test]
fn each_setting_has_a_column() {
    let dir = tempfile::tempdir().unwrap();
    let path = written(dir.path(), "w.trace", batches(400, 8, &[1 << 20, 300_000]));
    let replay = |args: &[&str]| on("replay", &path, args);
    let sets = ["--set=PRESET=tensorflow", "--set=pinpool_preset=tensorflow,POOL_SIZE_LIMIT=4", "--set=MAX_BYTES=6MiB"];
    let ran = replay(&sets).exits(0);
    for row in ["misses", "driver seconds", "most held", "waits"] {
        assert!(ran.stdout.contains(row), "no {row} in\n{}", ran.stdout);
    }

    let tried = on("advise", &path, &["--json", "--try", "PRESET=tensorflow", "--try", "MAX_BYTES=6MiB"]);
    let ran = replay(&[&sets[..], &["--json"]].concat());
    // `--try` prints the same columns.
    let of = |ran: &Ran, at: usize| ran.stdout.lines().nth(at).unwrap().to_owned();
    assert_eq!([of(&tried, 0), of(&tried, 1)], [of(&ran, 0), of(&ran, 2)], "{}", tried.stderr);
    let columns: Vec<Value> = ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let number = |at: usize, key: &str| number(&columns[at], key);
    assert_eq!(columns.len(), 3);
    // In the first column, all sixteen buffers are kept. In the second column, the limit of four evicts buffers.
    assert_eq!((number(0, "misses"), number(0, "raises"), number(0, "driver_calls")), (16, 0, 16));
    assert!(number(1, "misses") > 1000 && number(1, "raises") > 0 && number(1, "checks") > 0);
    assert!(number(2, "waits") > 0 && number(2, "peak_pinned_bytes") <= 6 << 20);
    for (at, column) in columns.iter().enumerate() {
        assert_eq!(number(at, "gets"), number(at, "front_hits") + number(at, "misses"), "{column}");
    }
    // In the second column each request and release is a driver call.
    assert!(columns[1]["driver_seconds"].as_f64().unwrap() > columns[0]["driver_seconds"].as_f64().unwrap());
    // A column does not depend on the others.
    let alone = replay(&["--json", "--set", "PRESET=tensorflow"]).figures();
    assert_eq!(alone["peak_pinned_bytes"], columns[0]["peak_pinned_bytes"]);
}

/// Checks that a setting is refused with these words and the usage status.
fn refused(command: &str, path: &Path, set: &[&str], words: &str) -> Ran {
    let ran = finish(pinpool(&[command]).args(set.iter().flat_map(|set| ["--set", set])).arg(path));
    assert_eq!((ran.code(), ran.stdout.as_str()), (2, ""), "{command} {set:?}");
    ran.check_stderr(words);
    ran
}

#[test]
fn settings_that_cannot_be_meant_or_have_no_effect_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = written(dir.path(), "w.trace", batches(2, 2, &[4096]));
    for (set, words) in [
        ("", "no setting is named"),
        (",", "no setting is named"),
        ("MAX_BYTES=1MiB,PINPOOL_MAX_BYTES=2MiB", "PINPOOL_MAX_BYTES is set twice"),
        ("MAX_BYTES=", "PINPOOL_MAX_BYTES has no value"),
        ("WAIT=soon", "PINPOOL_WAIT=soon: not a time"),
        ("NONSENSE=1", "unknown setting PINPOOL_NONSENSE"),
    ] {
        for command in ["load", "replay", "advise"] {
            refused(command, &path, &[set], words).check_stderr("--set <NAME=VALUE>");
        }
    }
    for (set, words) in [
        ("BACKEND=vmm", "PINPOOL_BACKEND has no effect in a replay"),
        ("MAX_BYTES=auto", "depends on the machine"),
        ("MAX_BYTES=lots", "PINPOOL_MAX_BYTES=lots"),
        ("MAX_BYTES", "is not NAME=VALUE"),
    ] {
        refused("replay", &path, &[set], words);
    }
    // Settings are combined over all --set arguments, and their names ignore case.
    for command in ["load", "advise"] {
        refused(command, &path, &["WAIT=1s", "wait=2s"], "--set WAIT=1s,wait=2s: PINPOOL_WAIT is set twice");
    }
}

/// Returns the advised settings in the syntax of `--set`, or `None` if the advice is to keep the given settings.
fn advised(advice: &Value) -> Option<String> {
    let settings = advice["advised"]["settings"].as_array()?;
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    Some(settings.iter().map(|pair| format!("{}={}", text(&pair[0]), text(&pair[1]))).collect::<Vec<_>>().join(","))
}

/// Checks that a replay under the advised settings costs what the advice says: no more time than the given settings, and no
/// more memory unless it saves time.
fn check(path: &Path) -> Value {
    let advice = on("advise", path, &["--json"]).exits(0).figures();
    let set = advised(&advice).unwrap_or_else(|| panic!("nothing is advised: {advice}"));
    let played = on("replay", path, &["--json", "--set", &set]).figures();
    for key in ["page_locks", "waits", "fallbacks", "peak_pinned_bytes"] {
        assert_eq!(played[key], advice["advised"][key], "{key} under {set}: {played}");
    }
    let lost = |of: &str| advice[of]["lost_seconds"].as_f64().unwrap();
    let peak = |of: &str| advice[of]["peak_pinned_bytes"].as_f64().unwrap();
    assert!(lost("advised") <= lost("as_given"), "{advice}");
    assert!(peak("advised") <= peak("as_given") * 1.02 || lost("advised") <= lost("as_given") * 0.9, "{advice}");
    advice
}

#[test]
fn the_advice_costs_no_more_when_replayed_and_less_memory_costs_more() {
    let dir = tempfile::tempdir().unwrap();
    let path = written(dir.path(), "w.trace", batches(200, 20, &[1 << 20, 300_000, 70_000, 9_000]));
    let advice = check(&path);
    let peak = advice["peak_requested_bytes"].as_u64().unwrap();
    let set = advised(&advice).unwrap();
    let max_bytes: u64 = set.rsplit_once("PINPOOL_MAX_BYTES=").unwrap().1.parse().unwrap();
    assert!(max_bytes >= peak && max_bytes < peak * 3 / 2, "{advice}");
    let points = advice["frontier"].as_array().unwrap();
    let limits: Vec<_> = points.iter().map(|point| point["max_bytes"].as_u64().unwrap()).collect();
    assert!(limits.is_sorted() && limits.contains(&max_bytes), "{limits:?}");

    let played = on("replay", &path, &["--json", "--set", &format!("MAX_BYTES={}", peak * 4 / 5)]).figures();
    assert!(played["waits"].as_u64().unwrap() > 1000, "{played}");

    let text = on("advise", &path, &["--set", "idle_timeout=5min"]).stdout;
    for line in ["export PINPOOL_MAX_BYTES=", "export PINPOOL_IDLE_TIMEOUT=5min", "as given", "10 % above the smallest"]
    {
        assert!(text.contains(line), "no {line} in\n{text}");
    }
}

#[test]
fn repinning_after_each_pause_leads_to_an_advised_reserve() {
    let dir = tempfile::tempdir().unwrap();
    let burst = |n: u64| {
        let gets = (0..8).map(|id| format!("a {id} {}\n", (24 << 20) + n % 3));
        gets.chain((0..8).map(|id| format!("t 100000\nf {id}\n")))
            .chain(["t 120000000\n".to_owned()])
            .collect::<String>()
    };
    let path = written(dir.path(), "w.trace", (0..20).map(burst).collect::<String>());
    let advice = check(&path);
    assert!(number(&advice["as_given"], "page_locks") > 5 * number(&advice["advised"], "page_locks"), "{advice}");
    let tried: Vec<_> = advice["tried"].as_array().unwrap().iter().map(|one| one["set"].as_str().unwrap()).collect();
    assert!(tried.len() == 2 && tried[0] == "IDLE_TIMEOUT=none" && tried[1].starts_with("RESERVE="), "{advice}");
    assert!(advised(&advice).unwrap().contains("PINPOOL_MAX_BYTES="), "{advice}");
    // The user's settings are fixed.
    let ran = on("advise", &path, &["--json", "--set", "IDLE_TIMEOUT=1s,RESERVE=none"]).figures();
    assert_eq!(ran["tried"].as_array().unwrap().len(), 0, "{ran}");
}

#[test]
fn the_given_settings_are_those_of_the_recording() {
    let (_dir, path) = scratch("t.gz");
    let set = "PRESET=tensorflow,ROUNDING=exact,POOL_SIZE_LIMIT=1,AUTO_RESIZE=0,MAX_BYTES=1GiB";
    let args = ["load", "--json", "--synthetic", "300", "--batch-bytes", "1MiB", "--set", set];
    finish(pinpool(&args).arg("--record").arg(&path)).exits(0);
    // Each returned buffer is released, and each request pins memory.
    let advice = on("advise", &path, &["--json"]).figures();
    assert!(advice["as_given"]["page_locks"].as_u64() > Some(30), "{advice}");
    assert_eq!(advice["as_given"]["max_bytes"], 1 << 30);
    assert!(advice["tried"].as_array().unwrap().is_empty(), "{advice}");
    assert!(
        on("advise", &path, &[])
            .stdout
            .contains("keep what you have: no timeout or reserve saves enough time to matter"),
        "{advice}"
    );
}

#[test]
fn no_limit_moves_calls_into_the_requests_of_a_program_that_waits_for_calls() {
    let dir = tempfile::tempdir().unwrap();
    let path = written(dir.path(), "w.trace", batches(400, 8, &[8 << 20, 5 << 20]));
    let advised = |set: &str| on("advise", &path, &["--json", "--set", set]).figures()["advised"].clone();
    let each_time = "PRESET=tensorflow,POOL_SIZE_LIMIT=1,AUTO_RESIZE=0";
    assert!(advised(each_time).is_null());
    let why = "keep what you have: no timeout or reserve saves enough time to matter, and a lower limit moves calls";
    assert!(on("advise", &path, &["--set", each_time]).stdout.contains(why));
    assert!(advised("PRESET=tensorflow")["settings"].is_array(), "few calls");
}

#[test]
fn a_recording_names_the_settings_made_in_code() {
    let (_dir, path) = scratch("run.gz");
    drop(heap().preset(Preset::TensorFlow).trace(path.clone()).build().unwrap().get(8 << 20).unwrap());
    let text = on("trace", &path, &[]).stdout;
    assert!(text.contains("set_in_code=PINPOOL_BACKEND PINPOOL_TRACE PINPOOL_PRESET\n"), "{text}");
}

#[test]
fn after_a_failed_request_why_and_advise_name_the_missing_memory() {
    let (_dir, path) = scratch("run.gz");
    let pool = heap().max_bytes(8 << 20).wait(Duration::from_millis(200)).trace(path.clone()).build().unwrap();
    (0..50).for_each(|_| drop(pool.get(1 << 20).unwrap()));
    let held: Vec<_> = (0..6).map(|_| pool.get(1 << 20).unwrap()).collect();
    assert!(pool.get(3 << 20).unwrap_err().is_limit());
    drop((held, pool));
    let why = on("why", &path, &[]).stdout;
    for part in [
        "limit_too_small: too much memory is in use",
        "raise PINPOOL_MAX_BYTES to 9.0MiB",
        "\n  in the whole recording, 1 of 57 requests waited or failed\n",
    ] {
        assert!(why.contains(part), "no {part} in\n{why}");
    }
    let ran = on("advise", &path, &[]).refuses(1);
    ran.check_stderr("1 request failed under the limit, and no replay shows");
    ran.check_stderr("raise PINPOOL_MAX_BYTES to 9.0MiB; then record it again");
}
