//! The statistics through the `metrics` facade: what a scrape of Prometheus holds, what the dashboard asks for.
//!
//! The recorder and the server are those of `examples/prometheus`. One test scrapes with a real Prometheus where one is
//! installed (`apt-get install prometheus`), and says so where it is not.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use metrics_exporter_prometheus::PrometheusHandle;
use pinpool::{Backend, Ceiling, OnFull, Pool};
use pinpool_metrics::{Kind, METRICS, Reporter};

#[path = "../../examples/prometheus/serve.rs"]
mod serve;

const DASHBOARD: &str = include_str!("../../examples/prometheus/grafana.json");
const RULES: &str = include_str!("../../examples/prometheus/pinpool.rules.yml");
const MIB: usize = 1 << 20;

fn pool() -> Pool {
    let builder = Pool::builder().without_env().backend(Backend::Heap).name("train").max_bytes(8 << 20);
    builder.wait(Duration::from_millis(1)).on_full(OnFull::Pageable).background_poll(false).build().unwrap()
}

/// Hits, misses, a wait that runs out, a fallback, evictions and releases.
fn use_pool(pool: &Pool) {
    drop(pool.get(MIB).unwrap());
    drop(pool.get(MIB).unwrap());
    let held = pool.get(8 * MIB).unwrap();
    drop(pool.get(2 * MIB).unwrap());
    drop(held);
    pool.clear();
}

/// Reports to a recorder of its own and returns what a scrape would.
fn scrape(reporters: &[&Reporter]) -> String {
    let recorder = serve::recorder().unwrap();
    metrics::with_local_recorder(&recorder, || reporters.iter().for_each(|reporter| reporter.report()));
    recorder.handle().render()
}

/// The value of the series with this name and these labels.
fn value(text: &str, name: &str, labels: &[&str]) -> Option<f64> {
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let line = lines.find(|line| {
        let series = line.split(['{', ' ']).next();
        series == Some(name) && labels.iter().all(|label| line.contains(label))
    })?;
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn a_scrape_has_each_metric_with_its_value() {
    let pool = pool();
    let reporter = Reporter::new(&pool);
    use_pool(&pool);
    let held = pool.tagged("images").get(MIB).unwrap();
    let stats = pool.stats();
    let text = scrape(&[&reporter]);
    for metric in METRICS {
        let name = metric.prometheus_name();
        let series = if metric.kind == Kind::Histogram { format!("{name}_count") } else { name.clone() };
        assert!(
            value(&text, &series, &["pool_name=\"train\"", "backend=\"heap\""]).is_some(),
            "{name} is missing:\n{text}"
        );
    }
    let expect = |name: &str, labels: &[&str], count: u64| {
        #[allow(clippy::cast_precision_loss)]
        let count = count as f64;
        assert_eq!(value(&text, name, labels), Some(count), "{name} {labels:?}");
    };
    expect("pinpool_gets_total", &["result=\"hit\""], stats.requests.hits);
    expect("pinpool_gets_total", &["result=\"miss\""], stats.requests.misses);
    expect("pinpool_misses_total", &["reason=\"first_of_size\""], 2);
    expect("pinpool_evictions_total", &["reason=\"released\""], stats.memory.evictions.released);
    expect("pinpool_timeouts_total", &[], 1);
    expect("pinpool_fallbacks_total", &[], 1);
    expect("pinpool_max_bytes", &[], 8 << 20);
    expect("pinpool_buffers", &["state=\"used\""], 1);
    expect("pinpool_owner_buffers", &["tag=\"images\""], 1);
    for cause in pinpool::Why::CAUSES {
        let is_held = u64::from(cause == pool.why().cause());
        expect("pinpool_cause", &[&format!("cause=\"{cause}\"")], is_held);
    }
    drop(held);
    expect("pinpool_page_locked_bytes_total", &[], stats.memory.pin.bytes);
    expect("pinpool_create_time_seconds_count", &[], stats.memory.pin.time.count());
    expect("pinpool_wait_time_seconds_count", &[], 1);
    assert!(text.contains("# TYPE pinpool_create_time_seconds histogram"), "{text}");
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
        assert_eq!(value(&text, "pinpool_create_time_seconds_bucket", &[&le]), Some(reached), "{le}:\n{text}");
    }
}

