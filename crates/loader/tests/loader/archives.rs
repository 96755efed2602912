//! Names of archives, and tar files: valid, truncated and invalid. The parser tests compare safetensors files with
//! the crate that defines the format.

use pinpool_loader::FileRange;
use tar::EntryType;

use super::*;

/// Lists the samples of a file with this name and content.
fn open(name: &str, bytes: &[u8]) -> Catalog {
    let dir = directory();
    put(dir.path(), name, bytes);
    let catalog = listed(&[dir.path().join(name)], false);
    assert_eq!(catalog.files().len() + catalog.failures().len(), 1);
    catalog
}

fn open_tar(bytes: &[u8]) -> Catalog {
    let catalog = open("shard.tar", bytes);
    assert!(catalog.failures().is_empty(), "{:?}", catalog.failures());
    catalog
}

fn tar_refusal(bytes: &[u8]) -> String {
    open("shard.tar", bytes).failures().first().expect("a broken archive").cause.to_string()
}

fn names(catalog: &Catalog) -> Vec<&str> {
    catalog.samples().iter().map(|sample| sample.member.as_deref().unwrap()).collect()
}

#[test]
fn the_last_extension_decides() {
    for (name, refusal) in [
        ("a.tar", Some("broken tar")),
        ("dir.x/A.TAR", Some("broken tar")),
        ("w.safetensors", Some("broken safetensors")),
        ("a.tar.gz", Some("truncated after byte 1")),
        ("a.tgz.bz2", None),
        ("tar", None),
        (".tar", None),
        ("dir.tar/plain", None),
    ] {
        let dir = directory();
        fs::create_dir_all(dir.path().join(name).parent().unwrap()).unwrap();
        put(dir.path(), name, b"x");
        let catalog = listed(&[dir.path().join(name)], false);
        let cause = catalog.failures().first().map(|failure| failure.cause.to_string());
        assert_eq!(cause.as_ref().and_then(|cause| cause.split(':').next()), refusal, "{name}");
        assert_eq!(catalog.samples().len(), usize::from(refusal.is_none()), "{name}");
    }
}

#[test]
fn tar_members_are_grouped_by_name_up_to_the_first_dot() {
    let bytes = tar_file(&[
        ("a/0001.jpg", b"one"),
        ("a/0001.seg.png", b"two!"),
        ("b/0001.jpg", b"other directory"),
        ("v1.2/plain", b"no dot in the last part"),
        (".hidden", b""),
        ("a/0001.txt", b"too late: no neighbor"),
    ]);
    let catalog = open_tar(&bytes);
    assert_eq!(names(&catalog), ["a/0001", "b/0001", "v1.2/plain", ".hidden", "a/0001"]);
    let index_of = |bytes: u64| usize::try_from(bytes).unwrap();
    let read = |range: &FileRange| &bytes[index_of(range.offset)..][..index_of(range.len_bytes)];
    assert_eq!(catalog.samples()[0].ranges.iter().map(read).collect::<Vec<_>>(), [&b"one"[..], b"two!"]);
    assert_eq!(read(&catalog.samples()[3].ranges[0]), b"");
    let fields = |sample: usize| catalog.samples()[sample].fields().collect::<Vec<_>>();
    assert_eq!(fields(0), [("jpg", 0..3), ("seg.png", 3..7)]);
    assert_eq!((fields(2), fields(3)), (vec![("", 0..23)], vec![("", 0..0)]));
}

#[test]
fn names_of_fields_are_in_lower_case_and_other_files_have_none() {
    let catalog = open_tar(&tar_file(&[("X/A.JPG", b"1"), ("X/A.Json.GZ", b"23")]));
    assert_eq!(catalog.samples()[0].fields().collect::<Vec<_>>(), [("jpg", 0..1), ("json.gz", 1..3)]);
    assert_eq!(names(&catalog), ["X/A"], "keys keep their case");
    assert_eq!(Catalog::synthetic(1, 1).samples()[0].fields().count(), 0);
}

#[test]
fn long_tar_names_count_and_directories_do_not() {
    let long = format!("{}/0.bin", "d".repeat(300));
    let mut archive = tar::Builder::new(Vec::new());
    archive.append_dir("dir", ".").unwrap();
    let mut head = tar::Header::new_gnu();
    head.set_size(2);
    archive.append_data(&mut head, &long, &b"ab"[..]).unwrap();
    let catalog = open_tar(&archive.into_inner().unwrap());
    assert_eq!(names(&catalog), [long.strip_suffix(".bin").unwrap()]);
    assert_eq!(catalog.samples()[0].ranges[0].len_bytes, 2);
}

#[test]
fn an_archive_truncated_before_its_end_mark_is_refused() {
    let bytes = tar_file(&[("0.a", &[1; 700]), ("0.b", b""), ("1.a", &[2; 512])]);
    let mark = bytes.len() - 1024;
    assert_eq!(open_tar(&bytes[..mark + 512]).samples().len(), 2, "one block of zeros is an end mark");
    for len in (0..mark + 512).step_by(32).chain([1, 511, 513, mark - 1, mark, mark + 1]) {
        assert!(tar_refusal(&bytes[..len]).starts_with("broken tar"), "cut to {len} bytes");
    }
}

/// A header block with a valid checksum.
fn tar_header(name: &str, kind: EntryType, size: u64) -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.set_path(name).unwrap();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_cksum();
    header.as_bytes().to_vec()
}

#[test]
fn false_tar_headers_are_refused() {
    let end_mark = [0; 1024];
    for claimed_bytes in [1025, 8 << 30, u64::MAX / 2, u64::MAX - 1, u64::MAX] {
        tar_refusal(&[&tar_header("x.bin", EntryType::Regular, claimed_bytes)[..], &end_mark[..]].concat());
    }
    // A name of two megabytes (tar-I3).
    let run = 2 << 20;
    let mut name = tar_header("long", EntryType::GNULongName, run);
    name.resize(name.len() + usize::try_from(run).unwrap(), b'n');
    assert!(tar_refusal(&[&name[..], &end_mark[..]].concat()).contains("longer than 1048576 bytes"));
    // A long name without its member, a flipped bit, and noise.
    tar_refusal(&[&tar_header("long", EntryType::GNULongName, 3)[..], b"abc", &[0; 509][..], &end_mark[..]].concat());
    let mut flipped = tar_file(&[("0.a", b"x")]);
    flipped[3] ^= 1;
    assert!(tar_refusal(&flipped).contains("checksum"));
    tar_refusal(&[0x5a; 4096]);
}

#[test]
fn malformed_and_sparse_tar_records_are_refused() {
    let archive = |records: &str| {
        let mut bytes = tar_header("records", EntryType::XHeader, records.len() as u64);
        bytes.extend_from_slice(records.as_bytes());
        bytes.resize(1024, 0);
        bytes.extend(tar_header("x.bin", EntryType::Regular, 3));
        bytes.extend_from_slice(b"abc");
        bytes.resize(4 * 512 + 1024, 0);
        bytes
    };
    assert_eq!(names(&open_tar(&archive("10 path=y\n"))), ["y"]);
    assert!(tar_refusal(&archive("22 GNU.sparse.major=1\n")).contains("stored sparse"));
    for malformed in ["no record", "99 path=y\n", "10 path:y\n"] {
        assert!(tar_refusal(&archive(malformed)).contains("broken tar: x.bin: "), "{malformed}");
    }
}
