//! The tables of docs/benchmarks.md that a command makes. `UPDATE_DOCS=1` writes them again.

use std::fs;

use crate::tool::{data, run};

/// The arguments of the command on the page.
fn arguments() -> Vec<String> {
    let folder = fs::read_dir(data("workloads")).unwrap().map(|file| file.unwrap().path().display().to_string());
    let mut traces: Vec<_> = folder.filter(|path| path.ends_with(".trace.gz")).collect();
    traces.sort();
    let flags = ["replay", "--format", "markdown", "--targets"].map(str::to_owned);
    flags.into_iter().chain([data("workloads/targets.csv")]).chain(traces).collect()
}

#[test]
fn the_tables_of_the_replays_are_those_of_the_command() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmarks.md");
    let mut page = fs::read_to_string(path).unwrap();
    let arguments = arguments();
    let ran = run(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(ran.code(), 0, "{}", ran.stderr);
    let mut stale = Vec::new();
    for made in ran.stdout.trim_end().split("\n\n") {
        let head = made.lines().next().unwrap();
        let begin = page.find(&format!("{head}\n")).unwrap_or_else(|| panic!("no table begins with {head}"));
        let end = page[begin..].find("\n\n").map_or(page.len(), |len| begin + len);
        // Of some tables the page has the sums and means alone.
        let has_all = page[begin..end].contains("\n| unet3d |");
        let has = |line: &str| has_all || line == head || line.starts_with("| ---") || line.starts_with("| **");
        let made = made.lines().filter(|line| has(line)).collect::<Vec<_>>().join("\n");
        if page[begin..end] != made {
            page.replace_range(begin..end, &made);
            stale.push(head.to_owned());
        }
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(path, page).unwrap();
    } else {
        assert_eq!(stale, [""; 0], "UPDATE_DOCS=1 writes these tables of docs/benchmarks.md again");
    }
}
