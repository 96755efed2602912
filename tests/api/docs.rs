//! The pages of `docs` that are made from the code: `settings.md` from the table of settings, `log-lines.md` from the comments of
//! the methods that print the lines. `UPDATE_DOCS=1` writes them anew.
//!
//! The comment of each method of `SOURCES` has its lines with their levels, and each of these is printed by a method.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;

use pinpool::unstable::config::env::VARIABLES;
use proc_macro2::{Delimiter, Literal, TokenStream, TokenTree};

/// Where lines are printed.
const SOURCES: [&str; 6] = [
    "src/diag.rs",
    "src/diag/warnings.rs",
    "src/diag/checks.rs",
    "src/diag/memory.rs",
    "src/diag/reserve.rs",
    "src/diag/ceilings.rs",
];

/// Methods whose text comes from elsewhere, and the first patterns of the lines that stand for them. TensorFlow's two lines are
/// explained in `troubleshooting.md`.
const ELSEWHERE: &[(&str, &[&str])] = &[
    ("checked", &[]),
    ("started", &["preset P, back-end B ..."]),
    ("found", &["the GPU is not used: ...", "memory is not page-locked: ..."]),
    ("out_of_memory", &["out of memory: N bytes asked by ..."]),
    ("unused_variables", &["PINPOOL_X=V: ..."]),
    ("stuck", &["a buffer of N bytes has ..."]),
];

const LEVELS: [&str; 5] = ["error", "warn", "info", "debug", "trace"];

/// A line that the code prints.
#[derive(Debug)]
struct Line {
    method: String,
    level: String,
    /// Where the target names it.
    kind: Option<String>,
    /// Its text up to the first figure, without the name of the pool.
    start: String,
}

/// A line as a comment documents it.
#[derive(Debug)]
struct Documented {
    /// Several where a second one says more of the first.
    patterns: Vec<String>,
    levels: Vec<String>,
    what_to_do: String,
}

