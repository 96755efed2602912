//! `pinpool report`: what is drawn, what is said where nothing can be drawn, and that names cannot leave their place.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::tool::{Ran, finish, pinpool, run};

const AFTER: &str = "I tensorflow/core/common_runtime/gpu/pool_allocator.cc:247] PoolAllocator: After 63521 get requests, \
                     put_count=63521 evicted_count=1000 eviction_rate=0.0157428 and unsatisfied allocation rate=0.0173171\n";
const RAISE: &str =
    "I tensorflow/core/common_runtime/gpu/pool_allocator.cc:259] Raising pool_size_limit_ from 100 to 110\n";

pub(crate) fn report(input: &Path, output: &Path) -> Ran {
    finish(pinpool(&["report"]).arg(input).arg("-o").arg(output))
}

/// The page of `input`.
fn page(input: &Path) -> String {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("report.html");
    let ran = report(input, &output);
    assert_eq!((ran.code(), ran.stderr.as_str()), (0, ""));
    fs::read_to_string(output).unwrap()
}

fn log_in(dir: &TempDir, name: &str, text: &str) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, text).unwrap();
    path
}

/// The figure `id` of a page, in its wide form.
pub(crate) fn figure<'a>(page: &'a str, id: &str) -> &'a str {
    let begin = page.find(&format!("aria-labelledby=\"{id}-860-title")).unwrap_or_else(|| panic!("no figure {id}"));
    let end = begin + page[begin..].find("</svg>").unwrap();
    &page[begin..end]
}

/// Marks, filled or in lines, the one in the legend left out.
fn marks(figure: &str, paint: &str) -> usize {
    figure.matches(&format!("<path class=\"{paint} mark\"")).count().saturating_sub(1)
}

/// The text elements of a figure.
fn texts(figure: &str) -> Vec<&str> {
    let lines = figure.lines().filter_map(|line| line.strip_prefix("<text")?.strip_suffix("</text>"));
    lines.filter_map(|text| Some(text.split_once('>')?.1)).collect()
}

