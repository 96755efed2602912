//! The pages of `docs`: `settings.md` is made from the table of settings (`UPDATE_DOCS=1` writes it), others are checked.

use std::fs;

use pinpool::unstable::config::env::VARIABLES;

fn path(file: &str) -> String {
    format!("{}/{file}", env!("CARGO_MANIFEST_DIR"))
}

fn read(file: &str) -> String {
    fs::read_to_string(path(file)).unwrap()
}

/// Compares the text between a page's marks with `made`, or writes `made` there.
fn check_page(file: &str, made: &str) {
    let page = read(file);
    let (begin, end) = ("<!-- made from the code: UPDATE_DOCS=1 cargo test --test api docs -->\n", "<!-- end -->");
    let (before, rest) = page.split_once(begin).unwrap();
    let (found, behind) = rest.split_once(end).unwrap();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(path(file), format!("{before}{begin}{made}{end}{behind}")).unwrap();
    } else {
        assert!(found == made, "{file} is stale: UPDATE_DOCS=1 cargo test --test api docs");
    }
}

#[test]
fn the_settings_page_matches_the_table_of_settings() {
    let groups = VARIABLES.chunk_by(|one, other| one.group == other.group).map(|group| {
        let rows = group.iter().map(|of| {
            assert!(of.meaning.split_whitespace().count() <= 15, "{}: more than 15 words", of.name);
            // Unset is not the same as 0: the pool looks for a context first.
            let default =
                if of.name == "PINPOOL_DEVICE" { "(unset)".to_owned() } else { format!("`{}`", of.default()) };
            format!("| `{}` | {default} | {} |\n", of.name, of.meaning)
        });
        format!("| {} | default | meaning |\n| --- | --- | --- |\n{}", group[0].group, rows.collect::<String>())
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
        // A glob names a file, or everything below a folder.
        assert!(fs::exists(path(glob.split("/**").next().unwrap())).unwrap(), ".ci/mutants.toml: {glob}");
    }
}

#[test]
fn the_readme_names_every_example() {
    let page = read("README.md");
    for example in fs::read_dir(path("examples")).unwrap().map(|file| file.unwrap().path()) {
        let name = example.file_stem().unwrap().to_string_lossy().into_owned();
        assert!(page.contains(&format!("`{name}`")) || page.contains(&format!("examples/{name}/")), "{name}");
    }
}

#[test]
fn no_line_of_a_table_is_too_long_to_be_read() {
    let folder = fs::read_dir(path("docs")).unwrap().map(|page| page.unwrap().path());
    let pages = folder.filter(|page| page.extension().is_some_and(|extension| extension == "md"));
    let others = ["README.md", "ARCHITECTURE.md", "python/README.md"].map(|page| path(page).into());
    // A command prints some benchmark tables, and a test prints the tables of log lines.
    let pages = pages.filter(|page| !page.ends_with("benchmarks.md") && !page.ends_with("log-lines.md"));
    for page in pages.chain(others) {
        let text = fs::read_to_string(&page).unwrap();
        let long = text.lines().find(|line| line.starts_with('|') && line.chars().count() > 180);
        assert_eq!(long, None, "{}", page.display());
    }
}

/// Adds the text of each source file below `folder`.
fn add_sources(folder: &str, text: &mut String) {
    for file in fs::read_dir(folder).unwrap().map(|file| file.unwrap().path().display().to_string()) {
        if fs::metadata(&file).unwrap().is_dir() {
            add_sources(&file, text);
        } else if file.ends_with(".rs") {
            text.push_str(&fs::read_to_string(file).unwrap());
        }
    }
}

#[test]
fn the_architecture_names_files_functions_and_types_that_exist() {
    let page = read("ARCHITECTURE.md");
    let mut sources = String::new();
    ["src", "crates"].iter().for_each(|folder| add_sources(&path(folder), &mut sources));
    let is_there = |file: &str| ["", "src/"].iter().any(|root| fs::exists(path(&format!("{root}{file}"))).unwrap());
    let is_declared = |name: &str| {
        ["fn", "struct", "enum", "trait", "type"]
            .iter()
            .any(|item| [" ", "(", "<", ":"].iter().any(|next| sources.contains(&format!("{item} {name}{next}"))))
    };
    let unknown = page.split('`').skip(1).step_by(2).filter(|word| {
        let (is_path, name) = (word.contains('/') || word.ends_with(".rs"), word.rsplit("::").next().unwrap());
        let is_item =
            name.len() < word.len() || word.starts_with(char::is_uppercase) && word.contains(char::is_lowercase);
        !word.contains([' ', '='])
            && if is_path { !is_there(&word.replace("NAME", "cuda")) } else { is_item && !is_declared(name) }
    });
    assert_eq!(unknown.collect::<Vec<_>>(), [""; 0]);
}
