//! Phrases with a plainer alternative stay out of Markdown, comments and string literals: each has a count that only
//! falls, with the text.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Phrases that the style of the project avoids, separated by `|`, what to write, and how often they may be in Markdown and in
/// Rust. Those that may be there have another meaning or are a fixed name.
const PHRASES: &[(&str, &str, usize, usize)] = &[
    ("a get|the get|gets that", "request", 0, 0),
    ("a put|the put", "return", 0, 0),
    ("page-lock|page-locks|page-locked|page-locking", "pin call, pinned", 0, 0),
    ("ceiling|ceilings", "limit", 0, 0),
    ("look at|looks at|looked at", "check", 0, 0),
    ("give back|gives back|given back|goes back", "release, return", 0, 0),
    ("control group|memory node|memory nodes|back-end|back-ends", "cgroup, NUMA node, backend", 0, 0),
    ("goes on|go on", "continue", 0, 0),
    ("mend|mends", "fix", 0, 0),
    (
        "for good|hardly|in vain|anew|in turns|by itself",
        "permanently, rarely, timed out, again, alternately, automatically",
        0,
        0,
    ),
    ("stands|nobody has|so many|as it holds", "is, no one, N, unchanged", 0, 0),
    ("verdicts|cure|driver double|cruel", "diagnosis, recommendation, mock driver, adversarial", 0, 0),
    ("beside", "while, next to, compared with", 0, 0),
    ("that of|those of|of its own", "repeat the noun; separate, dedicated", 0, 0),
    ("whose|of which", "a second sentence", 0, 0),
    ("ledgers", "shared limits", 0, 0),
    // The setting PINPOOL_LEDGER.
    ("ledger", "shared limit", 0, 5),
    // A key of `pinpool why --lines --json`.
    ("verdict", "diagnosis", 0, 6),
    // The name of a file, and of variables with the numbers of a report.
    ("figures", "statistics, numbers", 1, 3),
    // For places: "where a request would be placed".
    ("where there|where none", "if", 0, 0),
    ("where it|where no|where they|where that|where a", "if, when", 0, 10),
    // Lines of logs and files.
    ("in line|the line", "waiting, in the wait queue", 0, 6),
];

/// Counts each phrase as whole words, in upper and lower case, once per place.
fn count(text: &str, phrase: &str) -> usize {
    let is_word = |letter: Option<char>| letter.is_some_and(|letter| letter.is_alphanumeric() || letter == '_');
    let is_free =
        |at: usize| !is_word(text[..at].chars().next_back()) && !is_word(text[at + phrase.len()..].chars().next());
    text.match_indices(phrase).filter(|(at, _)| is_free(*at)).count()
}

/// The comments and string literals of Rust code, in lower case and without line ends.
fn prose(code: &str) -> String {
    let mut prose = String::new();
    let mut rest = code;
    while let Some(at) = rest.find(['/', '"', '\'', 'r']) {
        let is_part_of_word = rest[..at].ends_with(|letter: char| letter.is_alphanumeric() || letter == '_');
        rest = &rest[at..];
        let end = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if let Some(string) = rest.strip_prefix('"') {
            1 + end_of_string(string)
        } else if rest.starts_with("r\"") || rest.starts_with("r#") && !is_part_of_word {
            let hashes = rest[1..].len() - rest[1..].trim_start_matches('#').len();
            let close = format!("\"{}", "#".repeat(hashes));
            rest.get(hashes + 2..)
                .and_then(|body| body.find(&close))
                .map_or(1, |found| hashes + 2 + found + close.len())
        } else {
            // A quote or a backslash as a character.
            rest = ["'\"'", "'\\\"'", "'\\''", "'/'"]
                .iter()
                .find_map(|quoted| rest.strip_prefix(quoted))
                .unwrap_or(&rest[1..]);
            continue;
        };
        let (text, behind) = rest.split_at(end.max(1));
        prose.push_str(text.trim_start_matches(['/', '!']));
        prose.push(' ');
        rest = behind;
    }
    prose.to_lowercase().split_whitespace().filter(|word| *word != "\\").collect::<Vec<_>>().join(" ")
}

fn end_of_string(text: &str) -> usize {
    let mut is_escaped = false;
    for (at, letter) in text.char_indices() {
        match letter {
            '"' if !is_escaped => return at + 1,
            '\\' => is_escaped = !is_escaped,
            _ => is_escaped = false,
        }
    }
    text.len()
}

/// The texts of all files with this extension below `folder`, but for data, build outputs and this file.
fn texts(folder: &Path, extension: &str, out: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("the folder can be read").path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() && !name.starts_with('.') && name != "target" && !path.ends_with("tests/data") {
            texts(&path, extension, out);
        } else if path.extension().is_some_and(|found| found == extension) && name != "prose.rs" {
            let text = fs::read_to_string(&path).expect("the file can be read");
            let words = text.split_whitespace().collect::<Vec<_>>().join(" ").to_lowercase();
            out.push(if extension == "rs" { prose(&text) } else { words });
        }
    }
}

#[test]
fn phrases_do_not_spread() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let (mut markdown, mut rust) = (Vec::new(), Vec::new());
    texts(&root, "md", &mut markdown);
    texts(&root, "rs", &mut rust);
    let mut wrong = String::new();
    for &(phrases, instead, most_in_markdown, most_in_rust) in PHRASES {
        let of_all = |text: &String| phrases.split('|').map(|phrase| count(text, phrase)).sum::<usize>();
        let found = [&markdown, &rust].map(|texts| texts.iter().map(of_all).sum::<usize>());
        if found != [most_in_markdown, most_in_rust] {
            let _ = writeln!(wrong, "    (\"{phrases}\", \"{instead}\", {}, {}),", found[0], found[1]);
        }
    }
    assert!(
        wrong.is_empty(),
        "phrases that differ from their counts (the second column says what to write; lower a count with the text):\n{wrong}"
    );
}

#[test]
fn comments_and_strings_are_prose_and_code_is_not() {
    let code = "let ceiling = '\"'; // A CEILING\n/// of which\nlet text = \"a \\\"get\\\" \\\n  anew\"; let raw = r#\"x \"y\" z\"#;";
    assert_eq!(prose(code), "a ceiling of which \"a \\\"get\\\" anew\" r#\"x \"y\" z\"#");
    assert_eq!([count("a get, the gets; a get", "a get"), count("pinpool_ledger ledger", "ledger")], [2, 1]);
}
