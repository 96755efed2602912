//! Holds two rules for all sources: a file without its tests has at most [`MOST_LINES`] lines, and who allows code that has no
//! caller says why on the same line.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Lines of a file, comments among them, without its tests.
const MOST_LINES: usize = 450;

#[test]
fn no_file_is_long() {
    let crates = fs::read_dir(root().join("crates")).expect("the crates can be read");
    let crates = crates.map(|entry| entry.expect("the crates can be read").path().join("src"));
    let mut long = String::new();
    for (path, text) in crates.chain(["src", "python/src"].map(|folder| root().join(folder))).flat_map(sources) {
        // Files of tests alone.
        if path.iter().any(|part| part == "tests") || path.ends_with("tests.rs") || path.ends_with("models.rs") {
            continue;
        }
        let lines = lines_without_tests(&text);
        if lines > MOST_LINES {
            let _ = writeln!(long, "{}: {lines} lines", path.display());
        }
    }
    assert!(long.is_empty(), "files of more than {MOST_LINES} lines without their tests:\n{long}");
}

/// The lines before the first module of tests.
fn lines_without_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let is_of_tests = |&at: &usize| {
        let item = lines[at..].iter().find(|line| !line.starts_with("#["));
        (lines[at].starts_with("#[cfg(test)]") || lines[at].starts_with("#[cfg(all(test"))
            && item.is_some_and(|item| item.split(' ').any(|word| word == "mod"))
    };
    (0..lines.len()).find(is_of_tests).unwrap_or(lines.len())
}

#[test]
fn who_allows_unused_code_says_why() {
    let mut silent = String::new();
    let mut allowed = 0;
    let folders = ["src", "crates", "python/src", "tests", "benches", "examples"];
    for (path, text) in folders.map(|folder| root().join(folder)).into_iter().flat_map(sources) {
        let mut lines = Vec::new();
        find_allowed(text.parse().expect("a source file is made of tokens"), &mut lines);
        allowed += lines.len();
        for number in lines {
            let line = text.lines().nth(number - 1).expect("the tokens are from this text");
            if line.split_once("//").is_none_or(|(_, reason)| reason.trim().is_empty()) {
                let _ = writeln!(silent, "{}:{number}: {}", path.display(), line.trim());
            }
        }
    }
    assert!(silent.is_empty(), "no reason behind `//` on the line:\n{silent}");
    assert!(allowed > 5, "the attributes are found");
}

/// The lines of all lints about unused code that an attribute allows or expects.
fn find_allowed(tokens: TokenStream, lines: &mut Vec<usize>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let is_punct =
        |token: &TokenTree, punct: char| matches!(token, TokenTree::Punct(found) if found.as_char() == punct);
    for (at, token) in tokens.iter().enumerate() {
        let TokenTree::Group(group) = token else { continue };
        // Behind `#` or `#!`.
        let before = tokens[..at].iter().rev().find(|token| !is_punct(token, '!'));
        if group.delimiter() == Delimiter::Bracket && before.is_some_and(|token| is_punct(token, '#')) {
            find_lints(group.stream(), false, lines);
        } else {
            find_allowed(group.stream(), lines);
        }
    }
}

fn find_lints(attribute: TokenStream, is_allowed: bool, lines: &mut Vec<usize>) {
    let mut word = String::new();
    for token in attribute {
        match &token {
            TokenTree::Group(group) => find_lints(group.stream(), word == "allow" || word == "expect", lines),
            TokenTree::Ident(lint) => {
                word = lint.to_string();
                if is_allowed && (word == "dead_code" || word.starts_with("unused")) {
                    lines.push(lint.span().start().line);
                }
            }
            _ => {}
        }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The path below the root and the text of each source below `folder`.
fn sources(folder: PathBuf) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(&folder).expect("the sources can be read") {
        let path = entry.expect("the sources can be read").path();
        if path.is_dir() {
            found.extend(sources(path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("a source file is text");
            found.push((path.strip_prefix(root()).expect("it lies below the root").to_owned(), text));
        }
    }
    found
}
