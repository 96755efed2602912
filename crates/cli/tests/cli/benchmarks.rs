//! The generated tables of docs/benchmarks.md. `UPDATE_DOCS=1` regenerates them.
#![allow(clippy::print_stdout)] // Says what was skipped.

use std::fs;
use std::process::Command;

#[test]
fn the_tables_of_the_replays_are_those_of_the_script() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/benchmarks.md");
    let mut page = fs::read_to_string(path).unwrap();
    let Ok(ran) = Command::new("python3").arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../.ci/tables")).output() else {
        println!("skipped: there is no python3");
        return;
    };
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let made = String::from_utf8(ran.stdout).unwrap();
    let mut stale = Vec::new();
    for made in made.trim_end().split("\n\n") {
        let head = made.lines().next().unwrap();
        let begin = page.find(&format!("{head}\n")).unwrap_or_else(|| panic!("no table begins with {head}"));
        let end = page[begin..].find("\n\n").map_or(page.len(), |len| begin + len);
        if page[begin..end] != *made {
            page.replace_range(begin..end, made);
            stale.push(head.to_owned());
        }
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(path, page).unwrap();
    } else {
        assert_eq!(stale, [""; 0], "UPDATE_DOCS=1 writes these tables of docs/benchmarks.md again");
    }
}