/// The object that the page draws.
fn data(page: &str) -> Value {
    let (_, rest) = page.split_once("<script type=\"application/json\" id=\"report\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

/// The rows of one public run, as its log.
fn public_run(run: &str) -> String {
    let file = Path::new(crate::ROOT).join("tests/data/tf_lines/public.tsv");
    let rows = fs::read_to_string(file).unwrap();
    let mut text = String::new();
    for row in rows.lines().filter(|row| row.starts_with(run)) {
        let cells: Vec<&str> = row.split('\t').collect();
        if cells[1] == "after" {
            text += &format!(
                "PoolAllocator: After {} get requests, put_count={} evicted_count={} eviction_rate={} and unsatisfied \
                 allocation rate={}\n",
                cells[3], cells[4], cells[5], cells[6], cells[7]
            );
        } else {
            text += &format!("Raising pool_size_limit_ from {} to {}\n", cells[8], cells[9]);
        }
    }
    text
}

#[test]
fn a_log_has_its_limit_with_each_raise_marked_its_evictions_hit_rate_and_verdict() {
    let dir = tempfile::tempdir().unwrap();
    let log = log_in(&dir, "train.log", &public_run("r103"));
    let ran = run(&["inspect", "--json", log.to_str().unwrap()]);
    let summary: Value = serde_json::from_str(ran.stdout.lines().last().unwrap()).unwrap();
    let (printed, silent) = (summary["raises_printed"].as_u64().unwrap(), summary["raises_silent"].as_u64().unwrap());
    assert!(printed >= 5 && silent > 10, "{printed} {silent}");

    let page = page(&log);
    let limit = figure(&page, "limit");
    assert_eq!(marks(limit, "fill") as u64, printed);
    assert_eq!(marks(limit, "line") as u64, silent, "{limit}");
    let texts = texts(limit);
    for text in ["limit on idle buffers", "evictions so far", "raise", "raise that was not printed"] {
        assert!(texts.iter().any(|drawn| drawn.starts_with(text)), "no {text} in {texts:?}");
    }
    assert!(texts.contains(&"gets, logarithmic"), "{texts:?}");
    let hit_rate = figure(&page, "hit-rate");
    assert!(hit_rate.contains(">hit rate<") && hit_rate.contains("gets served by an idle buffer (%)"), "{hit_rate}");
    // The one of the legend and the figure's own.
    assert_eq!(hit_rate.matches("<path class=\"line s0\"").count(), 2, "{hit_rate}");
    let verdict = summary["pools"][0]["verdict"].as_str().unwrap();
    assert!(page.contains(verdict) && page.contains(summary["pools"][0]["advice"][0].as_str().unwrap()), "{verdict}");
    assert!(page.contains(&format!("{printed} raises were printed (triangles), {silent} were not (crosses)")));
}

#[test]
fn two_pools_have_lines_of_different_dashes_and_names() {
    let dir = tempfile::tempdir().unwrap();
    let start_again = "PoolAllocator: After 2030 get requests, put_count=2030 evicted_count=1000 eviction_rate=0.492611 and \
                       unsatisfied allocation rate=0.541872\nRaising pool_size_limit_ from 100 to 110\n";
    let log = log_in(&dir, "two.log", &format!("{AFTER}{RAISE}{start_again}"));
    let page = page(&log);
    let limit = figure(&page, "limit");
    for text in ["limit, pool 1", "limit, pool 2", "evictions, pool 1", "evictions, pool 2"] {
        assert!(texts(limit).contains(&text), "no {text} in {limit}");
    }
    assert_eq!(marks(limit, "fill"), 2);
    assert!(limit.contains("line s0") && limit.contains("line s1"));
    assert!(page.contains(".s1{color:#a8480a}") && page.contains(".line.s1{stroke-dasharray:9 4}"));
}

#[test]
fn the_page_needs_no_network_and_serves_both_colour_schemes_phones_and_paper() {
    let dir = tempfile::tempdir().unwrap();
    let page = page(&log_in(&dir, "train.log", &format!("{AFTER}{RAISE}")));
    for part in ["prefers-color-scheme:dark", "@media print", "name=\"viewport\"", "<html lang=\"en\">", "role=\"img\""]
    {
        assert!(page.contains(part), "{part}");
    }
    let without_namespace = page.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    // The one script is data, which nothing runs.
    assert_eq!(page.matches("<script").count(), 1);
    assert_eq!(data(&page)["figures"][0]["id"], "limit");
    for fetch in ["http:", "https:", "@import", "src=", "<link rel=\"stylesheet"] {
        assert!(!without_namespace.contains(fetch), "{fetch}");
    }
    // The page has each figure once more for a phone, each with a title and words.
    assert_eq!(page.matches("<svg").count(), 4);
    assert_eq!(page.matches("<desc id=").count(), 4);
    assert_eq!(page.matches("class=\"plot narrow\"").count(), 2);
}

#[test]
fn figures_are_written_as_files_with_their_own_style() {
    let dir = tempfile::tempdir().unwrap();
    let log = log_in(&dir, "train.log", &format!("{AFTER}{RAISE}"));
    let svgs = dir.path().join("a/b");
    let ran = finish(pinpool(&["report"]).arg(&log).arg("--svg").arg(&svgs));
    assert_eq!((ran.code(), ran.stderr.as_str()), (0, ""));
    let mut names: Vec<_> = fs::read_dir(&svgs).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["hit-rate.svg", "limit.svg"]);
    let limit = fs::read_to_string(svgs.join("limit.svg")).unwrap();
    assert!(limit.starts_with("<svg xmlns=") && limit.trim_end().ends_with("</svg>") && limit.contains("<style>"));
    assert_eq!(marks(&limit, "fill"), 1);
}

#[test]
fn a_hostile_name_stays_text() {
    let dir = tempfile::tempdir().unwrap();
    let name = "<img src=x onerror=alert(1)>\"'&{{facts}}\u{202e}.log";
    let page = page(&log_in(&dir, name, &format!("{AFTER}{RAISE}")));
    assert!(!page.contains("<img") && !page.contains('\u{202e}'));
    assert!(data(&page)["source"].as_str().unwrap().contains(name));
    assert!(page.contains("&lt;img src=x onerror=alert(1)&gt;&quot;&#39;&amp;{{facts}}\u{fffd}.log"));
}

#[test]
fn a_log_without_such_lines_and_a_file_that_is_not_there_are_errors_as_in_inspect() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("report.html");
    for input in [log_in(&dir, "other.log", "epoch 1\nepoch 2\n"), dir.path().join("none.log")] {
        let ran = report(&input, &output);
        let inspected = run(&["inspect", input.to_str().unwrap()]);
        assert_eq!((ran.code(), &ran.stderr), (1, &inspected.stderr));
        assert!(ran.stderr.contains(input.to_str().unwrap()), "{}", ran.stderr);
        assert!(!output.exists());
    }
}

