//! The statistics through the `metrics` facade: what Prometheus scrapes, and the names that the dashboard uses.
//!
//! Recorder and server come from `examples/prometheus`. One test needs `promtool` (`apt-get install prometheus`) and reports if it is
//! skipped.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusHandle;
use pinpool::{Backend, Limit, OnFull, Pool};
use pinpool_metrics::{Reporter, prometheus_text};

#[path = "../../examples/prometheus/serve.rs"]
mod serve;

const DASHBOARD: &str = include_str!("../../examples/prometheus/grafana.json");
const RULES: &str = include_str!("../../examples/prometheus/pinpool.rules.yml");
const MIB: usize = 1 << 20;

fn pool() -> Pool {
    let builder = Pool::builder().without_env().backend(Backend::Heap).name("train").max_bytes(8 << 20);
    builder.wait(Duration::from_millis(1)).on_full(OnFull::Pageable).maintenance_thread(false).build().unwrap()
}

/// Hits, misses, a wait that times out, a pageable buffer, evictions and releases.
fn use_pool(pool: &Pool) {
    drop(pool.get(MIB).unwrap());
    drop(pool.get(MIB).unwrap());
    let held = pool.get(8 * MIB).unwrap();
    drop(pool.get(2 * MIB).unwrap());
    drop(held);
    pool.clear();
}

/// Reports to its own recorder and returns what a scrape would.
fn scrape(reporters: &[&Reporter]) -> String {
    let recorder = serve::recorder().unwrap();
    metrics::with_local_recorder(&recorder, || reporters.iter().for_each(|reporter| reporter.report()));
    recorder.handle().render()
}

/// The value of the series with this name and these labels.
fn value(text: &str, name: &str, labels: &[&str]) -> Option<f64> {
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let line = lines
        .find(|line| line.split(['{', ' ']).next() == Some(name) && labels.iter().all(|label| line.contains(label)))?;
    line.rsplit(' ').next()?.parse().ok()
}

/// The text that the tool prints for this pool.
fn printed(pool: &Pool) -> String {
    let mut object = serde_json::to_value(pool.stats()).unwrap();
    object["why"] = serde_json::json!({ "cause": "healthy", "is_alarm": false });
    object["holders"] = serde_json::json!([{ "tag": "images", "buffers": 1, "bytes": 1, "oldest_age_seconds": 1.0 }]);
    prometheus_text(&[(vec![("pool_name", "train".to_owned())], &object)])
}

/// The lines with names, types and descriptions.
fn comments(text: &str) -> BTreeSet<&str> {
    text.lines().filter(|line| line.starts_with('#')).collect()
}

fn names(text: &str) -> BTreeSet<&str> {
    text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect()
}

#[test]
fn a_scrape_has_the_tools_metrics_with_the_pools_values() {
    let pool = pool();
    let reporter = Reporter::new(&pool);
    use_pool(&pool);
    let held = pool.tagged("images").get(MIB).unwrap();
    let (stats, text) = (pool.stats(), scrape(&[&reporter]));
    assert_eq!(comments(&text), comments(&printed(&pool)));
    let expect = |name: &str, labels: &[&str], count: u64| {
        #[allow(clippy::cast_precision_loss)]
        let count = count as f64;
        assert_eq!(value(&text, name, labels), Some(count), "{name} {labels:?}:\n{text}");
    };
    let labels = ["pool_name=\"train\"", "backend=\"heap\""];
    expect("pinpool_requests_hits_total", &labels, stats.requests.hits);
    expect("pinpool_requests_miss_reasons_first_of_size_total", &labels, 2);
    expect("pinpool_requests_timeouts_total", &labels, 1);
    expect("pinpool_requests_wait_time_seconds_count", &labels, 1);
    expect("pinpool_memory_in_use", &labels, 1);
    expect("pinpool_memory_pin_bytes_total", &labels, stats.memory.pin.bytes);
    expect("pinpool_memory_pin_time_seconds_count", &labels, stats.memory.pin.time.count());
    expect("pinpool_copies_oldest_age_seconds", &labels, 0);
    expect("pinpool_limits_max_bytes", &labels, 8 << 20);
    expect("pinpool_holder_buffers", &["tag=\"images\""], 1);
    for cause in pinpool::Cause::NAMES {
        let is_present = u64::from(*cause == pool.diagnose().cause.name());
        expect("pinpool_cause", &[&format!("cause=\"{cause}\"")], is_present);
    }
    drop(held);
}