#[test]
fn durations_are_passed_on_once_and_partitions_are_pools_of_their_own() {
    let pool = pool();
    let eval = pool.partition("eval", 4 << 20).unwrap();
    let reporter = Reporter::new(&pool);
    drop(pool.get(MIB).unwrap());
    drop(eval.get(MIB).unwrap());
    let recorder = serve::recorder().unwrap();
    metrics::with_local_recorder(&recorder, || (0..3).for_each(|_| reporter.report()));
    let text = recorder.handle().render();
    assert_eq!(value(&text, "pinpool_use_time_seconds_count", &["pool_name=\"train\""]), Some(1.0), "{text}");
    // The buffer of the first was idle, and the pool counts both.
    for (name, result, gets) in [("train", "miss", 1.0), ("train", "hit", 1.0), ("train/eval", "hit", 1.0)] {
        let labels = [&*format!("pool_name=\"{name}\""), &*format!("result=\"{result}\"")];
        assert_eq!(value(&text, "pinpool_gets_total", &labels), Some(gets), "{name} {result}: {text}");
    }
    drop(pool.get(2 * MIB).unwrap());
    metrics::with_local_recorder(&recorder, || reporter.report());
    let text = recorder.handle().render();
    assert_eq!(value(&text, "pinpool_use_time_seconds_count", &["pool_name=\"train\""]), Some(2.0), "{text}");
}

#[test]
fn the_calls_of_an_arena_are_reported_once() {
    let pool = pool();
    let eval = pool.partition("eval", 4 << 20).unwrap();
    drop(eval.get(MIB).unwrap());
    let text = scrape(&[&Reporter::new(&pool)]);
    for name in ["pinpool_page_locked_bytes_total", "pinpool_call_failures_total", "pinpool_create_time_seconds_count"]
    {
        assert!(value(&text, name, &["pool_name=\"train\""]).is_some(), "{name}:\n{text}");
        assert_eq!(value(&text, name, &["pool_name=\"train/eval\""]), None, "{name}");
    }
    let pinned = value(&text, "pinpool_page_locked_bytes_total", &["pool_name=\"train\""]);
    assert!(pinned.is_some_and(|bytes| bytes > 0.0), "{text}");
}

