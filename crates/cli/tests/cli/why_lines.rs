//! `pinpool why --lines` on the lines of public runs in the format of each version, and on damaged logs.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::Value;
use tempfile::TempDir;

use crate::TREND;
use crate::tf_lines::{AFTER, RAISE, Row, after, inspected, objects, public_rows};
use crate::tool::{Ran, finish, packed, pinpool, written};

impl Row {
    fn is_raise(&self) -> bool {
        self.numbers.len() == 2
    }

    fn number(&self, at: usize) -> Option<u64> {
        self.numbers[at].parse().ok()
    }

    /// Returns the limits and allocation counts that fit these numbers, computed from the definition.
    fn fits(&self) -> Vec<(u64, u64)> {
        let Some(get) = self.number(0) else { return Vec::new() };
        let (put, evicted) = (self.number(1).unwrap(), self.number(2).unwrap());
        let (mut previous, mut limit) = (0, 100_u64);
        let mut fits = Vec::new();
        while limit < 10_000_000 {
            let allocated = i128::from(get) - i128::from(put) + i128::from(evicted) + i128::from(limit - previous);
            if (0..=i128::from(get)).contains(&allocated) {
                let allocated = u64::try_from(allocated).unwrap();
                let printed: f64 = self.numbers[4].parse().unwrap();
                let rate = if get == 0 { 0.0 } else { allocated as f64 / get as f64 };
                if format!("{rate:.5e}") == format!("{printed:.5e}") {
                    fits.push((limit, allocated));
                }
            }
            (previous, limit) = (limit, limit + limit / 10);
        }
        fits
    }
}

/// Writes the rows of each run to a separate file.
fn write_runs(dir: &Path, rows: &[Row], text: impl Fn(&[&Row]) -> Vec<u8>) -> Vec<PathBuf> {
    let mut runs: BTreeMap<&str, Vec<&Row>> = BTreeMap::new();
    rows.iter().for_each(|row| runs.entry(&row.run).or_default().push(row));
    let write = |(run, rows): (&str, Vec<&Row>)| {
        let path = dir.join(format!("{run}.log"));
        fs::write(&path, text(&rows)).unwrap();
        path
    };
    runs.into_iter().map(write).collect()
}

fn inspect(paths: &[PathBuf], flags: &[&str]) -> Ran {
    finish(pinpool(&["inspect"]).args(flags).args(paths))
}

fn limits(messages: &[Value]) -> Vec<Option<u64>> {
    messages.iter().map(|message| message["limit"].as_u64()).collect()
}

const LATER: &str = "PoolAllocator: After 71532 get requests, put_count=71532 evicted_count=1000 eviction_rate=0.0139798 and \
                     unsatisfied allocation rate=0.0143013";
/// Formats a row as one version or kind of log does. In `source_line`, the second number is the source line of raises.
type Format = fn(&Row) -> String;

fn source_line(row: &Row, lines: (u32, u32)) -> u32 {
    if row.is_raise() { lines.1 } else { lines.0 }
}

const GPU: &str = "tensorflow/core/common_runtime/gpu/pool_allocator.cc";

const FORMATS: [(&str, Format); 11] = [
    ("bare", |row| format!("{}\n", row.message())),
    ("0.5", |row| {
        let severity = if row.is_raise() { 'I' } else { 'W' };
        format!("{severity} {GPU}:{}] {}\n", source_line(row, (227, 239)), row.message())
    }),
    ("0.6", |row| format!("I {GPU}:{}] {}\n", source_line(row, (242, 254)), row.message())),
    ("0.10", |row| format!("I {GPU}:{}] {}\r\n", source_line(row, (244, 256)), row.message())),
    ("0.12", |row| format!("I {GPU}:{}] {}\n", source_line(row, (247, 259)), row.message())),
    ("1.x", |row| format!("{}: I {GPU}:{}] {}\n", row.time, source_line(row, (247, 259)), row.message())),
    ("windows", |row| {
        let path = r"c:\tf_jenkins\home\workspace\release-win\device\gpu\os\windows\tensorflow\core\common_runtime\gpu\pool_allocator.cc";
        format!("{}: I {path}:{}] {}\r\n", row.time, source_line(row, (247, 259)), row.message())
    }),
    ("progress bar", |row| {
        let line = source_line(row, (247, 259));
        format!("\r 10%|#1        | 12/120 [00:03<00:27,  3.92it/s]I {GPU}:{line}] {}\n\r 11%|#1", row.message())
    }),
    ("pinpool", |row| format!("{}: I src/report/log/emit.rs:77] {}\n", row.time, row.message())),
    ("notebook", |row| format!("      \"I {GPU}:{}] {}\\n\",\n", source_line(row, (247, 259)), row.message())),
    ("notebook on one line", |row| format!("I {GPU}:{}] {}\\n", source_line(row, (247, 259)), row.message())),
];

