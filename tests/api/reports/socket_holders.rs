//! The statistics socket: who holds what, and who may read it.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use pinpool::Pool;

use crate::captured_log::{count, lines, listen};
use crate::fixture::heap;
use crate::scratch::scratch;

#[test]
fn the_socket_tells_the_holders_the_largest_first() {
    let (_dir, path) = scratch("stats.sock");
    let pool = heap().setting("socket", path.display()).build().unwrap();
    let _images = pool.tagged("images").get(1 << 20).unwrap();
    let _labels = [4096, 4096].map(|bytes| pool.tagged("labels").get(bytes).unwrap());
    let mut line = String::new();
    BufReader::new(UnixStream::connect(&path).unwrap()).read_line(&mut line).unwrap();
    let object: serde_json::Value = serde_json::from_str(&line).unwrap();
    let holders = object["pools"][0]["holders"].as_array().unwrap();
    let of = |at: usize| (holders[at]["tag"].as_str().unwrap(), holders[at]["buffers"].as_u64().unwrap());
    assert_eq!((of(0), of(1), holders.len()), (("images", 1), ("labels", 2), 2), "{line}");
    assert_eq!(holders[0]["requested_bytes"], 1 << 20);
    assert!(holders[0]["oldest_age_seconds"].is_number(), "{line}");
}

fn served(path: &Path) -> Pool {
    heap().setting("socket", path.display()).build().unwrap()
}

#[test]
fn what_is_no_socket_of_this_user_stays_and_the_log_says_what_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("file"), "precious").unwrap();
    symlink(at("file"), at("link")).unwrap();
    symlink(at("nothing"), at("dangling")).unwrap();
    fs::create_dir(at("directory")).unwrap();
    drop(UnixListener::bind(at("left-behind")).unwrap());
    symlink(at("left-behind"), at("link-to-a-socket")).unwrap();
    drop(UnixListener::bind(at("other")).unwrap());
    let mut cases = vec![
        ("file", "there is a file, which is not a socket"),
        ("link", "there is a symbolic link, which is not a socket"),
        ("dangling", "there is a symbolic link, which is not a socket"),
        ("link-to-a-socket", "there is a symbolic link, which is not a socket"),
        ("directory", "there is a directory, which is not a socket"),
    ];
    if std::os::unix::fs::chown(at("other"), Some(65_534), None).is_ok() {
        cases.push(("other", "there is a socket of user 65534: name another path"));
    }
    for (name, what) in cases {
        let before = fs::symlink_metadata(at(name)).unwrap();
        listen();
        drop(served(&at(name)));
        let said = lines();
        let line = format!("socket_failed: no statistics, path={}: {what}", at(name).display());
        assert_eq!(count(&said, &line), 1, "{said:#?}");
        let after = fs::symlink_metadata(at(name)).unwrap();
        assert_eq!((before.ino(), before.len(), before.mtime()), (after.ino(), after.len(), after.mtime()), "{name}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 7);
}

#[cfg(all(target_os = "linux", not(miri)))]
#[test]
#[allow(unsafe_code)] // Changes the user of a child, and kills one.
fn only_its_user_reads_a_socket_and_sockets_of_other_users_are_refused() {
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    use crate::child::{Child, alone};

    alone(|| {
        // SAFETY: has no arguments and cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            return;
        }
        // Any user may connect here.
        let open = |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        open(dir.path());
        let path = dir.path().join("stats.sock");
        let become_another = || {
            // SAFETY: changes the user of this process, which has one thread.
            assert_eq!(unsafe { libc::setuid(65_534) }, 0);
        };
        let pool = served(&path);
        open(&path);
        let mut reader = Child::new(|| {
            become_another();
            let mut said = String::new();
            // If a socket is closed while data is unread, the peer sees an error or an end of file.
            let _ = UnixStream::connect(&path).unwrap().read_to_string(&mut said);
            assert_eq!(said, "");
        });
        assert_eq!(reader.wait(), 0);
        drop(pool);
        let other = Child::new(|| {
            become_another();
            let _pool = served(&path);
            loop {
                std::thread::park();
            }
        });
        // The path exists before anybody listens there.
        while UnixStream::connect(&path).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let error = pinpool_observe::stats_socket::connect(&path).unwrap_err().to_string();
        assert!(error.contains("belongs to user 65534, and this one to user 0"), "{error}");
        drop(other);
    });
}
