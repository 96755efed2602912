//! Checks the layers of the pool's crate: a file imports from its own layer or from a lower one. Manifests determine the imports
//! between crates. In no crate do two files import each other, directly or in a cycle, except that a `mod.rs` uses its children.
//!
//! Reads the sources as tokens, so that comments and strings do not count, and follows re-exports to the file that defines the
//! name. Code under `#[cfg(test)]` may import from anywhere.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// The layers from the top down; modules in one row are in the same layer. The modules in `engine` are layers of their own.
/// `ARCHITECTURE.md` explains them.
const LAYERS: &[&[&str]] = &[
    &["unstable"],
    &["pool"],
    &["buffer"],
    &["engine::buffer_calls"],
    &["engine::pool_core"],
    &["engine::classes"],
    &["engine::block"],
    &["engine::cache", "engine::memory", "engine::wait_queue"],
    &["engine::meter"],
    &["config"],
    &["copy", "in_flight"],
    &["backend", "driver"],
    &["report"],
    &["arena", "policy", "quota", "size_class", "stats"],
    &["error", "maintenance_thread"],
];

/// A module by the names that lead to it, without `crate`.
type Module = Vec<String>;

/// One source file.
#[derive(Debug, Default)]
struct File {
    /// Paths that it uses, from the root of the crate.
    imports: BTreeSet<Module>,
    /// Names that it re-exports from other files.
    reexports: BTreeMap<String, Module>,
}

#[test]
fn no_file_imports_from_a_layer_above() {
    let files = files("src");
    let mut upward = String::new();
    for (module, file) in &files {
        let Some(own) = layer(module) else { continue };
        for target in file.imports.iter().map(|import| definition(&files, import)) {
            if layer(&target).is_some_and(|other| other < own) {
                let _ = writeln!(upward, "{} imports {}", module.join("::"), target.join("::"));
            }
        }
    }
    assert!(upward.is_empty(), "imports that point up:\n{upward}");
}

#[test]
fn files_form_no_cycles() {
    let crates = fs::read_dir(root().join("crates")).expect("the crates can be read");
    let crates = crates.map(|entry| format!("crates/{}/src", entry.expect("readable").file_name().display()));
    let cycles: String =
        crates.chain(["src".to_owned(), "python/src".to_owned()]).map(|source| cycles_in(&source)).collect();
    assert!(cycles.is_empty(), "cycles:\n{cycles}");
}

fn cycles_in(source: &str) -> String {
    let files = files(source);
    assert!(!files.is_empty(), "{source} has no files");
    let edges: BTreeMap<&Module, BTreeSet<Module>> = files
        .iter()
        .map(|(module, file)| {
            let targets = file.imports.iter().map(|import| definition(&files, import));
            (module, targets.filter(|target| target != module && files.contains_key(target)).collect())
        })
        .collect();
    let reaches = |from: &Module, to: &Module| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(module) = next.pop() {
            if edges[module].contains(to) {
                return true;
            }
            next.extend(edges[module].iter().filter(|target| seen.insert(*target)));
        }
        false
    };
    let mut cycles = String::new();
    for (module, targets) in &edges {
        let back: Vec<_> =
            targets.iter().filter(|target| reaches(target, module)).map(|name| name.join("::")).collect();
        if !back.is_empty() {
            let _ = writeln!(cycles, "{source}: {} -> {}", module.join("::"), back.join(", "));
        }
    }
    cycles
}

#[test]
fn every_module_has_a_layer() {
    let unknown = files("src").into_keys().filter(|module| layer(module).is_none()).map(|module| module.join("::"));
    // The root of the crate and the root of the engine.
    assert_eq!(unknown.collect::<Vec<_>>(), ["", "engine"], "modules without a layer");
}

fn layer(module: &Module) -> Option<usize> {
    let name = module.get(..if module.first()? == "engine" { 2 } else { 1 })?.join("::");
    LAYERS.iter().position(|layer| layer.contains(&name.as_str()))
}

