//! Counts code lines: lines that hold a token, without tests.

use std::collections::BTreeSet;
use std::path::Path;

use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};

/// Code lines of one file.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) code: usize,
    /// Code lines of tests, in test files or in items under `#[cfg(test)]`.
    pub(crate) tests: usize,
}

/// Counts the Rust file `path`, relative to the root, with the text `source`.
pub(crate) fn count(path: &Path, source: &str) -> Count {
    let mut found = Lines { source: source.lines().collect(), code: BTreeSet::new(), tests: BTreeSet::new() };
    let tokens = source.parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    found.walk(tokens, false);
    let (code, tests) = (found.code.difference(&found.tests).count(), found.tests.len());
    if is_test_file(path) { Count { code: 0, tests: code } } else { Count { code, tests } }
}

/// The numbers of the lines with code and with tests.
struct Lines<'a> {
    source: Vec<&'a str>,
    code: BTreeSet<usize>,
    tests: BTreeSet<usize>,
}

impl Lines<'_> {
    /// The text from here to the end of its line.
    fn text_at(&self, span: Span) -> &str {
        let (line, column) = (self.source[span.start().line - 1], span.start().column);
        line.char_indices().nth(column).map_or("", |(at, _)| &line[at..])
    }

    /// Adds the lines of `tokens`. An item under a test attribute ends with a block, or with `;` or `,` at the end of a line.
    fn walk(&mut self, tokens: TokenStream, in_test: bool) {
        let (mut is_test, mut in_comment) = (in_test, false);
        for token in tokens {
            let mut is_end = false;
            match &token {
                // A doc comment is an attribute too, and each of its two or three tokens spans the whole comment.
                TokenTree::Punct(punct) if punct.as_char() == '#' => {
                    let text = self.text_at(punct.span());
                    in_comment = text.starts_with('/');
                    is_test |= is_test_attribute(text);
                }
                TokenTree::Punct(punct) if [';', ','].contains(&punct.as_char()) => {
                    is_end = self.text_at(punct.span()).trim_end().len() == 1;
                }
                _ => {}
            }
            match &token {
                TokenTree::Group(_) if in_comment => in_comment = false,
                TokenTree::Group(group) => {
                    self.enter(group.span_open(), is_test);
                    self.walk(group.stream(), is_test);
                    self.enter(group.span_close(), is_test);
                    is_end = group.delimiter() == Delimiter::Brace;
                }
                _ if in_comment => {}
                _ => self.enter(token.span(), is_test),
            }
            is_test = in_test || is_test && !is_end;
        }
    }

    fn enter(&mut self, span: Span, is_test: bool) {
        let (lines, source) = (span.start().line..=span.end().line, &self.source);
        let lines = lines.filter(|line| !source[line - 1].trim().is_empty());
        if is_test { self.tests.extend(lines) } else { self.code.extend(lines) }
    }
}

fn is_test_file(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_in = |folder: &str| path.iter().any(|part| part == folder);
    is_in("tests") || is_in("models") || matches!(name, "tests.rs" | "models.rs") || name.starts_with("all_")
}

/// `#[cfg(test)]`, `#[cfg(all(test, ...))]`, and the same for `loom`.
fn is_test_attribute(line: &str) -> bool {
    let Some(condition) = line.strip_prefix("#[cfg(") else { return false };
    let condition = condition.strip_prefix("all(").unwrap_or(condition);
    ["test", "loom"].iter().any(|word| {
        let rest = condition.strip_prefix(word);
        rest.is_some_and(|rest| !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_'))
    })
}
