//! `pinpool load --top` where there is no terminal. What it draws is tested beside its screen.

use crate::tool::{run, tree};

#[test]
fn without_a_terminal_nothing_is_loaded_and_the_reason_is_said() {
    let dir = tree();
    let ran = run(&["load", "--top", dir.path().to_str().unwrap()]);
    assert_eq!((ran.code(), ran.stdout.as_str()), (1, ""));
    ran.check_stderr("--top: stdout is no terminal");
}
