//! A recorder for Prometheus, and the smallest server that it can scrape.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusRecorder};

/// The recorder, with the buckets that the pool counts in.
pub(crate) fn recorder() -> Result<PrometheusRecorder, BuildError> {
    let times = Matcher::Suffix("time".to_owned());
    let builder = PrometheusBuilder::new()
        .with_recommended_naming(true)
        .set_buckets_for_metric(times, &pinpool_metrics::bucket_bounds())?;
    let recorder = builder.build_recorder();
    // Names have the units that the recorder is told before it writes.
    metrics::with_local_recorder(&recorder, pinpool_metrics::describe_metrics);
    Ok(recorder)
}

/// Answers each request with `text`, one after the other, for as long as the listener accepts.
pub(crate) fn answer(listener: &TcpListener, text: impl Fn() -> String) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        // A client that went away or sends nothing is no reason to end.
        let _ = answer_one(&stream, &text);
    }
}

fn answer_one(mut stream: &TcpStream, text: impl Fn() -> String) -> io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut request = String::new();
    // Headers end with an empty line; what they say does not matter.
    let mut lines = BufReader::new(stream.take(16 << 10));
    while lines.read_line(&mut request)? > 2 {}
    let (status, body) =
        if request.starts_with("GET /metrics") { ("200 OK", text()) } else { ("404 Not Found", String::new()) };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    )
}