#[test]
fn the_buckets_of_a_scrape_are_those_of_the_pool() {
    let pool = pool();
    use_pool(&pool);
    let stats = pool.stats();
    let text = scrape(&[&Reporter::new(&pool)]);
    let mut reached = 0;
    for (bound, count) in stats.memory.pin.time.buckets() {
        reached += count;
        let Some(bound) = bound else { continue };
        let le = format!("le=\"{}\"", bound.as_secs_f64());
        #[allow(clippy::cast_precision_loss)]
        let reached = reached as f64;
        assert_eq!(value(&text, "pinpool_memory_pin_time_seconds_bucket", &[&le]), Some(reached), "{le}:\n{text}");
    }
}

#[test]
fn durations_are_reported_once_and_partitions_are_separate_pools() {
    let pool = pool();
    let eval = pool.open_partition("eval", 4 << 20).unwrap();
    let reporter = Reporter::new(&pool);
    drop(pool.get(MIB).unwrap());
    drop(eval.get(MIB).unwrap());
    let recorder = serve::recorder().unwrap();
    metrics::with_local_recorder(&recorder, || (0..3).for_each(|_| reporter.report()));
    let text = recorder.handle().render();
    assert_eq!(value(&text, "pinpool_requests_use_time_seconds_count", &["pool_name=\"train\""]), Some(1.0), "{text}");
    // The partition reuses the first pool's buffer, and the pool counts the partition's requests too.
    for (name, result, requests) in [("train", "misses", 1.0), ("train", "hits", 1.0), ("train/eval", "hits", 1.0)] {
        let (series, label) = (format!("pinpool_requests_{result}_total"), format!("pool_name=\"{name}\""));
        assert_eq!(value(&text, &series, &[&label]), Some(requests), "{name} {result}: {text}");
    }
    let pinned = value(&text, "pinpool_memory_pin_bytes_total", &["pool_name=\"train/eval\""]);
    assert_eq!(pinned, Some(0.0), "counted once");
    drop(pool.get(2 * MIB).unwrap());
    metrics::with_local_recorder(&recorder, || reporter.report());
    let text = recorder.handle().render();
    assert_eq!(value(&text, "pinpool_requests_use_time_seconds_count", &["pool_name=\"train\""]), Some(2.0), "{text}");
}

#[test]
fn an_unlimited_pool_has_no_series_for_its_limit() {
    let pool = Pool::builder().without_env().backend(Backend::Heap).max_bytes(Limit::Unlimited).build().unwrap();
    let text = scrape(&[&Reporter::new(&pool)]);
    assert_eq!(value(&text, "pinpool_limits_max_bytes", &[]), None);
    assert_eq!(value(&text, "pinpool_memory_held_bytes", &["pool_name=\"\""]), Some(0.0));
}

/// The words of all queries of the dashboard that begin with `pinpool_`.
fn queried() -> BTreeSet<String> {
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).expect("the dashboard is JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    assert!(panels.len() > 8, "{} panels", panels.len());
    let mut words = BTreeSet::new();
    let mut add = |query: &str| {
        let split = query.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
        let words_here = split.filter(|word| word.starts_with("pinpool_"));
        words.extend(words_here.map(|word| word.trim_end_matches("_bucket").trim_end_matches("_sum").to_owned()));
    };
    for panel in panels {
        let targets = panel["targets"].as_array().expect("each panel has targets");
        assert!(!targets.is_empty() && panel["title"].is_string() && panel["gridPos"]["w"].is_number(), "{panel}");
        targets.iter().for_each(|target| add(target["expr"].as_str().expect("each target has a query")));
    }
    let variables = dashboard["templating"]["list"].as_array().expect("variables");
    variables.iter().filter_map(|variable| variable["definition"].as_str()).for_each(add);
    words
}

