//! `pinpool completions` and `pinpool man`.

use crate::tool::run;

#[test]
fn completions_know_every_command_and_flag() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ran = run(&["completions", shell]);
        assert_eq!((ran.code(), ran.stderr.as_str()), (0, ""), "{shell}");
        for word in ["load", "bench", "advise", "require-gpu", "batch-bytes"] {
            assert!(ran.stdout.contains(word), "{shell}: no {word}");
        }
    }
    assert_eq!(run(&["completions", "purple"]).code(), 2);
}

#[test]
fn the_manual_has_a_page_for_the_tool_and_for_each_command() {
    let tool = run(&["man"]);
    assert_eq!((tool.code(), tool.stderr.as_str()), (0, ""));
    assert!(tool.stdout.contains(".TH pinpool 1") && tool.stdout.contains("pinpool\\-load"), "{}", tool.stdout);
    let load = run(&["man", "load"]);
    assert!(load.stdout.contains(".TH pinpool-load 1"), "{}", load.stdout);
    for word in ["require\\-gpu", "Exits with 0 only if everything arrived"] {
        assert!(load.stdout.contains(word), "{word}: {}", load.stdout);
    }
    let unknown = run(&["man", "purple"]);
    assert_eq!(unknown.code(), 1);
    unknown.check_stderr("man purple: no such command of pinpool");
}