#[test]
fn a_page_or_directory_that_cannot_be_written_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let log = log_in(&dir, "train.log", &format!("{AFTER}{RAISE}"));
    let ran = report(&log, &dir.path().join("none/report.html"));
    assert_eq!(ran.code(), 1);
    ran.check_stderr("none/report.html: No such file or directory");
    let ran = finish(pinpool(&["report"]).arg(&log).arg("--svg").arg(log.join("figures")));
    assert_eq!(ran.code(), 1);
    ran.check_stderr("train.log/figures: ");
    let ran = finish(pinpool(&["report"]).arg(&log));
    assert_eq!(ran.code(), 2, "neither a page nor a directory: {}", ran.stderr);
}

const TRACE: &str =
    "## a loader\nt 1000\na 1 1000000\na 2 3000000\nt 5000\nf 1\nf 2\nt 2000\na 3 1000000\nt 9000\nf 3\nr 20 4096\n";

#[test]
fn a_workload_is_replayed_and_drawn_over_its_time() {
    let dir = tempfile::tempdir().unwrap();
    let page = page(&log_in(&dir, "loader.trace", TRACE));
    let bytes = figure(&page, "bytes");
    for text in ["bytes (MiB)", "time (ms)", "in use", "in flight", "idle", "free"] {
        assert!(texts(bytes).contains(&text), "no {text} in {bytes}");
    }
    // An area of its own colour for each, and values under the pointer.
    for class in ["area s0", "area s1", "area s2", "area s3"] {
        assert!(bytes.matches(class).count() >= 2, "{class} is in the legend alone: {bytes}");
    }
    assert!(bytes.contains("<title>time 17 ms: in use: 0 B, in flight: 0 B, idle: "), "{bytes}");
    let sizes = figure(&page, "sizes");
    for text in ["4 KiB", "976.6 KiB", "80 KiB, 20 gets"] {
        assert!(texts(sizes).contains(&text), "no {text} in {sizes}");
    }
    for text in ["<dt>gets</dt><dd>23</dd>", "<strong>warming up</strong>", "There are no times of page-locks"] {
        let found = page.contains(text) || page.contains(&text.replace("There", "there"));
        assert!(found, "no {text} in {page}");
    }
}

#[test]
fn each_raise_of_a_replay_is_marked_once() {
    let trace = Path::new(crate::ROOT).join("tests/data/workloads/bucket_switch.trace.gz");
    let set = "PRESET=tensorflow,ROUNDING=exact,POOL_SIZE_LIMIT=4";
    let ran = run(&["replay", "--json", "--set", set, trace.to_str().unwrap()]);
    let raises = ran.figures()["raises"].as_u64().unwrap();
    let output = tempfile::NamedTempFile::new().unwrap();
    let ran = finish(pinpool(&["report", "--set", set, "-o"]).arg(output.path()).arg(&trace));
    assert_eq!(ran.code(), 0, "{}", ran.stderr);
    let page = fs::read_to_string(output.path()).unwrap();
    assert!(raises > 0);
    assert_eq!(marks(figure(&page, "limit"), "fill") as u64, raises);
    assert!(page.contains(&format!("{raises} raise")));
}