#[test]
fn every_public_line_is_recognized_in_every_format_and_its_limit_is_right() {
    let all = public_rows();
    let some = some_rows();
    for (at, (name, format)) in FORMATS.into_iter().enumerate() {
        let dir = TempDir::new().unwrap();
        let text = |rows: &[&Row]| rows.iter().map(|row| format(row)).collect::<String>().into_bytes();
        // Surrounding text does not change the numbers, so only the first format is tested with all rows.
        let (rows, expected) = if at == 0 { (&all, (64, 1760)) } else { (&some, SOME) };
        let ran = inspect(&write_runs(dir.path(), rows, text), &["--json"]);
        assert_eq!(ran.code(), 0, "{name}: {}", ran.stderr);
        assert_eq!(check(name, rows, &ran), expected, "{name}");
    }
}

/// The rows of every tenth run: four of two lines, one of 23 and one of 170.
fn some_rows() -> Vec<Row> {
    public_rows().into_iter().filter(|row| row.run.ends_with('3')).collect()
}

/// Runs, and messages with a limit that follows from their numbers, in [`some_rows`].
const SOME: (usize, usize) = (6, 185);

#[test]
fn utf_16_is_read_as_powershell_writes_it() {
    let rows = some_rows();
    let dir = TempDir::new().unwrap();
    let text = |rows: &[&Row]| {
        let text: String = rows.iter().map(|row| format!("{}: I é:247] {}\r\n", row.time, row.message())).collect();
        std::iter::once(0xfeff).chain(text.encode_utf16()).flat_map(u16::to_le_bytes).collect()
    };
    assert_eq!(check("UTF-16", &rows, &inspect(&write_runs(dir.path(), &rows, text), &["--json"])), SOME);
}

/// Compares all messages with the rows. Returns the number of runs, and the number of messages with a limit that follows from
/// their numbers.
fn check(name: &str, rows: &[Row], ran: &Ran) -> (usize, usize) {
    let (messages, summaries) = objects(ran);
    assert_eq!(messages.len(), rows.len(), "{name}");
    assert!(summaries.iter().all(|summary| summary["cut"] == 0), "{name}");
    let mut known = 0;
    for (row, message) in rows.iter().zip(&messages) {
        let line = row.message();
        if row.is_raise() {
            let (from, to) = (message["from"].as_u64(), message["to"].as_u64());
            assert_eq!((from, to), (row.number(0), row.number(1)), "{name}: {line}");
            assert_eq!(message["limit"].as_u64(), row.number(0), "{name}: {line}");
            continue;
        }
        for (at, key) in ["get", "put", "evicted"].into_iter().enumerate() {
            assert_eq!(message[key].as_u64(), row.number(at), "{name}: {key} of {line}");
        }
        for (at, key) in [(3, "eviction_rate"), (4, "unsatisfied_rate")] {
            assert_eq!(message[key].as_f64(), row.numbers[at].parse().ok(), "{name}: {key} of {line}");
        }
        if let [(limit, allocated)] = row.fits().as_slice() {
            assert_eq!(message["limit"].as_u64(), Some(*limit), "{name}: {line}");
            assert_eq!(message["allocated"].as_u64(), Some(*allocated), "{name}: {line}");
            known += 1;
        }
    }
    (summaries.len(), known)
}

#[test]
fn raises_that_were_not_printed_are_counted() {
    let (messages, summary) =
        inspected(format!("{AFTER}\n{RAISE}\n{LATER}\nRaising pool_size_limit_ from 256 to 281\n"));
    assert_eq!(limits(&messages), [Some(100), Some(100), Some(256), Some(256)]);
    let silent: Vec<_> = messages.iter().map(|message| message["silent_raises"].as_u64().unwrap()).collect();
    // The unprinted raises are from 110, 121, 133, 146, 160, 176, 193, 212 and 233.
    assert_eq!(silent, [0, 0, 9, 0]);
    assert_eq!((summary["raises_printed"].as_u64(), summary["raises_silent"].as_u64()), (Some(2), Some(9)));
    assert_eq!(summary["limit"], 281);
}

#[test]
fn a_limit_that_the_figures_leave_open_comes_from_the_lines_around() {
    // The numbers fit the limits 100 and 1158.
    let open = after("1648707130", "1648707127", "2741000", "0.00166251", "0.00166258");
    assert_eq!(limits(&inspected(&open).0), [None]);
    assert_eq!(inspected(&open).0[0]["allocated"], Value::Null);
    let raised = "Raising pool_size_limit_ from 1158 to 1273";
    assert_eq!(limits(&inspected(format!("{open}\n{raised}")).0), [Some(1158), Some(1158)]);
    // An earlier message also decides, because the counters continue in the same pool.
    let before = after("1000000", "999997", "2000", "0.00200001", "0.002108");
    assert_eq!(limits(&inspected(format!("{before}\n{open}")).0), [Some(1158), Some(1158)]);
}

#[test]
fn pools_with_another_start_have_the_limits_of_their_raises() {
    let (first, later) =
        (after("2000", "2000", "1000", "0.5", "0.625"), after("3000", "3000", "1000", "0.333333", "0.341667"));
    let (messages, _) = inspected(format!("{first}\nRaising pool_size_limit_ from 250 to 275\n{later}\n"));
    assert_eq!(limits(&messages), [Some(250), Some(250), Some(275)]);
    assert_eq!(messages[2]["allocated"], 1025);
}

