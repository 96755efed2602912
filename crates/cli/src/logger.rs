//! The format of a log line: TensorFlow's prefix, in local time.
//!
//! ```text
//! 2018-06-27 18:09:11.701458: I src/report/log/checks.rs:247] Raising pool_size_limit_ from 100 to 110
//! ```
//!
//! `RUST_LOG` selects the lines that are shown (an empty value counts as unset), and `terminal` writes them.

use std::fmt::Display;
use std::io::{self, Write};

use env_logger::{Builder, Target};
use log::Record;

use crate::terminal::Terminal;

/// Sends the log to `terminal`, filtered by `RUST_LOG`, or by `default_filter` if it is not set.
pub fn init(terminal: &Terminal, default_filter: &str) {
    // An empty filter counts as unset, because env_logger would hide warnings.
    let filter = std::env::var("RUST_LOG").ok().filter(|filter| !filter.is_empty());
    Builder::new()
        .parse_filters(filter.as_deref().unwrap_or(default_filter))
        .format(|out, record| line(out, jiff::Zoned::now().strftime("%Y-%m-%d %H:%M:%S%.6f"), record))
        .target(Target::Pipe(Box::new(LogTarget(terminal.clone()))))
        .init();
}

fn line(out: &mut impl Write, time: impl Display, record: &Record<'_>) -> io::Result<()> {
    let severity = &record.level().as_str()[..1];
    let (file, line) = (record.file().unwrap_or("?"), record.line().unwrap_or(0));
    write!(out, "{time}: {severity} {file}:{line}] ")?;
    let text = record.args().to_string();
    // The pool's own reports have several lines. A line end in any other text is part of a name, and is escaped.
    let is_report = record.target().starts_with("pinpool::");
    writeln!(out, "{}", if is_report { text } else { text.replace('\n', "\\n") })
}

/// The terminal as a writer. env_logger writes each record in one call: one line, or a report of the pool.
struct LogTarget(Terminal);

impl Write for LogTarget {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        bytes.split_inclusive(|&byte| byte == b'\n').for_each(|line| self.0.write(line));
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use log::Level;

    use super::*;

    #[test]
    fn a_line_has_the_format_of_tensorflow() {
        let args = format_args!("Raising pool_size_limit_ from 100 to 110");
        let mut out = Vec::new();
        let record = Record::builder()
            .args(args)
            .level(Level::Info)
            .file(Some("src/report/log/checks.rs"))
            .line(Some(247))
            .build();
        let time: jiff::civil::DateTime = "2018-06-27T18:09:11.701458".parse().unwrap();
        line(&mut out, time.strftime("%Y-%m-%d %H:%M:%S%.6f"), &record).unwrap();
        let expected =
            "2018-06-27 18:09:11.701458: I src/report/log/checks.rs:247] Raising pool_size_limit_ from 100 to 110\n";
        assert_eq!(String::from_utf8(out).unwrap(), expected);
    }

    #[test]
    fn only_reports_of_the_pool_have_several_lines() {
        let text = |target| {
            let mut out = Vec::new();
            line(&mut out, "now", &Record::builder().args(format_args!("a\nb")).target(target).build()).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!([text("pinpool::shortage"), text("other")], ["now: I ?:0] a\nb\n", "now: I ?:0] a\\nb\n"]);
    }
}