/// The module of the file in which `path` is defined, re-exports followed.
fn definition(files: &BTreeMap<Module, File>, path: &Module) -> Module {
    let mut path = path.clone();
    // A chain of re-exports is short; the bound ends a cyclic chain.
    for _ in 0..8 {
        let module = (0..=path.len()).rev().map(|len| path[..len].to_vec()).find(|module| files.contains_key(module));
        let Some(module) = module else { return path };
        let target = path.get(module.len()).and_then(|name| files[&module].reexports.get(name));
        match target {
            Some(target) => path = target.clone(),
            None => return module,
        }
    }
    path
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every file of a crate below `source`.
fn files(source: &str) -> BTreeMap<Module, File> {
    let root = root().join(source);
    let mut paths = Vec::new();
    collect(&root, &mut paths, &["tests"], &["tests.rs", "models.rs"]);
    paths
        .iter()
        .map(|path| {
            let module = module_of(path.strip_prefix(&root).expect("it lies below the root"));
            let text = fs::read_to_string(path).expect("a source file is text");
            let tokens = text.parse().expect("a source file is made of tokens");
            let mut file = File::default();
            read(tokens, &module, &mut file);
            (module, file)
        })
        .collect()
}

/// The files below `folder`, except folders and files with these names.
fn collect(folder: &Path, paths: &mut Vec<PathBuf>, without_folders: &[&str], without_files: &[&str]) {
    for entry in fs::read_dir(folder).expect("the sources can be read") {
        let path = entry.expect("the sources can be read").path();
        let is_one_of = |names: &[&str]| names.iter().any(|name| path.ends_with(name));
        if path.is_dir() && !is_one_of(without_folders) {
            collect(&path, paths, without_folders, without_files);
        } else if path.extension().is_some_and(|extension| extension == "rs") && !is_one_of(without_files) {
            paths.push(path);
        }
    }
}

fn module_of(path: &Path) -> Module {
    let stem = path.with_extension("");
    let mut module: Module = stem.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if module.last().is_some_and(|last| last == "mod" || last == "lib" || last == "main") {
        module.pop();
    }
    module
}

/// Collects the paths that begin with `crate`, `super` or `self`, and the re-exports, except in test code.
fn read(tokens: TokenStream, module: &Module, file: &mut File) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        if is_test_attribute(&tokens[at..]) {
            at = after_item(&tokens, at + 2);
            continue;
        }
        match &tokens[at] {
            TokenTree::Group(group) => read(group.stream(), module, file),
            TokenTree::Ident(word) if word == "use" => {
                let is_offered = is_public(&tokens[..at]);
                let end = at + tokens[at..].iter().take_while(|token| !is_punct(token, ';')).count();
                for (path, name) in use_paths(&tokens[at + 1..end], &[]) {
                    let Some(path) = from_root(&path, module, is_offered) else { continue };
                    match name {
                        Some(name) if is_offered => {
                            file.reexports.insert(name, path);
                        }
                        _ => {
                            file.imports.insert(path);
                        }
                    }
                }
                at = end;
            }
            TokenTree::Ident(word) if word == "crate" || word == "super" => {
                let path = path_at(&tokens[at..]);
                if path.len() > 1 {
                    file.imports.extend(from_root(&path, module, false));
                }
                at += path.len() * 3 - 3;
            }
            _ => {}
        }
        at += 1;
    }
}

/// Returns whether `#[cfg(test)]`, or a `cfg` that holds only in tests, is next.
fn is_test_attribute(tokens: &[TokenTree]) -> bool {
    let [hash, TokenTree::Group(group), ..] = tokens else { return false };
    let text = group.stream().to_string();
    is_punct(hash, '#')
        && group.delimiter() == Delimiter::Bracket
        && (text.starts_with("cfg (test)") || text.starts_with("cfg (all (test"))
}

/// The position after the item that starts at `at`, after its block or semicolon.
fn after_item(tokens: &[TokenTree], at: usize) -> usize {
    let ends = |token: &TokenTree| {
        is_punct(token, ';') || matches!(token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace)
    };
    tokens[at..].iter().position(ends).map_or(tokens.len(), |offset| at + offset + 1)
}

/// Returns whether `before` ends in `pub` or `pub(...)`.
fn is_public(before: &[TokenTree]) -> bool {
    let before = match before {
        [rest @ .., TokenTree::Group(group)] if group.delimiter() == Delimiter::Parenthesis => rest,
        all => all,
    };
    matches!(before.last(), Some(TokenTree::Ident(word)) if word == "pub")
}

/// The paths of a `use`, each with its local name; without a name for `*` and `_`.
fn use_paths(tokens: &[TokenTree], prefix: &[String]) -> Vec<(Module, Option<String>)> {
    let mut paths = Vec::new();
    for part in tokens.split(|token| is_punct(token, ',')).filter(|part| !part.is_empty()) {
        let mut path = prefix.to_vec();
        let mut name = None;
        let mut is_done = false;
        for (at, token) in part.iter().enumerate() {
            match token {
                TokenTree::Ident(word) if word == "as" => {
                    name = part.get(at + 1).map(ToString::to_string).filter(|name| name != "_");
                    break;
                }
                TokenTree::Ident(word) if word == "self" && !path.is_empty() => name = path.last().cloned(),
                TokenTree::Ident(word) => {
                    path.push(word.to_string());
                    name = Some(word.to_string());
                }
                TokenTree::Group(group) => {
                    paths.extend(use_paths(&group.stream().into_iter().collect::<Vec<_>>(), &path));
                    is_done = true;
                }
                TokenTree::Punct(punct) if punct.as_char() == '*' => name = None,
                _ => {}
            }
        }
        if !is_done {
            paths.push((path, name));
        }
    }
    paths
}

/// The names of a path in code: `crate :: a :: b`.
fn path_at(tokens: &[TokenTree]) -> Module {
    let mut path = vec![tokens[0].to_string()];
    let mut rest = &tokens[1..];
    while let [first, second, TokenTree::Ident(word), ..] = rest {
        if !is_punct(first, ':') || !is_punct(second, ':') {
            break;
        }
        path.push(word.to_string());
        rest = &rest[3..];
    }
    path
}

/// `path` from the root of the crate. A path that starts differently belongs to another crate, or in a re-export to a child.
fn from_root(path: &Module, module: &Module, is_reexport: bool) -> Option<Module> {
    let first = path.first()?;
    let mut base = module.clone();
    let rest = match first.as_str() {
        "crate" => {
            base.clear();
            &path[1..]
        }
        "self" => &path[1..],
        "super" => {
            let ups = path.iter().take_while(|name| *name == "super").count();
            base.truncate(base.len().saturating_sub(ups));
            &path[ups..]
        }
        _ if is_reexport => &path[..],
        _ => return None,
    };
    base.extend_from_slice(rest);
    Some(base)
}

fn is_punct(token: &TokenTree, punct: char) -> bool {
    matches!(token, TokenTree::Punct(found) if found.as_char() == punct)
}