#[test]
fn lines_that_were_cut_wrapped_or_run_together_lose_no_other() {
    // Another process wrote into the middle of a message.
    let (cut, whole) = (&AFTER[..50], AFTER);
    let (messages, summary) = inspected(format!("{cut}I x:247] {whole}\n{RAISE}{RAISE}\nRaising pool_size_limit_ fr"));
    assert_eq!((messages.len(), summary["cut"].as_u64()), (3, Some(2)));
    // Lines wrapped as in a book or an 80-column terminal, between words or within a word.
    for at in [40, 57, 90, 110] {
        let (messages, summary) = inspected(format!("a\n{}\n{}\n{RAISE}", &AFTER[..at], &AFTER[at..]));
        assert_eq!((messages.len(), summary["cut"].as_u64()), (2, Some(0)), "{at}");
        assert_eq!((messages[0]["line"].as_u64(), messages[0]["get"].as_u64()), (Some(2), Some(63_521)), "{at}");
    }
    // A number that is too large for a counter.
    let (messages, summary) = inspected(format!("{}\n{RAISE}", AFTER.replace("63521", "99999999999999999999999")));
    assert_eq!((messages.len(), summary["cut"].as_u64()), (1, Some(1)));
    // Bytes that are not text.
    let (messages, _) = inspected([b"\xf0\n\0\x80\n\n".as_slice(), AFTER.as_bytes()].concat());
    assert_eq!((messages.len(), messages[0]["line"].as_u64()), (1, Some(4)));
}

#[test]
fn a_log_without_such_lines_says_so() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("empty"), "").unwrap();
    fs::write(path("other"), "step 1\nstep 2\n").unwrap();
    fs::write(path("cut"), &AFTER[..60]).unwrap();
    fs::write(path("good"), AFTER).unwrap();
    for (name, words) in
        [("empty", "in 0 lines"), ("other", "in 2 lines"), ("cut", "1 are truncated"), ("missing", "No such file")]
    {
        let ran = inspect(&[path(name)], &[]);
        assert_eq!((ran.code(), ran.stdout.as_str()), (1, ""), "{name}");
        ran.check_stderr(words);
        ran.check_stderr(name);
    }
    // A missing log does not prevent other logs from being read.
    let ran = inspect(&[path("missing"), path("good")], &["--json"]);
    assert_eq!((ran.code(), ran.stdout.lines().count()), (1, 2));
}

#[test]
fn gzip_and_stdin_are_read() {
    let dir = TempDir::new().unwrap();
    let packed = written(dir.path(), "log.gz", packed(format!("{AFTER}\n{RAISE}\n").as_bytes()));
    assert_eq!(objects(&inspect(std::slice::from_ref(&packed), &["--json"])).0.len(), 2);
    let ran = finish(pinpool(&["inspect", "--json", "-"]).stdin(Stdio::from(File::open(&packed).unwrap())));
    assert_eq!(objects(&ran).0.len(), 2);
    // Truncated in the middle.
    let bytes = fs::read(&packed).unwrap();
    fs::write(&packed, &bytes[..bytes.len() / 2]).unwrap();
    inspect(&[packed], &[]).exits(1).check_stderr("log.gz");
}

#[test]
fn the_diagnosis_distinguishes_settled_from_growing_pools() {
    let steady = after("5000000", "5000000", "1000", "0.0002", "0.0002022");
    assert_eq!(inspected(format!("{AFTER}\n{RAISE}\n{steady}")).1[TREND], "steady");
    assert_eq!(inspected(format!("{AFTER}\n{RAISE}\n{LATER}")).1[TREND], "warming up");
    // At every limit, 99 % of the requests miss.
    let varied = |limit: u64, previous: u64| {
        let allocated = 1_000 + limit - previous;
        let get = allocated * 100 / 99;
        let [evicting, missing] = [1_000, allocated].map(|count| format!("{:.6}", count as f64 / get as f64));
        after(&get.to_string(), &get.to_string(), "1000", &evicting, &missing)
    };
    let (messages, summary) = inspected(format!("{}\n{}\n{}\n", varied(100, 0), varied(281, 256), varied(2049, 1863)));
    assert_eq!(limits(&messages), [Some(100), Some(281), Some(2049)]);
    assert_eq!(summary[TREND], "thrashing");
    let advice = summary["pools"][0]["advice"].to_string();
    assert!(advice.contains("PINPOOL_PRESET=adaptive") && advice.contains("PINPOOL_MAX_BYTES"), "{advice}");
    assert_eq!(inspected(RAISE).1[TREND], "unknown");
}

#[test]
fn the_table_is_for_people_and_has_a_row_for_each_line() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), format!("{AFTER}\n{RAISE}\n").repeat(60)).unwrap();
    let table = inspect(&[file.path().to_owned()], &[]).stdout;
    assert!(table.contains("120 messages in 120 lines"), "{table}");
    assert_eq!(table.lines().filter(|line| line.contains("63,521") || line.ends_with(" 110")).count(), 120, "{table}");
}
