//! `pinpool metrics`: the pools of running processes for Prometheus, from their sockets.

use std::error::Error;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use clap::Args;
use pinpool_metrics::prometheus_text;
use serde_json::Value;

use super::{all_of, name_of, on_host, pools};
use pinpool_cli::exit::ExitError;
use pinpool_cli::terminal::Terminal;

/// Longest time to wait for a client.
const PATIENCE: Duration = Duration::from_secs(5);
const REQUEST_BYTES_MAX: u64 = 16 << 10;

/// Print the metrics of running processes for Prometheus, or serve them
///
/// Works for programs in any language, also under `pinpool run`. The processes must run with PINPOOL_SOCKET=1 (or a path). Each
/// series has the labels pid, pool_name and backend. Exits with 1 if a process does not answer.
#[derive(Debug, Args)]
#[command(after_help = "Example: pinpool metrics --all --listen 127.0.0.1:9464
  http://127.0.0.1:9464/metrics")]
pub(crate) struct MetricsArgs {
    /// Process ids or sockets
    #[arg(value_name = "PID|SOCKET", required_unless_present = "all")]
    targets: Vec<String>,

    /// This user's processes (PINPOOL_SOCKET=1), at each scrape
    #[arg(long, conflicts_with = "targets")]
    all: bool,

    /// Serve the metrics at http://ADDR/metrics until stopped
    #[arg(long, value_name = "ADDR")]
    listen: Option<String>,
}

pub(crate) fn run(args: &MetricsArgs, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    if let Some(address) = &args.listen {
        return serve(address, args, terminal);
    }
    let (text, silent) = text(args);
    if !text.is_empty() {
        terminal.print(text.trim_end())?;
    }
    silent.iter().for_each(|why| terminal.message(why));
    if silent.is_empty() { Ok(()) } else { Err(ExitError::Failure.into()) }
}

/// Returns the metrics, and the errors of processes that did not answer.
fn text(args: &MetricsArgs) -> (String, Vec<String>) {
    let (objects, silent) = if args.all { on_host() } else { all_of(&args.targets, false) };
    let labeled: Vec<_> =
        objects.iter().flat_map(|object| pools(object).iter().map(|pool| (labels(object, pool), pool))).collect();
    (prometheus_text(&labeled), silent)
}

/// Returns the labels of a pool. An unnamed pool is labeled by its number.
fn labels(object: &Value, pool: &Value) -> Vec<(&'static str, String)> {
    let text = |name: &str| pool[name].as_str().unwrap_or_default().to_owned();
    vec![("pid", object["process"].to_string()), ("pool_name", name_of(pool)), ("backend", text("backend"))]
}

/// Serves the metrics until the process is stopped.
fn serve(address: &str, args: &MetricsArgs, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind(address).map_err(|error| format!("--listen {address}: {error}"))?;
    terminal.print(format_args!("http://{}/metrics", listener.local_addr()?))?;
    thread::scope(|scope| {
        loop {
            match listener.accept() {
                // A slow client does not delay others.
                Ok((stream, _)) => _ = thread::Builder::new().spawn_scoped(scope, move || answer(&stream, args)),
                // There are no free descriptors until a client has disconnected.
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    })
}

fn answer(mut stream: &TcpStream, args: &MetricsArgs) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let (mut request, mut line) = (String::new(), String::new());
    let mut lines = BufReader::new(stream.take(REQUEST_BYTES_MAX));
    lines.read_line(&mut request)?;
    // Headers end with an empty line and are ignored.
    while lines.read_line(&mut line)? > 2 {
        line.clear();
    }
    let mut words = request.split_whitespace();
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let is_metrics = path.split('?').next() == Some("/metrics");
    let (status, body) = match method {
        "GET" | "HEAD" if is_metrics => ("200 OK", text(args).0),
        "GET" | "HEAD" => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", String::new()),
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    )?;
    if method == "HEAD" { Ok(()) } else { stream.write_all(body.as_bytes()) }
}
