//! `pinpool completions`, `pinpool man` and removed commands.

use crate::tool::run;

#[test]
fn completions_know_every_command_and_flag() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ran = run(&["completions", shell]);
        assert_eq!((ran.code(), ran.stderr.as_str()), (0, ""), "{shell}");
        for word in ["load", "doctor", "advise", "require-gpu", "batch-bytes"] {
            assert!(ran.stdout.contains(word), "{shell}: no {word}");
        }
    }
    assert_eq!(run(&["completions", "purple"]).code(), 2);
}

#[test]
fn a_removed_command_is_answered_with_its_replacement() {
    let ran = run(&["keep", "weights", "--bytes", "4GiB"]).refuses(2);
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
    ran.check_stderr("`pinpool keep` was removed: reserve memory at the start of each process (PINPOOL_RESERVE)");
    run(&["ledger", "job7"]).check_stderr("`pinpool ledger` was removed: `pinpool top --all` shows");
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
    run(&["man", "purple"]).exits(1).check_stderr("man purple: unknown command");
}

#[test]
fn help_names_each_command_once_and_fits_one_screen() {
    let commands = ["doctor", "load", "run", "why", "top", "report", "metrics", "advise", "trace"];
    let help = run(&["--help"]).stdout;
    let named: Vec<_> = help.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
    let named: Vec<_> = named.into_iter().filter(|word| !word.is_empty() && !word.starts_with('-')).collect();
    assert_eq!(named, commands);
    assert!((24..=30).contains(&help.lines().count()) && help.lines().all(|line| line.len() <= 80), "{help}");
    for command in commands {
        let help = run(&[command, "--help"]).stdout;
        assert!(help.contains("Example: pinpool ") && help.lines().count() <= 24, "{help}");
        let wide: Vec<_> = help.lines().filter(|line| line.chars().count() > 80).collect();
        assert!(wide.is_empty(), "{command}: {wide:?}");
        assert_eq!(run(&["man", command]).code(), 0);
    }
}