#[test]
fn a_trace_without_time_is_drawn_over_its_gets() {
    let dir = tempfile::tempdir().unwrap();
    let page = page(&log_in(&dir, "steps.trace", "# limit 5\ns 400 1000 7\nr 5 100\n"));
    assert!(texts(figure(&page, "hit-rate")).contains(&"gets"), "{page}");
    assert!(page.contains("the x axis counts its gets"));
}

#[test]
fn a_trace_that_ends_in_the_middle_of_a_line_or_of_its_compression_is_an_error_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let output = dir.path().join("report.html");
    let ran = report(&log_in(&dir, "cut.trace", "a 1 4096\nf 1\na 2"), &output);
    assert_eq!(ran.code(), 1);
    ran.check_stderr("cut.trace: line 3: `a 2`");
    let workload = Path::new(crate::ROOT).join("tests/data/workloads/bursty.trace.gz");
    let mut bytes = fs::read(workload).unwrap();
    bytes.truncate(bytes.len() / 2);
    let cut = dir.path().join("cut.trace.gz");
    fs::write(&cut, bytes).unwrap();
    let ran = report(&cut, &output);
    assert_eq!(ran.code(), 1);
    ran.check_stderr("cut.trace.gz: ");
    assert!(!output.exists());
}

/// A trace of a load of files, and what it printed.
fn recorded(dir: &TempDir, name: &str) -> PathBuf {
    let path = dir.path().join(name);
    let mut command = pinpool(&["load", "--synthetic", "60", "--batch-files", "4", "--set", "POOL_SIZE_LIMIT=1"]);
    let ran = finish(command.env("PINPOOL_TRACE", &path).env("PINPOOL_BACKEND", "sim"));
    assert_eq!(ran.code(), 0, "{}", ran.stderr);
    path
}

#[test]
fn a_recording_has_its_bytes_and_its_pin_times() {
    let dir = tempfile::tempdir().unwrap();
    let page = page(&recorded(&dir, "trace.gz"));
    for (id, text) in [
        ("bytes", "in use"),
        ("bytes", "time (ms), and the clock (UTC)"),
        ("bytes", "in flight"),
        ("limit", "limit on idle buffers"),
        ("hit-rate", "gets served by an idle buffer (%)"),
        ("sizes", "size, and bytes asked for in it"),
        ("latency", "calls that pin, by how long they take"),
        ("latency", "calls that unpin, by how long they take"),
    ] {
        let drawn = figure(&page, id);
        assert!(texts(drawn).contains(&text), "no {text} in {drawn}");
    }
    assert!(page.contains("back-end sim, recorded by pinpool"), "{page}");
}

#[test]
fn a_recording_that_was_cut_off_is_drawn_up_to_its_end_and_the_page_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let path = recorded(&dir, "trace");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 7]).unwrap();
    let output = dir.path().join("cut.html");
    let ran = report(&path, &output);
    assert_eq!(ran.code(), 1);
    ran.check_stderr("drawn is what was read before");
    assert!(fs::read_to_string(&output).unwrap().contains("The trace is not whole: "));
    // In its first bytes there is nothing to draw.
    fs::write(&path, &bytes[..12]).unwrap();
    let ran = report(&path, &dir.path().join("report.html"));
    assert_eq!(ran.code(), 1);
    ran.check_stderr("trace: nothing to draw: ");
    // A newer version is refused.
    let mut newer = bytes.clone();
    newer[8] = 200;
    fs::write(&path, newer).unwrap();
    let ran = report(&path, &dir.path().join("report.html"));
    assert_eq!(ran.code(), 1);
    ran.check_stderr("use a newer pinpool");
}