#[test]
fn the_dashboard_uses_metrics_that_exist() {
    let (pool, queried) = (pool(), queried());
    let text = printed(&pool);
    let unknown: Vec<_> = queried.iter().filter(|name| !names(&text).contains(name.as_str())).collect();
    assert!(unknown.is_empty() && queried.len() > 30, "{unknown:?} of {}", queried.len());
}

/// Returns the name and the unescaped labels of a sample. Panics if the line is not a sample.
fn series(line: &str) -> (String, Vec<(String, String)>) {
    let is_name = |text: &str| {
        let is_letter = |letter: char| letter.is_ascii_alphabetic() || letter == '_';
        text.starts_with(is_letter) && text.chars().all(|letter| is_letter(letter) || letter.is_ascii_digit())
    };
    let (name, rest) = line.split_once('{').expect(line);
    assert!(is_name(name), "{line}");
    let (mut rest, mut labels) = (rest, Vec::new());
    while !rest.starts_with('}') {
        let (label, quoted) = rest.split_once("=\"").expect(line);
        assert!(is_name(label) && !label.starts_with("__"), "{line}");
        let (mut text, mut letters) = (String::new(), quoted.chars());
        loop {
            match letters.next().expect(line) {
                '"' => break,
                '\\' => text.push(match letters.next() {
                    Some('n') => '\n',
                    Some(letter @ ('"' | '\\')) => letter,
                    other => panic!("{other:?} is escaped: {line}"),
                }),
                letter => text.push(letter),
            }
        }
        labels.push((label.to_owned(), text));
        rest = letters.as_str().strip_prefix(',').unwrap_or(letters.as_str());
    }
    rest.strip_prefix("} ").and_then(|value| value.parse::<f64>().ok()).expect(line);
    (name.to_owned(), labels)
}

/// Checks the rules of the text format, and those for names: <https://prometheus.io/docs/instrumenting/exposition_formats/>,
/// <https://prometheus.io/docs/practices/naming/>.
fn check_format(text: &str) {
    assert!(text.ends_with('\n') && !text.contains("\n\n"), "each line ends, and none is empty");
    let (mut families, mut all_series) = (BTreeSet::new(), BTreeSet::new());
    let (mut family, mut kind) = ("", "");
    for line in text.lines() {
        if let Some(help) = line.strip_prefix("# HELP ") {
            let (name, help) = help.split_once(' ').expect("a description");
            assert!(!help.is_empty() && !help.contains('\\'), "{line}");
            assert!(families.insert(name), "{name} has two groups");
            (family, kind) = (name, "");
            continue;
        }
        if let Some(of) = line.strip_prefix("# TYPE ") {
            let (name, of) = of.split_once(' ').expect("a type");
            assert!(name == family && kind.is_empty(), "the type follows the description, once: {line}");
            kind = of;
            assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
            let base = name.trim_end_matches("_total");
            let other_units =
                ["_ms", "_us", "_ns", "_milliseconds", "_minutes", "_mib", "_kib", "_mb", "_percent", "_ratio"];
            assert!(!other_units.iter().any(|unit| base.ends_with(unit)), "base units: {line}");
            let is_duration = ["_time", "_age", "_eta", "_timeout"].iter().any(|word| base.ends_with(word));
            assert!(!is_duration && (kind != "histogram" || base.ends_with("_seconds")), "no unit: {line}");
            let of_histogram = ["_bucket", "_count", "_sum"];
            assert!(kind == "counter" || !of_histogram.iter().any(|suffix| name.ends_with(suffix)), "{line}");
            continue;
        }
        let (name, labels) = series(line);
        match (name.strip_prefix(family), kind) {
            (Some(""), "gauge" | "counter") => assert!(labels.iter().all(|(label, _)| label != "le"), "{line}"),
            (Some("_bucket"), "histogram") => assert!(labels.iter().any(|(label, _)| label == "le"), "{line}"),
            (Some("_sum" | "_count"), "histogram") => {}
            _ => panic!("a sample of another family than {family} ({kind}): {line}"),
        }
        assert!(all_series.insert((name, labels)), "twice: {line}");
    }
}