fn path(file: &str) -> String {
    format!("{}/{file}", env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &str) -> String {
    fs::read_to_string(path(file)).unwrap()
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
                let mut arguments = arguments.stream().into_iter().peekable();
                let kind = arguments.next_if(|first| matches!(first, TokenTree::Ident(_))).map(|kind| kind.to_string());
                let Some(TokenTree::Literal(text)) = arguments.nth(kind.iter().count()) else { continue };
                lines.push(Line { method: method.clone(), level: after(3), kind, start: start_of(&text) });
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

/// The levels of a documented line, and its text without them. Fails on a paragraph without levels.
fn split_levels(text: &str) -> (Vec<String>, String, String) {
    let levels_of = |behind: &str| {
        let (levels, what_to_do) = behind.split_once("): ")?;
        let levels: Vec<_> = levels.split(", ").map(str::to_owned).collect();
        levels.iter().all(|level| LEVELS.contains(&level.as_str())).then(|| (levels, what_to_do.to_owned()))
    };
    let found = text.split_once("` (").and_then(|(patterns, behind)| Some((patterns, levels_of(behind)?)));
    let (patterns, (levels, what_to_do)) = found.unwrap_or_else(|| {
        panic!("a paragraph that begins with a backtick documents a log line: `LINE ...` (LEVEL): WHAT TO DO; found: {text}")
    });
    (levels, format!("{patterns}`"), what_to_do)
}

/// The paragraphs of comments that begin with a pattern.
fn documented_in(source: &str) -> Vec<Documented> {
    let comments = source.lines().map(|line| line.trim().strip_prefix("///").map(str::trim));
    let text: Vec<_> = comments.map(|comment| comment.unwrap_or_default()).collect();
    let paragraphs =
        text.split(|line| line.is_empty()).filter(|lines| lines.first().is_some_and(|line| line.starts_with('`')));
    let of = |lines: &[&str]| {
        let (levels, patterns, what_to_do) = split_levels(&lines.join(" "));
        let patterns = patterns.split('`').skip(1).step_by(2).map(str::to_owned).collect();
        Documented { patterns, levels, what_to_do }
    };
    paragraphs.map(of).collect()
}

fn documented() -> Vec<Documented> {
    documented_in(&SOURCES.map(read).concat())
}

/// Up to its first figure, which stands as one capital letter, or to three dots.
fn literal_start(pattern: &str) -> String {
    let is_figure = |word: &str| word == "..." || word.len() == 1 && word.chars().all(char::is_uppercase);
    let words: Vec<_> = pattern.split(' ').take_while(|word| !is_figure(word)).collect();
    words.join(" ")
}

#[test]
fn the_comments_have_every_line_with_its_level_and_no_other() {
    let mut lines = Vec::new();
    collect(SOURCES.map(read).concat().parse().unwrap(), "", &mut lines);
    assert!(lines.len() > 20, "{lines:?}");
    let documented = documented();
    let mut met = BTreeSet::new();
    for line in &lines {
        let by_name = ELSEWHERE.iter().find(|(method, _)| *method == line.method);
        let patterns: Vec<&str> = match by_name {
            Some((_, patterns)) => patterns.to_vec(),
            None => {
                let is_it = |pattern: &str| {
                    let start = literal_start(pattern);
                    let are_long = start.len() >= 6 && line.start.len() >= 6;
                    are_long && (line.start.starts_with(&start) || start.starts_with(&line.start))
                };
                let of_level =
                    documented.iter().filter(|of| of.levels.contains(&line.level)).flat_map(|of| &of.patterns);
                of_level.map(String::as_str).filter(|pattern| is_it(pattern)).collect()
            }
        };
        assert!(by_name.is_some() || !patterns.is_empty(), "no comment has {line:?}");
        met.extend(patterns.into_iter().map(str::to_owned));
    }
    let is_met = |of: &&Documented| !of.patterns.iter().any(|pattern| met.contains(pattern));
    let unknown: Vec<_> = documented.iter().filter(is_met).collect();
    assert!(unknown.is_empty(), "no line of the code is {unknown:?}");
}

#[test]
fn the_page_of_the_log_lines_has_every_target_and_no_other() {
    let mut lines = Vec::new();
    collect(SOURCES.map(read).concat().parse().unwrap(), "", &mut lines);
    let kinds: BTreeSet<_> = lines.into_iter().filter_map(|line| line.kind).collect();
    let page = read("docs/log-lines.md");
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `pinpool::")?.split('`').next());
    assert_eq!(rows.map(str::to_owned).collect::<BTreeSet<_>>(), kinds);
}

/// Compares what stands between the marks of a page with `made`, or writes it there.
fn check_page(file: &str, made: &str) {
    let page = read(file);
    let (begin, end) = ("<!-- made from the code: UPDATE_DOCS=1 cargo test --test api docs -->\n", "<!-- end -->");
    let (before, rest) = page.split_once(begin).unwrap();
    let (found, behind) = rest.split_once(end).unwrap();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(path(file), format!("{before}{begin}{made}{end}{behind}")).unwrap();
    } else {
        assert!(found == made, "{file} is not what the code says: UPDATE_DOCS=1 writes it anew");
    }
}

/// `text` in lines of at most 120 characters, behind a mark of a list.
fn item(text: &str) -> String {
    let mut lines = vec!["-".to_owned()];
    for word in text.split_whitespace() {
        let last = lines.last_mut().unwrap();
        if last.chars().count() + 1 + word.chars().count() > 120 {
            lines.push(format!("  {word}"));
        } else {
            write!(last, " {word}").unwrap();
        }
    }
    lines.join("\n") + "\n"
}

#[test]
#[should_panic(expected = "`verdict: odd ...` (info, warn if it costs time): nothing")]
fn a_documented_line_without_a_level_is_an_error() {
    documented_in("/// The verdict.\n///\n/// `verdict: odd ...` (info, warn if it costs time): nothing.\n");
}

#[test]
fn the_page_of_the_log_lines_is_that_of_the_comments() {
    let items = documented().into_iter().map(|Documented { patterns, levels, what_to_do }| {
        let patterns: Vec<_> = patterns.iter().map(|pattern| format!("`{pattern}`")).collect();
        item(&format!("{} ({}): {what_to_do}", patterns.join(", "), levels.join(", ")))
    });
    check_page("docs/log-lines.md", &items.collect::<String>());
}

#[test]
fn the_page_of_the_settings_is_that_of_the_table_of_settings() {
    let groups = VARIABLES.chunk_by(|one, other| one.group == other.group).map(|group| {
        let rows = group.iter().map(|of| {
            assert!(of.meaning.split_whitespace().count() <= 15, "{}: more than 15 words", of.name);
            format!("| `{}` | `{}` | {} |\n", of.name, of.default(), of.meaning)
        });
        format!("| {} | default | |\n| --- | --- | --- |\n{}", group[0].group, rows.collect::<String>())
    });
    check_page("docs/settings.md", &groups.collect::<Vec<_>>().join("\n"));
}

#[test]
fn the_globs_of_the_mutation_tests_name_files() {
    let text = read(".ci/mutants.toml");
    let lists = text.lines().filter(|line| line.contains("_globs = ["));
    let globs: Vec<_> = lists.flat_map(|line| line.split('"').skip(1).step_by(2)).collect();
    assert!(globs.len() > 4, "{globs:?}");
    for glob in globs {
        // A file, or all below a folder.
        let named = glob.split("/**").next().unwrap();
        assert!(fs::exists(path(named)).unwrap(), ".ci/mutants.toml: {glob}");
    }
}

#[test]
fn the_page_of_the_features_names_every_example() {
    let page = read("docs/features.md");
    let files = fs::read_dir(path("examples")).unwrap().map(|file| file.unwrap().path());
    for example in files {
        let name = example.file_stem().unwrap().to_string_lossy().into_owned();
        assert!(page.contains(&format!("`{name}`")) || page.contains(&format!("examples/{name}/")), "{name}");
    }
}

#[test]
fn no_line_of_a_table_is_too_long_to_be_read() {
    let folder = fs::read_dir(path("docs")).unwrap().map(|page| page.unwrap().path());
    let pages = folder.filter(|page| page.extension().is_some_and(|extension| extension == "md"));
    let others = ["README.md", "ARCHITECTURE.md", "python/README.md"].map(|page| path(page).into());
    // A command prints some tables of the benchmarks, headers included.
    let pages = pages.filter(|page| !page.ends_with("benchmarks.md"));
    for page in pages.chain(others) {
        let text = fs::read_to_string(&page).unwrap();
        let long = text.lines().find(|line| line.starts_with('|') && line.chars().count() > 180);
        assert_eq!(long, None, "{}", page.display());
    }
}
