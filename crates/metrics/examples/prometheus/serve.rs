//! A recorder for Prometheus, and a minimal server to scrape.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusRecorder};

/// Returns a recorder with the buckets of the pool's histograms.
pub(crate) fn recorder() -> Result<PrometheusRecorder, BuildError> {
    let times = Matcher::Suffix("time".to_owned());
    let builder = PrometheusBuilder::new()
        .with_recommended_naming(true)
        .set_buckets_for_metric(times, &pinpool_metrics::bucket_bounds())?;
    let recorder = builder.build_recorder();
    // The recorder adds units only to the names of metrics that were described before.
    metrics::with_local_recorder(&recorder, pinpool_metrics::describe_metrics);
    Ok(recorder)
}

/// Answers each request with `text`, one after the other, for as long as the listener accepts.
pub(crate) fn answer(listener: &TcpListener, text: impl Fn() -> String) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        // A client that disconnects or sends nothing does not stop the server.
        let _ = answer_one(&stream, &text);
    }
}

fn answer_one(mut stream: &TcpStream, text: impl Fn() -> String) -> io::Result<()> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut request = String::new();
    // Headers end with an empty line and are ignored.
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
