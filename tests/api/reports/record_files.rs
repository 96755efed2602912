//! What happens to an existing file at a recording's path: only an empty file or a recording is written to.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use pinpool::{Error, Limit, Pool};
use pinpool_os::file_id::this_user;
use pinpool_testing::SourceCall;

use crate::captured_log;
use crate::fixture::{faulty_heap, over, recorded};
use crate::recordings::read_recording;
use crate::scratch::scratch;
use crate::until::until;

fn record(path: &Path, name: &str) {
    let pool: Pool = recorded(path).name(name).build().unwrap();
    drop(pool.get(4096).unwrap());
}

/// A recording at `path` that another process has left.
fn earlier(path: &Path, name: &str) {
    // This process would continue a recording that it left at `path` itself.
    let elsewhere = path.with_extension("elsewhere.gz");
    record(&elsewhere, name);
    fs::rename(elsewhere, path).unwrap();
}

/// The name of the one pool in a recording.
fn name_in(path: &Path) -> String {
    let recording = read_recording(path).unwrap();
    assert_eq!((recording.warning.as_deref(), recording.pools.len()), (None, 1));
    recording.pools[0].fact("name").unwrap().to_owned()
}

/// The error text, which names the file.
fn refusal(path: &Path) -> String {
    let error: Error = recorded(path).build().unwrap_err();
    let text = error.to_string();
    assert!(error.is_setting() && text.contains("PINPOOL_TRACE=") && text.contains("cannot be written"), "{text}");
    assert!(text.contains(path.to_str().unwrap()), "{text}");
    text
}

#[test]
fn a_file_that_is_no_recording_is_refused_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    let mut archive = GzEncoder::new(Vec::new(), Compression::default());
    archive.write_all(&vec![b'w'; 100_000]).unwrap();
    let mut short = GzEncoder::new(Vec::new(), Compression::default());
    short.write_all(b"PINPOOL").unwrap();
    for (name, bytes) in [
        ("weights.bin", vec![7; 100_000]),
        ("weights.tar.gz", archive.finish().unwrap()),
        ("short.gz", short.finish().unwrap()),
        ("begin", b"PINPOOL".to_vec()),
        ("magic.gz", vec![0x1f, 0x8b]),
        ("log.trace", b"a 1 4096\n".to_vec()),
    ] {
        let path = dir.path().join(name);
        fs::write(&path, &bytes).unwrap();
        let text = refusal(&path);
        assert!(text.contains(&format!("holds {} bytes that are not a recording", bytes.len())), "{text}");
        assert!(text.contains("name another file"), "{text}");
        assert_eq!(fs::read(&path).unwrap(), bytes, "{name}");
    }
}

#[test]
fn no_link_is_followed() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("empty"), "").unwrap();
    earlier(&at("t.trace"), "first");
    let before = fs::read(at("t.trace")).unwrap();
    for (link, target) in [("to-nothing", "nothing"), ("to-empty", "empty"), ("to-a-recording", "t.trace")] {
        symlink(at(target), at(link)).unwrap();
        let text = refusal(&at(link));
        assert!(text.contains("it is a symbolic link; name the file"), "{text}");
    }
    assert!(!at("nothing").exists());
    assert_eq!(fs::metadata(at("empty")).unwrap().len(), 0);
    assert_eq!(fs::read(at("t.trace")).unwrap(), before);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 5, "nothing was made or renamed");
}

#[test]
fn directories_sockets_and_devices_are_refused() {
    let (dir, socket) = scratch("s");
    let _listener = UnixListener::bind(&socket).unwrap();
    for (path, what) in [
        (dir.path(), "it is a directory; name a file in it"),
        (&*socket, "it is a device or a socket; name a file"),
        (Path::new("/dev/zero"), "it is a device or a socket; name a file"),
    ] {
        let text = refusal(path);
        assert!(text.contains(what), "{text}");
    }
}

#[test]
fn a_file_of_another_user_is_refused_and_stays() {
    if this_user() != 0 {
        return;
    }
    let (dir, path) = scratch("t.trace");
    earlier(&path, "first");
    for bytes in [fs::read(&path).unwrap(), Vec::new()] {
        fs::write(&path, &bytes).unwrap();
        chown(&path, Some(65_534), None).unwrap();
        let text = refusal(&path);
        let words = "it belongs to user 65534, and this process to user 0; name a file of your own";
        assert!(text.contains(words), "{text}");
        assert_eq!(fs::read(&path).unwrap(), bytes);
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_new_file_is_for_its_user_alone_and_an_empty_one_keeps_its_mode() {
    let dir = tempfile::tempdir().unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let new = dir.path().join("new.trace");
    record(&new, "first");
    assert_eq!(mode(&new), 0o600);
    let empty = dir.path().join("empty.trace");
    File::create(&empty).unwrap().set_permissions(fs::Permissions::from_mode(0o640)).unwrap();
    record(&empty, "first");
    assert_eq!((mode(&empty), name_in(&empty)), (0o640, "first".to_owned()));
}

#[test]
fn the_recording_of_an_earlier_process_is_overwritten_once_a_pool_is_built() {
    for name in ["t.trace", "t.trace.gz"] {
        let (dir, path) = scratch(name);
        earlier(&path, "first");
        let source = faulty_heap();
        source.fail(SourceCall::Acquire, 0);
        over(source, Limit::Unlimited).trace(path.clone()).reserve(1 << 20).build().unwrap_err();
        assert_eq!(name_in(&path), "first");
        record(&path, "second");
        assert_eq!((name_in(&path), fs::read_dir(dir.path()).unwrap().count()), ("second".to_owned(), 1));
    }
}

#[test]
fn a_full_disk_is_logged_while_the_pool_lives_and_at_its_end() {
    captured_log::listen();
    let pool = recorded(Path::new("/dev/full")).maintenance_thread(false).build().unwrap();
    let mut failures = Vec::new();
    until("the failure is logged", || {
        drop(pool.get(4096).unwrap());
        pool.maintain();
        failures.extend(captured_log::lines().into_iter().filter(|line| line.contains("trace_incomplete: ")));
        !failures.is_empty()
    });
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert!(failures[0].contains("path=/dev/full records=0 ") && failures[0].contains("No space left"), "{failures:?}");
    drop(pool);
    assert_eq!(captured_log::count(&captured_log::lines(), "trace_incomplete: path=/dev/full"), 1);
}
