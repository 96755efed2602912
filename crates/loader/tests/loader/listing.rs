//! Paths to a catalog: order, links, failures, opened archives.

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use pinpool_loader::{DataOrigin, FailureCause};

use super::*;

/// Paths of the files under `root`, in the order of the catalog.
fn names(catalog: &Catalog, root: &Path) -> Vec<String> {
    let name = |origin: &DataOrigin| match origin {
        DataOrigin::File(path) => path.strip_prefix(root).unwrap().display().to_string(),
        other => panic!("{other:?}"),
    };
    catalog.files().iter().map(|file| name(&file.origin)).collect()
}

#[test]
fn files_are_sorted_and_empty_files_count() {
    let dir = directory();
    fs::create_dir(dir.path().join("b")).unwrap();
    for (name, len) in [("c", 3), ("b/2", 2), ("b/1", 0), ("a", 1)] {
        put(dir.path(), name, vec![0; len]);
    }
    let catalog = listed(&[dir.path()], false);
    assert_eq!(names(&catalog, dir.path()), ["a", "b/1", "b/2", "c"]);
    assert_eq!(catalog.samples().iter().map(|sample| sample.len_bytes).collect::<Vec<_>>(), [1, 0, 2, 3]);
    assert!(catalog.failures().is_empty());
}

#[test]
fn links_to_files_are_followed_and_circles_are_not() {
    let dir = directory();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir_all(at("real/deep")).unwrap();
    fs::write(at("real/deep/file"), b"12345").unwrap();
    symlink(at("real/deep/file"), at("link")).unwrap();
    symlink("..", at("real/deep/up")).unwrap();
    symlink(dir.path(), at("real/top")).unwrap();
    symlink("self", at("self")).unwrap();
    let catalog = listed(&[dir.path()], false);
    assert_eq!(names(&catalog, dir.path()), ["link", "real/deep/file"]);
    assert_eq!(catalog.samples()[0].len_bytes, 5);
    assert!(catalog.failures().is_empty(), "{:?}", catalog.failures());
    assert_eq!(catalog.skipped_links().len(), 3, "{:?}", catalog.skipped_links());
}

#[test]
fn directories_that_link_to_each_other_are_entered_once() {
    let dir = directory();
    let names_of_dirs: Vec<_> = (0..12).map(|i| format!("d{i:02}")).collect();
    for name in &names_of_dirs {
        fs::create_dir(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("file"), b"x").unwrap();
    }
    for from in &names_of_dirs {
        for to in names_of_dirs.iter().filter(|to| *to != from) {
            symlink(dir.path().join(to), dir.path().join(from).join(to)).unwrap();
        }
    }
    // Along all paths without a cycle there would be more than 12! files.
    let catalog = listed(&[dir.path()], false);
    assert_eq!(catalog.files().len(), 12);
    assert!(catalog.failures().is_empty());
}

#[test]
fn missing_paths_and_dangling_links_are_failures() {
    let dir = directory();
    symlink("nowhere", dir.path().join("dangling")).unwrap();
    put(dir.path(), "good", b"x");
    let missing = dir.path().join("missing");
    let catalog = listed(&[missing.as_path(), dir.path()], false);
    assert_eq!(names(&catalog, dir.path()), ["good"]);
    let failed: Vec<_> = catalog.failures().iter().map(|failure| failure.name.clone()).collect();
    assert_eq!(failed, [missing.display().to_string(), dir.path().join("dangling").display().to_string()]);
    assert_eq!(catalog.failures()[1].to_string().matches("dangling").count(), 1, "{}", catalog.failures()[1]);
}

#[test]
fn a_socket_is_skipped_unless_it_is_named() {
    let dir = directory();
    let socket = dir.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    let inside = listed(&[dir.path()], false);
    assert!(inside.files().is_empty() && inside.failures().is_empty());
    assert!(matches!(listed(&[&socket], false).failures()[0].cause, FailureCause::NotAFile));
}

#[test]
fn archives_are_opened_if_named_requested_or_alone_in_a_directory() {
    let dir = directory();
    let shard = dir.path().join("shard.tar");
    fs::write(&shard, tar_file(&[("0.jpg", b"abc"), ("0.cls", b"7"), ("1.jpg", b"de")])).unwrap();
    let shard_bytes = fs::metadata(&shard).unwrap().len();

    let counts = |catalog: &Catalog| (catalog.files().len(), catalog.samples().len(), catalog.len_bytes());

    let named = listed(&[&shard], false);
    assert_eq!((counts(&named), named.name(1)), ((1, 2, 6), format!("{}!1", shard.display())));
    assert_eq!(counts(&listed(&[dir.path()], false)), (1, 2, 6), "alone in a directory");

    put(dir.path(), "zero", b"");
    let plain = listed(&[dir.path()], false);
    assert_eq!((counts(&plain), plain.name(0)), ((2, 2, shard_bytes), shard.display().to_string()));
    assert_eq!(plain.unopened_files().collect::<Vec<_>>(), [&shard]);

    let requested = listed(&[dir.path()], true);
    assert_eq!((counts(&requested), requested.unopened_files().count()), ((2, 3, 6), 0));
}

#[test]
fn a_broken_archive_is_left_out_whole_and_named() {
    let dir = directory();
    put(dir.path(), "bad.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\x7f{}");
    put(dir.path(), "bad.tar", [b'x'; 1024]);
    put(dir.path(), "good.safetensors", safetensors_file(&[("w", 16)]));
    put(dir.path(), "plain", b"");
    let catalog = listed(&[dir.path()], true);
    assert_eq!((catalog.files().len(), catalog.samples().len(), catalog.len_bytes()), (2, 2, 16));
    let failed: Vec<_> = catalog.failures().iter().map(ToString::to_string).collect();
    assert_eq!(failed.len(), 2, "{failed:?}");
    assert!(failed[0].contains("bad.safetensors: broken safetensors"), "{failed:?}");
    assert!(failed[1].contains("bad.tar: broken tar"), "{failed:?}");
}
