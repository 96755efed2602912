//! Counts code lines: lines that are left without comments, blank lines and tests.

use std::path::Path;

/// Code lines of one file.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) code: usize,
    /// Code lines of tests, in files of tests or in items under `#[cfg(test)]`.
    pub(crate) tests: usize,
}

/// Counts the Rust file `path`, relative to the root, with the text `source`.
pub(crate) fn count(path: &Path, source: &str) -> Count {
    let text = without_comments(source);
    let lines: Vec<&str> = text.split('\n').collect();
    let mut count = Count::default();
    let mut at = 0;
    while at < lines.len() {
        let end = if is_test_attribute(lines[at].trim()) { end_of_item(&lines, at) } else { at };
        if end > at {
            count.tests += lines[at..end].iter().filter(|line| !line.trim().is_empty()).count();
            at = end;
        } else {
            count.code += usize::from(!lines[at].trim().is_empty());
            at += 1;
        }
    }
    if is_test_file(path) { Count { code: 0, tests: count.code } } else { count }
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

/// The line after the item with its first attribute on line `at`.
fn end_of_item(lines: &[&str], at: usize) -> usize {
    let is_between = |line: &str| line.trim().starts_with("#[") || line.trim().is_empty();
    let mut next = at + 1;
    while next < lines.len() && is_between(lines[next]) {
        next += 1;
    }
    let (mut depth, mut has_block) = (0, false);
    while next < lines.len() {
        for character in lines[next].chars() {
            match character {
                '{' | '(' | '[' => depth += 1,
                '}' | ')' | ']' => depth -= 1,
                _ => {}
            }
            has_block |= character == '{';
        }
        let line = lines[next].trim_end();
        next += 1;
        if depth <= 0 && (has_block || line.ends_with([';', ','])) {
            break;
        }
    }
    next
}

/// The source without comments, and with `s` for each character of a string, so that brackets in them do not count.
fn without_comments(source: &str) -> String {
    let source: Vec<char> = source.chars().collect();
    let mut out = String::with_capacity(source.len());
    let mut at = 0;
    while at < source.len() {
        let rest = &source[at..];
        if rest.starts_with(&['/', '/']) {
            at += line_end(rest);
        } else if rest.starts_with(&['/', '*']) {
            let end = at + comment_end(rest);
            out.extend(source[at..end].iter().filter(|&&character| character == '\n'));
            at = end;
        } else if let Some(length) = string_length(rest, at.checked_sub(1).map(|before| source[before])) {
            let blank = |&character: &char| if character == '\n' { '\n' } else { 's' };
            out.push('"');
            out.extend(source[at + 1..at + length - 1].iter().map(blank));
            out.push('"');
            at += length;
        } else if let Some(length) = character_length(rest) {
            out.push_str("' '");
            at += length;
        } else {
            out.push(source[at]);
            at += 1;
        }
    }
    out
}

fn line_end(rest: &[char]) -> usize {
    rest.iter().position(|&character| character == '\n').unwrap_or(rest.len())
}

/// Block comments nest.
fn comment_end(rest: &[char]) -> usize {
    let (mut depth, mut at) = (1, 2);
    while at < rest.len() && depth > 0 {
        match rest[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    at
}

/// The length of the string literal that `rest` starts with, raw (after a letter `before` it is part of a name) or not.
fn string_length(rest: &[char], before: Option<char>) -> Option<usize> {
    let is_name = before.is_some_and(|before| before.is_alphanumeric() || before == '_');
    let prefix = usize::from(matches!(rest, ['b' | 'c', 'r', ..])) + 1;
    if !is_name && rest.get(prefix - 1) == Some(&'r') {
        let hashes = rest[prefix..].iter().take_while(|&&character| character == '#').count();
        if rest.get(prefix + hashes) == Some(&'"') {
            let body = prefix + hashes + 1;
            let is_end = |end: &usize| rest[*end] == '"' && rest[end + 1..].iter().take(hashes).all(|&c| c == '#');
            return Some((body..rest.len()).find(is_end).map_or(rest.len(), |end| end + 1 + hashes));
        }
    }
    if rest[0] != '"' {
        return None;
    }
    let mut end = 1;
    while end < rest.len() && rest[end] != '"' {
        end += if rest[end] == '\\' { 2 } else { 1 };
    }
    Some((end + 1).min(rest.len()))
}

/// The length of the character literal that `rest` starts with; a lifetime is none.
fn character_length(rest: &[char]) -> Option<usize> {
    match rest {
        ['\'', '\\', _, ..] => {
            let end = rest[3..].iter().take(9).position(|&character| character == '\'')?;
            Some(end + 4)
        }
        ['\'', _, '\'', ..] if rest[1] != '\'' => Some(3),
        _ => None,
    }
}
