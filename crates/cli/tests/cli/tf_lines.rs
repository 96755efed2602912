//! TensorFlow's lines in public runs, and what `pinpool why --lines` finds in a log.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::tool::{Ran, finish, pinpool};

pub(crate) const AFTER: &str = "PoolAllocator: After 63521 get requests, put_count=63521 evicted_count=1000 \
                                eviction_rate=0.0157428 and unsatisfied allocation rate=0.0173171";
pub(crate) const RAISE: &str = "Raising pool_size_limit_ from 100 to 110";

/// Returns what a check prints for these counts and rates.
pub(crate) fn after(get: &str, put: &str, evicted: &str, eviction_rate: &str, rate: &str) -> String {
    format!(
        "PoolAllocator: After {get} get requests, put_count={put} evicted_count={evicted} eviction_rate={eviction_rate} and \
         unsatisfied allocation rate={rate}"
    )
}

/// A row of `tests/data/tf_lines/public.tsv`.
pub(crate) struct Row {
    pub(crate) run: String,
    pub(crate) time: String,
    /// Numbers of `after`: get, put, evicted, and both rates as printed. Numbers of `raise`: from and to.
    pub(crate) numbers: Vec<String>,
}

impl Row {
    pub(crate) fn message(&self) -> String {
        match self.numbers.as_slice() {
            [get, put, evicted, eviction_rate, rate] => after(get, put, evicted, eviction_rate, rate),
            [from, to] => format!("Raising pool_size_limit_ from {from} to {to}"),
            _ => unreachable!(),
        }
    }
}

pub(crate) fn public_rows() -> Vec<Row> {
    let text = fs::read_to_string(Path::new(crate::ROOT).join("tests/data/tf_lines/public.tsv")).unwrap();
    let row = |line: &str| {
        let cells: Vec<String> = line.split('\t').map(str::to_owned).collect();
        let numbers = if cells[1] == "after" { &cells[3..8] } else { &cells[8..10] };
        Row { run: cells[0].clone(), time: cells[2].clone(), numbers: numbers.to_vec() }
    };
    let rows: Vec<_> = text.lines().skip(1).map(row).collect();
    assert_eq!(rows.len(), 1905);
    rows
}

/// The objects on stdout: messages and summaries.
pub(crate) fn objects(ran: &Ran) -> (Vec<Value>, Vec<Value>) {
    let objects = ran.stdout.lines().map(|line| serde_json::from_str(line).unwrap());
    objects.partition(|object: &Value| object["kind"] != "summary")
}

/// The messages and the summary of one log.
pub(crate) fn inspected(text: impl AsRef<[u8]>) -> (Vec<Value>, Value) {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    let (messages, mut summaries) = objects(&finish(pinpool(&["inspect", "--json"]).arg(file.path())).exits(0));
    (messages, summaries.remove(0))
}