#[test]
fn the_text_is_valid_for_any_pools_and_tags() {
    let mut of_stats = serde_json::to_value(pool().stats()).unwrap();
    let holder = |tag: &str| serde_json::json!({ "tag": tag, "buffers": 2, "bytes": 8, "oldest_age_seconds": 1.5 });
    of_stats["holders"] = [holder("a\"b\\c\nd,}"), holder("same"), holder("same")].into_iter().collect();
    of_stats["why"] = serde_json::json!({ "cause": "leak", "is_alarm": true });
    let with_number = |number: u64| {
        let mut object = of_stats.clone();
        object["number"] = number.into();
        object
    };
    let (one, other) = (with_number(0), with_number(1));
    let labels = vec![("pid", "7".to_owned()), ("pool_name", "train".to_owned())];
    // Two pools of one process may share a name, and a process may be passed twice.
    let text = prometheus_text(&[(labels.clone(), &one), (labels.clone(), &other), (labels, &one)]);
    check_format(&text);
    let count = |what: &str| text.lines().filter(|line| line.contains(what)).count();
    assert_eq!(count("pinpool_requests_hits_total{"), 2, "{text}");
    assert_eq!(count("pinpool_holder_buffers{pid=\"7\",pool_name=\"train\",tag=\"same\"} 4"), 1, "{text}");
    assert_eq!(count("pinpool_alarm{pid=\"7\",pool_name=\"train\",pool_number=\"1\"} 1"), 1, "{text}");
}

/// Returns the complaints of `promtool check` about `text`, or `None` if promtool is not installed.
#[allow(clippy::print_stderr)] // Says that it was skipped.
fn promtool(args: &[&str], text: &str) -> Option<String> {
    let mut command = Command::new("promtool");
    command.arg("check").args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let Ok(mut child) = command.spawn() else {
        eprintln!("SKIPPED: no promtool to check with: apt-get install prometheus");
        return None;
    };
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let all = [output.stdout, output.stderr].concat();
    Some(if output.status.success() { String::new() } else { String::from_utf8_lossy(&all).into_owned() })
}

#[test]
fn promtool_accepts_both_texts_and_the_rules() {
    let pool = pool();
    use_pool(&pool);
    let text = printed(&pool);
    for text in [&scrape(&[&Reporter::new(&pool)]), &text] {
        assert_eq!(promtool(&["metrics"], text).unwrap_or_default(), "");
    }
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/prometheus/pinpool.rules.yml");
    assert_eq!(promtool(&["rules", file], "").unwrap_or_default(), "");
    let split = RULES.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
    for word in split.filter(|word| word.starts_with("pinpool_")) {
        assert!(names(&text).contains(word.trim_end_matches("_sum")), "{word}");
    }
}

#[test]
fn a_tag_without_buffers_is_reported_as_zero() {
    let pool = pool();
    let reporter = Reporter::new(&pool);
    let recorder = serve::recorder().unwrap();
    let held = pool.tagged("images").get(MIB).unwrap();
    metrics::with_local_recorder(&recorder, || reporter.report());
    let images = |text: &str| value(text, "pinpool_holder_buffers", &["tag=\"images\""]);
    assert_eq!(images(&recorder.handle().render()), Some(1.0));
    drop(held);
    metrics::with_local_recorder(&recorder, || reporter.report());
    assert_eq!(images(&recorder.handle().render()), Some(0.0));
}

/// Serves the scrape of `reporter` on its own port for the rest of the process.
fn serve_on_a_port(reporter: Reporter) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let recorder = serve::recorder().unwrap();
    let handle: PrometheusHandle = recorder.handle();
    thread::spawn(move || {
        serve::answer(&listener, || {
            metrics::with_local_recorder(&recorder, || reporter.report());
            handle.render()
        })
    });
    port
}

fn http(port: u16, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

#[test]
fn the_example_server_answers_with_current_numbers() {
    let pool = pool();
    let port = serve_on_a_port(Reporter::new(&pool));
    let first = http(port, "/metrics").unwrap();
    assert!(first.starts_with("HTTP/1.1 200 OK") && first.contains("text/plain"), "{first}");
    use_pool(&pool);
    assert_eq!(value(&http(port, "/metrics").unwrap(), "pinpool_requests_timeouts_total", &[]), Some(1.0));
    assert!(http(port, "/other").unwrap().starts_with("HTTP/1.1 404"));
}
