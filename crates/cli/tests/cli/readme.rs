//! The README must not drift from the code.

use std::fs;

fn read(file: &str) -> String {
    fs::read_to_string(format!("{}/{file}", crate::ROOT)).unwrap()
}

#[test]
fn the_test_command_is_the_one_that_ci_runs() {
    let readme = read("README.md");
    let command = readme.lines().find(|line| line.starts_with("cargo test")).unwrap();
    assert!(read(".ci/run").lines().any(|line| line.ends_with(command)), "{command}");
}

#[test]
fn the_readme_is_read_in_minutes_and_its_links_lead_to_files() {
    let readme = read("README.md");
    assert!(readme.lines().count() <= 120, "{} lines", readme.lines().count());
    let folder = fs::read_dir(format!("{}/docs", crate::ROOT)).unwrap().map(|page| page.unwrap().path());
    let pages = folder.filter(|page| page.extension().is_some_and(|extension| extension == "md"));
    for page in pages.chain([format!("{}/README.md", crate::ROOT).into()]) {
        let text = fs::read_to_string(&page).unwrap();
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(target, _)| target);
        for target in targets.filter(|target| !target.starts_with("http") && !target.starts_with('#')) {
            let (file, heading) = target.split_once('#').unwrap_or((target, ""));
            let there = page.parent().unwrap().join(file);
            assert!(there.exists(), "{}: no {target}", page.display());
            let anchor = |line: &str| {
                let title = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
                title.chars().filter(|c| c.is_alphanumeric() || *c == '-').collect::<String>()
            };
            let has_heading = || {
                fs::read_to_string(&there).unwrap().lines().any(|line| line.starts_with('#') && anchor(line) == heading)
            };
            assert!(heading.is_empty() || has_heading(), "{}: no {target}", page.display());
        }
    }
}
