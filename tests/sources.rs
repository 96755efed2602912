//! Rules for all sources: a module (a folder or file in the table below) does not grow, and a file without its tests has at most
//! [`MAX_FILE_LINES`] lines.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use count::Count;

#[path = "sources/count.rs"]
mod count;

/// Code lines of each module. A number is lowered in the commit that makes its module smaller, and raised only in a commit that
/// lowers another by more.
const CODE_LINES: &[(&str, usize)] = &[
    ("benches", 181),
    ("crates/bench", 1485),
    ("crates/capi", 1148),
    ("crates/cli", 4999),
    ("crates/loader", 2398),
    ("crates/metrics", 366),
    ("crates/observe", 1800),
    ("crates/os", 1358),
    ("crates/preload", 1462),
    ("crates/replay", 1298),
    ("crates/shared_buffers", 1052),
    ("crates/shared_limit", 899),
    ("crates/testing", 684),
    ("examples", 359),
    ("fuzz", 8),
    ("python", 2061),
    ("src/arena", 1344),
    ("src/backend", 1959),
    ("src/buffer", 654),
    ("src/config", 740),
    ("src/copy", 1234),
    ("src/driver", 730),
    ("src/engine", 6770),
    ("src/error", 269),
    ("src/in_flight", 536),
    ("src/lib", 49),
    ("src/maintenance_thread", 276),
    ("src/policy", 92),
    ("src/pool", 936),
    ("src/quota", 388),
    ("src/report", 670),
    ("src/size_class", 93),
    ("src/stats", 499),
    ("src/unstable", 59),
    ("tests", 36885),
    ("sum of code and tests", 75737),
];

/// Bytes of all Markdown files.
const MARKDOWN_BYTES: usize = 115_755;

/// Lines of a file with its comments, without its tests.
const MAX_FILE_LINES: usize = 450;

#[test]
fn modules_do_not_grow() {
    let mut found = BTreeMap::<String, usize>::new();
    let mut add = |module: String, lines: usize| *found.entry(module).or_default() += lines;
    for (path, text) in files("").filter(|(path, _)| path.extension().is_some_and(|extension| extension == "rs")) {
        let Count { code, tests } = count::count(&path, &text);
        add("tests".to_owned(), tests);
        add("sum of code and tests".to_owned(), code + tests);
        if code > 0 {
            add(module_of(&path), code);
        }
    }
    check_limits(found, CODE_LINES);
}

#[test]
fn markdown_does_not_grow() {
    let is_markdown = |path: &Path| path.extension().is_some_and(|extension| extension == "md");
    let bytes = files("").filter(|(path, _)| is_markdown(path)).map(|(_, text)| text.len()).sum();
    check_limits(BTreeMap::from([("Markdown".to_owned(), bytes)]), &[("Markdown", MARKDOWN_BYTES)]);
}

/// `src/pool/handle.rs` is in the module `src/pool`, and a file directly in `src` is a separate module. Elsewhere a module is a
/// crate or a top-level folder.
fn module_of(path: &Path) -> String {
    let parts: Vec<_> = path.iter().map(|part| part.to_string_lossy()).collect();
    let depth = if parts[0] == "src" || parts[0] == "crates" { 2 } else { 1 };
    let module = parts[..depth].join("/");
    module.strip_suffix(".rs").unwrap_or(&module).to_owned()
}

/// Fails if a module is above its limit, or so far below that the limit must be lowered.
fn check_limits(found: BTreeMap<String, usize>, limits: &[(&str, usize)]) {
    let limits: BTreeMap<_, _> = limits.iter().map(|&(module, limit)| (module.to_owned(), limit)).collect();
    let modules: BTreeSet<_> = found.keys().chain(limits.keys()).collect();
    let mut wrong = String::new();
    for module in modules {
        let (lines, limit) = (found.get(module).copied().unwrap_or(0), limits.get(module).copied().unwrap_or(0));
        let tolerance = if limit < 200 { 10 } else { limit / 20 };
        let problem = if lines > limit {
            "is above its limit"
        } else if lines + tolerance < limit || lines == 0 {
            "is far below its limit; lower the limit"
        } else {
            continue;
        };
        let _ = writeln!(wrong, "    (\"{module}\", {lines}), // {problem} of {limit}");
    }
    assert!(wrong.is_empty(), "limits in tests/sources.rs:\n{wrong}");
}

#[test]
fn no_file_is_long() {
    let crates = fs::read_dir(root().join("crates")).expect("the crates can be read");
    let crates = crates.map(|entry| entry.expect("the crates can be read").path().join("src"));
    let mut long = String::new();
    for (path, text) in crates.chain(["src", "python/src"].map(|folder| root().join(folder))).flat_map(sources) {
        // Files that contain only tests.
        if path.iter().any(|part| part == "tests") || path.ends_with("tests.rs") || path.ends_with("models.rs") {
            continue;
        }
        let lines = lines_without_tests(&text);
        if lines > MAX_FILE_LINES {
            let _ = writeln!(long, "{}: {lines} lines", path.display());
        }
    }
    assert!(long.is_empty(), "files of more than {MAX_FILE_LINES} lines without their tests:\n{long}");
}

/// The number of lines before the first test module.
fn lines_without_tests(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let is_of_tests = |&at: &usize| {
        let item = lines[at..].iter().find(|line| !line.starts_with("#["));
        (lines[at].starts_with("#[cfg(test)]") || lines[at].starts_with("#[cfg(all(test"))
            && item.is_some_and(|item| item.split(' ').any(|word| word == "mod"))
    };
    (0..lines.len()).find(is_of_tests).unwrap_or(lines.len())
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The path below the root and the text of each source below `folder`.
fn sources(folder: PathBuf) -> impl Iterator<Item = (PathBuf, String)> {
    files(folder).filter(|(path, _)| path.extension().is_some_and(|extension| extension == "rs"))
}

/// The path below the root and the text of each source or Markdown file below `folder`.
fn files(folder: impl AsRef<Path>) -> impl Iterator<Item = (PathBuf, String)> {
    let mut folders = vec![root().join(folder)];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("the sources can be read") {
            let path = entry.expect("the sources can be read").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if path.is_dir() {
                // Folders that git does not track.
                if !matches!(name, "target" | "dist" | "corpus" | "artifacts") && !name.starts_with('.') {
                    folders.push(path);
                }
            } else if name.ends_with(".rs") || name.ends_with(".md") {
                let text = fs::read_to_string(&path).expect("a source file is text");
                found.push((path.strip_prefix(root()).expect("it lies below the root").to_owned(), text));
            }
        }
    }
    found.into_iter()
}
