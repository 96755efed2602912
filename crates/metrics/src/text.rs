//! The text that Prometheus scrapes.

use std::collections::HashSet;
use std::fmt::Write;

use serde_json::Value;

use pinpool::unstable::Kind;

use super::metric::{Durations, METRICS, Sample, bucket_bounds};

/// Returns the metrics of several pools in the text format of Prometheus. Takes the labels of each pool and the JSON object
/// that the socket of its process sends. A value that is missing in the object has no series. A pool with the labels of an
/// earlier one also has the label `pool_number`; a pool that is passed twice counts once.
#[doc(hidden)]
pub fn prometheus_text(pools: &[(Vec<(&str, String)>, &Value)]) -> String {
    let pools = distinct(pools);
    let mut text = String::new();
    for metric in &*METRICS {
        let name = metric.prometheus_name();
        let mut series = String::new();
        for (labels, object) in &pools {
            for (label, sample) in metric.samples(object) {
                let labels: Vec<_> = labels.iter().chain(&label).map(|(name, value)| pair(name, value)).collect();
                write_sample(&mut series, &name, &labels.join(","), &sample);
            }
        }
        if !series.is_empty() {
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Histogram => "histogram",
                _ => "gauge",
            };
            text += &format!("# HELP {name} {}\n# TYPE {name} {kind}\n{series}", metric.help);
        }
    }
    text
}

fn distinct<'a>(pools: &[(Vec<(&'a str, String)>, &'a Value)]) -> Vec<(Vec<(&'a str, String)>, &'a Value)> {
    let (mut known, mut known_labels) = (HashSet::new(), HashSet::new());
    let pools = pools.iter().filter(|(labels, object)| known.insert((labels, object["number"].to_string())));
    let with_number = pools.map(|(labels, object)| {
        let is_new = known_labels.insert(labels);
        let number = (!is_new).then(|| ("pool_number", object["number"].to_string()));
        (labels.iter().cloned().chain(number).collect(), *object)
    });
    with_number.collect()
}

/// Formats a label. A tag may contain any text, so the value is escaped.
fn pair(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

fn write_sample(text: &mut String, name: &str, labels: &str, sample: &Sample) {
    // Writing to a String does not fail.
    let _ = match sample {
        Sample::Count(count) => writeln!(text, "{name}{{{labels}}} {count}"),
        Sample::Number(number) => writeln!(text, "{name}{{{labels}}} {number}"),
        Sample::Durations(Durations { count, total_seconds, buckets, .. }) => {
            let mut reached = 0;
            let bounds = bucket_bounds().into_iter().map(|bound| bound.to_string()).chain(["+Inf".to_owned()]);
            for (bound, more) in bounds.zip(buckets) {
                reached += more;
                let _ = writeln!(text, "{name}_bucket{{{labels},le=\"{bound}\"}} {reached}");
            }
            writeln!(text, "{name}_sum{{{labels}}} {total_seconds}\n{name}_count{{{labels}}} {count}")
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped_and_missing_values_have_no_series() {
        let object = serde_json::json!({
            "holders": [{ "tag": "a\"b\\c\nd", "buffers": 2, "bytes": 8, "oldest_age_seconds": null }],
            "why": { "cause": "leak", "is_alarm": true },
        });
        let text = prometheus_text(&[(vec![("pool_name", "t".to_owned())], &object)]);
        assert!(text.contains("pinpool_holder_buffers{pool_name=\"t\",tag=\"a\\\"b\\\\c\\nd\"} 2\n"), "{text}");
        assert!(text.contains("pinpool_cause{pool_name=\"t\",cause=\"leak\"} 1\n"), "{text}");
        assert!(text.contains("pinpool_cause{pool_name=\"t\",cause=\"healthy\"} 0\n"), "{text}");
        assert!(text.contains("pinpool_alarm{pool_name=\"t\"} 1\n"), "{text}");
        assert!(!text.contains("oldest_age_seconds{pool_name=\"t\",tag") && !text.contains("pinpool_memory"), "{text}");
    }

    #[test]
    fn buckets_add_up_to_the_count() {
        let mut times = pinpool::stats::Histogram::default();
        [100, 300, 300, 1 << 50].into_iter().for_each(|nanos| times.record(std::time::Duration::from_nanos(nanos)));
        let object = serde_json::json!({ "requests": { "wait_time": times } });
        // Parsed from text, as an object from a socket is.
        let object: Value = serde_json::from_str(&object.to_string()).unwrap();
        let text = prometheus_text(&[(vec![("pool_name", "t".to_owned())], &object)]);
        let counts: Vec<_> = text
            .lines()
            .filter(|line| line.contains("_bucket{"))
            .filter_map(|line| line.rsplit_once("} "))
            .map(|(_, count)| count)
            .collect();
        assert_eq!((counts[0], counts[1], counts[30], counts[31]), ("1", "3", "3", "4"), "{text}");
        assert!(text.contains("le=\"0.000000256\""), "{text}");
        assert!(text.contains("pinpool_requests_wait_time_seconds_count{pool_name=\"t\"} 4"), "{text}");
    }
}
