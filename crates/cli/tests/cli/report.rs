//! `pinpool report`: the charts of logs and recordings, and messages if there is nothing to draw.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::TREND;
use crate::record::recorded_load;
use crate::tf_lines::{AFTER, RAISE, after, public_rows};
use crate::tool::{Ran, finish, heap, pinpool, recorded_pools, run, scratch, written};

pub(crate) fn report(input: &Path, output: &Path) -> Ran {
    finish(pinpool(&["report"]).arg(input).arg("-o").arg(output))
}

/// The page of `input`.
fn page(input: &Path) -> String {
    let (_dir, output) = scratch("report.html");
    let ran = report(input, &output);
    assert_eq!((ran.code(), ran.stderr.as_str()), (0, ""));
    fs::read_to_string(output).unwrap()
}

/// Returns name, shape and number of points of each series in the chart `id`.
fn series(page: &str, id: &str) -> Vec<(String, String, usize)> {
    let data = data(page);
    let figure = data["charts"].as_array().unwrap().iter().find(|figure| figure["id"] == id);
    let figure = figure.unwrap_or_else(|| panic!("no figure {id}"));
    let series = figure["panels"].as_array().unwrap().iter().flat_map(|panel| panel["series"].as_array().unwrap());
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    series.map(|one| (text(&one["name"]), text(&one["shape"]), one["points"].as_array().unwrap().len())).collect()
}

/// Returns the number of points of the series `name`.
fn points(page: &str, id: &str, name: &str) -> usize {
    let series = series(page, id);
    series.iter().find(|one| one.0 == name).unwrap_or_else(|| panic!("no {name} in {series:?}")).2
}

/// The object that the page draws.
fn data(page: &str) -> Value {
    let (_, rest) = page.split_once("<script type=\"application/json\" id=\"report\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn a_log_has_its_limit_with_raises_its_evictions_and_the_diagnosis() {
    let dir = tempfile::tempdir().unwrap();
    let rows = public_rows().into_iter().filter(|row| row.run == "r103");
    let log = written(dir.path(), "train.log", rows.map(|row| row.message() + "\n").collect::<String>());
    let ran = run(&["inspect", "--json", log.to_str().unwrap()]);
    let summary: Value = serde_json::from_str(ran.stdout.lines().last().unwrap()).unwrap();
    let page = page(&log);
    assert!(points(&page, "limit", "raise") > 5 && points(&page, "limit", "evictions") > 5);
    let trend = summary["pools"][0][TREND].as_str().unwrap();
    assert!(page.contains(trend) && page.contains(summary["pools"][0]["advice"][0].as_str().unwrap()), "{trend}");
}

#[test]
fn two_pools_have_series_of_different_names() {
    let dir = tempfile::tempdir().unwrap();
    let start_again = format!("{}\n{RAISE}\n", after("2030", "2030", "1000", "0.492611", "0.541872"));
    let page = page(&written(dir.path(), "two.log", format!("{AFTER}\n{RAISE}\n{start_again}")));
    for name in ["limit of pool 1", "limit of pool 2", "evictions"] {
        assert!(points(&page, "limit", name) > 0, "{name}");
    }
    assert_eq!(points(&page, "limit", "raise"), 2);
    assert!(page.contains("The limit on idle buffers of pool 1 is 100 at first and 110 at the end. "), "{page}");
}

#[test]
fn the_page_needs_no_network_and_serves_both_color_schemes_phones_and_paper() {
    let page = page(&written(tempfile::tempdir().unwrap().path(), "train.log", format!("{AFTER}\n{RAISE}\n")));
    for part in
        ["prefers-color-scheme:dark", "@media print", "name=\"viewport\"", "<html lang=\"en\">", "default-src 'none'"]
    {
        assert!(page.contains(part), "{part}");
    }
    assert_eq!(data(&page)["charts"][0]["id"], "limit");
    assert!(page.len() < 100_000, "{}", page.len());
}

/// A recording with requests that pin memory.
fn recorded(dir: &TempDir, name: &str) -> PathBuf {
    let args = ["--synthetic", "60", "--batch-files", "4", "--set", "POOL_SIZE_LIMIT=1,MAX_BYTES=none"];
    recorded_load(dir.path(), name, &args)
}

#[test]
fn a_recording_has_its_bytes_and_its_pin_times() {
    let page = page(&recorded(&tempfile::tempdir().unwrap(), "trace.gz"));
    assert!(data(&page)["charts"][0]["x"]["clock"].as_f64() > Some(1e9));
    for (id, name) in [("bytes", "in use"), ("bytes", "in flight"), ("bytes", "pin or unpin")] {
        assert!(points(&page, id, name) > 0, "{id}: {name}");
    }
    assert!(page.contains("backend heap, recorded by pinpool") && page.contains(" held; no limit."), "{page}");
}

#[test]
fn the_hit_rate_is_over_the_requests_that_were_served() {
    let (_dir, path) = scratch("t.gz");
    let pool = heap().max_bytes(1 << 20).wait(Duration::ZERO).trace(path.clone()).build().unwrap();
    drop(pool.get(1 << 20).unwrap());
    let held = pool.get(1 << 20).unwrap();
    assert!(pool.get(1 << 20).is_err());
    drop((held, pool));
    assert_eq!(data(&page(&path))["facts"][1], serde_json::json!(["hit rate", "50 %"]));
}

#[test]
fn a_truncated_recording_is_drawn_and_marked() {
    let dir = tempfile::tempdir().unwrap();
    let path = recorded(&dir, "trace");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 7]).unwrap();
    let output = dir.path().join("cut.html");
    report(&path, &output).exits(1).check_stderr("the report covers the part before");
    assert!(fs::read_to_string(&output).unwrap().contains("A part is missing: "));
    let few = page(&recorded_pools(dir.path(), "few.gz", &[("x", 5)]));
    assert!(few.contains("too short for a diagnosis: at least 20 requests and 0.1 s are needed"), "{few}");
    // The first 12 bytes contain nothing to draw.
    fs::write(&path, &bytes[..12]).unwrap();
    report(&path, &dir.path().join("report.html")).exits(1).check_stderr("trace: nothing to draw: ");
}