#[test]
fn a_pool_without_a_ceiling_has_no_such_metric() {
    let pool = Pool::builder().without_env().backend(Backend::Heap).max_bytes(Ceiling::None).build().unwrap();
    let text = scrape(&[&Reporter::new(&pool)]);
    assert_eq!(value(&text, "pinpool_max_bytes", &[]), None);
    assert_eq!(value(&text, "pinpool_held_bytes", &["pool_name=\"\""]), Some(0.0));
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
fn the_dashboard_asks_for_metrics_of_this_crate_alone_and_for_each() {
    let known: BTreeSet<_> = METRICS.iter().map(pinpool_metrics::Metric::prometheus_name).collect();
    assert_eq!(queried(), known);
}

/// What `promtool check` complains of, with `text` as its input; `None` where it is not installed.
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
fn promtool_has_nothing_to_say_of_both_texts_and_of_the_rules() {
    let pool = pool();
    use_pool(&pool);
    let held = pool.tagged("images").get(MIB).unwrap();
    let reporter = Reporter::new(&pool);
    let by_recorder = scrape(&[&reporter]);
    let object = serde_json::to_value(pool.stats()).unwrap();
    let by_hand = pinpool_metrics::prometheus_text(&[(vec![("pool_name", "train".to_owned())], &object)]);
    for text in [&by_recorder, &by_hand] {
        assert_eq!(promtool(&["metrics"], text).unwrap_or_default(), "");
    }
    // Both have the same types and words.
    let comments =
        |text: &str| text.lines().filter(|line| line.starts_with('#')).map(str::to_owned).collect::<BTreeSet<_>>();
    assert_eq!(comments(&by_hand).difference(&comments(&by_recorder)).count(), 0);
    drop(held);
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/prometheus/pinpool.rules.yml");
    assert_eq!(promtool(&["rules", file], "").unwrap_or_default(), "");
    let names: Vec<_> = METRICS.iter().map(pinpool_metrics::Metric::prometheus_name).collect();
    let split = RULES.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
    for word in split.filter(|word| word.starts_with("pinpool_")) {
        assert!(names.iter().any(|name| name == word.trim_end_matches("_sum")), "{word}");
    }
}

#[test]
fn a_tag_that_holds_nothing_any_more_is_reported_as_holding_nothing() {
    let pool = pool();
    let reporter = Reporter::new(&pool);
    let recorder = serve::recorder().unwrap();
    let held = pool.tagged("images").get(MIB).unwrap();
    metrics::with_local_recorder(&recorder, || reporter.report());
    let images = |text: &str| value(text, "pinpool_owner_buffers", &["tag=\"images\""]);
    assert_eq!(images(&recorder.handle().render()), Some(1.0));
    drop(held);
    metrics::with_local_recorder(&recorder, || reporter.report());
    assert_eq!(images(&recorder.handle().render()), Some(0.0));
}

#[test]
fn the_docs_name_each_metric() {
    let docs = include_str!("../../src/lib.rs");
    let table: String = docs.lines().filter(|line| line.starts_with("//! | `pinpool.")).collect();
    for metric in METRICS {
        assert!(table.contains(&format!("`{}`", metric.name)), "{} is not in the table", metric.name);
    }
}

/// Serves the scrape of `reporter` on a port of its own for the rest of the process.
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
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

#[test]
fn the_server_of_the_example_answers_with_figures_of_the_moment() {
    let pool = pool();
    let port = serve_on_a_port(Reporter::new(&pool));
    let first = http(port, "/metrics").unwrap();
    assert!(first.starts_with("HTTP/1.1 200 OK") && first.contains("text/plain"), "{first}");
    use_pool(&pool);
    assert_eq!(value(&http(port, "/metrics").unwrap(), "pinpool_timeouts_total", &[]), Some(1.0));
    assert!(http(port, "/other").unwrap().starts_with("HTTP/1.1 404"));
}

/// A process that ends with the test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[allow(clippy::print_stderr)] // Says that it was skipped.
fn a_real_prometheus_scrapes_each_metric_and_computes_the_queries_of_the_dashboard() {
    if Command::new("prometheus").arg("--version").output().is_err() {
        eprintln!("SKIPPED: no Prometheus to scrape with: apt-get install prometheus");
        return;
    }
    let pool = pool();
    let _held = pool.tagged("images").get(MIB).unwrap();
    let port = serve_on_a_port(Reporter::new(&pool));
    let folder = tempfile::tempdir().unwrap();
    let config = folder.path().join("prometheus.yml");
    let text = format!(
        "global:\n  scrape_interval: 200ms\n  scrape_timeout: 200ms\nscrape_configs:\n  - job_name: pinpool\n    \
         static_configs:\n      - targets: [\"127.0.0.1:{port}\"]\n"
    );
    std::fs::write(&config, text).unwrap();
    // Free a moment ago: another process may take it, and then the test fails loudly.
    let own_port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut command = Command::new("prometheus");
    command.arg(format!("--config.file={}", config.display()));
    command.arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()));
    command.arg(format!("--web.listen-address=127.0.0.1:{own_port}"));
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let _ended = Ended(child);
    let ask = |query: &str| -> Option<serde_json::Value> {
        let encoded: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let answer = http(own_port, &format!("/api/v1/query?query={encoded}"))?;
        let body = answer.split_once("\r\n\r\n")?.1;
        let from = body.find('{')?;
        serde_json::from_str(&body[from..=body.rfind('}')?]).ok()
    };
    let has_results = |query: &str| {
        let answer = ask(query)?;
        let results = answer["data"]["result"].as_array()?;
        (!results.is_empty()).then_some(results.len())
    };
    let until = |query: &str| {
        let begun = Instant::now();
        while has_results(query).is_none() {
            assert!(begun.elapsed() < Duration::from_secs(60), "no answer to {query}: {:?}", ask(query));
            thread::sleep(Duration::from_millis(50));
            use_pool(&pool);
        }
    };
    until("pinpool_gets_total{result=\"hit\"} > 0");
    for metric in METRICS {
        let name = metric.prometheus_name();
        until(&if metric.kind == Kind::Histogram { format!("{name}_bucket") } else { name });
    }
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let query = target["expr"].as_str().unwrap();
            let query = query.replace("$pool", ".*").replace("$instance", ".*").replace("$__rate_interval", "10s");
            let answer = ask(&query).unwrap();
            assert_eq!(answer["status"], "success", "{query}: {answer}");
        }
    }
    until("sum by (pool_name) (rate(pinpool_gets_total{result=\"hit\"}[10s])) > 0");
    until("histogram_quantile(0.99, sum by (pool_name, le) (rate(pinpool_create_time_seconds_bucket[10s]))) > 0");
}
