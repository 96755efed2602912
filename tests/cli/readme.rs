//! The README must not drift from the code.

use std::fs;

use pinpool::config::env::VARIABLES;

fn read(file: &str) -> String {
    fs::read_to_string(format!("{}/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

#[test]
fn the_table_of_variables_is_the_table_in_the_code() {
    let rows = VARIABLES.iter().map(|v| format!("| `{}` | `{}` | {} |\n", v.name, v.default(), v.meaning));
    let table = format!("| variable | default | meaning |\n| --- | --- | --- |\n{}", rows.collect::<String>());
    let readme = read("README.md");
    let (_, rest) = readme.split_once("<!-- variables -->\n").unwrap();
    let (found, _) = rest.split_once("<!-- end -->").unwrap();
    assert_eq!(found, table, "the README should say:\n{table}");
}

#[test]
fn the_test_command_is_the_one_that_ci_runs() {
    let readme = read("README.md");
    let command = readme.lines().find(|line| line.starts_with("cargo test")).unwrap();
    assert!(read(".ci/run").lines().any(|line| line.ends_with(command)), "{command}");
}
