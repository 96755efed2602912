//! The README's table of log lines has every line of the library, with its level, and no other.

use std::collections::BTreeSet;
use std::fs;

use proc_macro2::{Delimiter, Literal, TokenStream, TokenTree};

/// Methods whose text comes from elsewhere, and the rows that stand for them. TensorFlow's two lines stand in a block of
/// their own above the table.
const ELSEWHERE: &[(&str, &[&str])] = &[
    ("checked", &[]),
    ("started", &["preset P, back-end B ..."]),
    ("found", &["the GPU is not used: ...", "memory is not page-locked: ..."]),
    ("out_of_memory", &["out of memory: N bytes asked by ..."]),
    ("bad_variables", &["PINPOOL_X=V: ..."]),
    ("stuck", &["a buffer of N bytes has ..."]),
];

/// A line that the code prints.
#[derive(Debug)]
struct Line {
    method: String,
    level: String,
    /// Its text up to the first figure, without the name of the pool.
    start: String,
}

fn read(file: &str) -> String {
    fs::read_to_string(format!("{}/{file}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// The lines of all methods in `tokens`.
fn collect(tokens: TokenStream, method: &str, lines: &mut Vec<Line>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut method = method.to_owned();
    for (at, token) in tokens.iter().enumerate() {
        let after = |offset: usize| tokens.get(at + offset).map(ToString::to_string).unwrap_or_default();
        match token {
            TokenTree::Ident(word) if word == "fn" => method = after(1),
            TokenTree::Ident(word) if word == "log" && after(1) == ":" && after(4) == "!" => {
                let Some(TokenTree::Group(arguments)) = tokens.get(at + 5) else { continue };
                let Some(TokenTree::Literal(text)) = arguments.stream().into_iter().next() else { continue };
                lines.push(Line { method: method.clone(), level: after(3), start: start_of(&text) });
            }
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
                collect(group.stream(), &method, lines);
            }
            _ => {}
        }
    }
}

/// The text of a format string up to its first figure.
fn start_of(text: &Literal) -> String {
    let text = text.to_string();
    let text = text.trim_matches('"').trim_start_matches("{self}");
    text.split('{').next().unwrap_or_default().to_owned()
}

/// The patterns of the table, each with its level: two where a row has two lines.
fn rows() -> Vec<(String, String)> {
    let readme = read("README.md");
    let (_, rest) = readme.split_once("<!-- lines -->\n").unwrap();
    let (table, _) = rest.split_once("<!-- end -->").unwrap();
    let mut rows = Vec::new();
    for row in table.lines().skip(2) {
        let cells: Vec<_> = row.split(" | ").collect();
        let [texts, level, ..] = cells.as_slice() else { panic!("a row with a level: {row}") };
        rows.extend(texts.split('`').skip(1).step_by(2).map(|text| (text.to_owned(), (*level).to_owned())));
    }
    rows
}

/// Up to its first placeholder: a word of one capital letter, or three dots.
fn literal_start(pattern: &str) -> String {
    let is_placeholder = |word: &str| word == "..." || word.len() == 1 && word.chars().all(char::is_uppercase);
    let words: Vec<_> = pattern.split(' ').take_while(|word| !is_placeholder(word)).collect();
    words.join(" ")
}

#[test]
fn every_line_is_in_the_table_with_its_level_and_every_row_is_a_line() {
    let mut lines = Vec::new();
    collect(read("src/diag.rs").parse().unwrap(), "", &mut lines);
    assert!(lines.len() > 20, "{lines:?}");
    let rows = rows();
    let mut met = BTreeSet::new();
    for line in &lines {
        let by_name = ELSEWHERE.iter().find(|(method, _)| *method == line.method);
        let patterns: Vec<&str> = match by_name {
            Some((_, patterns)) => patterns.to_vec(),
            None => {
                let is_it = |pattern: &str| {
                    let start = literal_start(pattern);
                    start.len() >= 6
                        && line.start.len() >= 6
                        && (line.start.starts_with(&start) || start.starts_with(&line.start))
                };
                let of_level = rows.iter().filter(|(_, level)| *level == line.level);
                of_level.map(|(pattern, _)| pattern.as_str()).filter(|pattern| is_it(pattern)).collect()
            }
        };
        assert!(by_name.is_some() || !patterns.is_empty(), "no row of the README has {line:?}");
        for pattern in patterns {
            let row = rows.iter().find(|(of, _)| of == pattern);
            assert!(row.is_some(), "no row of the README has `{pattern}` for {line:?}");
            met.insert(pattern.to_owned());
        }
    }
    // A second pattern of a row says more of the first.
    let also = ["GPU N ... is here and not used ...", "N buffers ..."];
    let unknown: Vec<_> =
        rows.iter().map(|(of, _)| of).filter(|of| !met.contains(*of) && !also.contains(&of.as_str())).collect();
    assert!(unknown.is_empty(), "no line of the code is {unknown:?}");
}
