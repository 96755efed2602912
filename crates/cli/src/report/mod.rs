//! `pinpool report`: a log, a recording or a process as one page of charts.
//!
//! | file | owns |
//! | --- | --- |
//! | `charts.rs` | the report as one object |
//! | `page.html`, `page.css`, `page.js` | the page that shows this object |
//! | `uplot.js`, `uplot.css`, `uplot.LICENSE` | uPlot 1.6.32, unchanged, which draws the charts |

mod charts;

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use pinpool_loader::StopFlag;
use serde_json::Value;

use self::charts::Charts;
use crate::files::{named, why};
use crate::interrupt::stop_at_interrupt;
use crate::served::names_process;
use crate::why::read_series;
use pinpool_cli::terminal::Terminal;

const TITLE: &str = "pinpool report";

/// Draw a page of charts of a log, a recording or a running process
///
/// Shows what is held and by whom, the time lost, limits and evictions. A process (started with PINPOOL_SOCKET=1) is observed for
/// --seconds. The page is one HTML file that needs no network, for light and dark screens and phones. If the file is truncated,
/// or the process ends while it is observed, the page shows the intact part, and the exit status is 1. It is also 1 if there is
/// nothing to draw.
#[derive(Debug, Args)]
#[command(after_help = "Example: pinpool report t.gz -o page.html")]
pub(crate) struct ReportArgs {
    /// Log or recording (`-` is stdin), process ID or socket
    #[arg(value_name = "LOG|TRACE|PID")]
    input: PathBuf,

    /// The page to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,

    /// Time to observe a process
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
}

pub(crate) fn run(args: &ReportArgs, terminal: &Terminal) -> Result<(), Box<dyn Error>> {
    // An interrupt ends the observation of a process, and the page is drawn.
    let stop = if names_process(&args.input) { stop_at_interrupt(terminal) } else { StopFlag::new() };
    crate::trace::refuse_to_overwrite(&args.input, &args.output)?;
    let series = read_series(&args.input, Duration::from_secs(args.seconds), &stop)?;
    if series.pools.iter().all(|pool| pool.points.is_empty()) {
        let why =
            series.warning.as_deref().unwrap_or("`pinpool why` prints the diagnoses, and PINPOOL_TRACE records charts");
        return Err(named(&args.input, &format_args!("nothing to draw: {why}")).into());
    }
    let page = html(&Charts::new(&series).report(TITLE, &named(&args.input, &series.source)));
    fs::write(&args.output, page).map_err(|error| named(&args.output, &why(&error)))?;
    let partial = |why| Err(named(&args.input, &format_args!("{why}; the report covers the part before")).into());
    series.warning.map_or(Ok(()), partial)
}

/// Returns the page, with its data, script and styles inline.
fn html(report: &Value) -> String {
    format!(
        include_str!("page.html"),
        title = TITLE,
        version = env!("CARGO_PKG_VERSION"),
        css = [include_str!("uplot.css"), include_str!("page.css")].concat(),
        license = include_str!("uplot.LICENSE"),
        library = include_str!("uplot.js"),
        script = include_str!("page.js"),
        // Without `<`, no name of a file, pool or tag can end the element that contains the data.
        data = report.to_string().replace('<', "\\u003c"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_stay_text_and_the_page_fetches_nothing() {
        let name = "</script><!-- \u{202E} \u{1F600} \"\\ \u{1b} ü {{data}}";
        let page = html(&Value::from(name));
        let (_, rest) = page.split_once("id=\"report\">").unwrap();
        let (data, _) = rest.split_once("</script>").unwrap();
        assert!(!data.contains('<'), "{data}");
        assert_eq!(serde_json::from_str::<String>(data).unwrap(), name);
        assert!(page.contains("Copyright (c) 2022 Leon Sorokin") && page.contains("MERCHANTABILITY"));
        for fetch in ["src=", "@import", "url(", "fetch(", "XMLHttpRequest", "innerHTML"] {
            assert!(!page.contains(fetch), "{fetch}");
        }
    }
}
