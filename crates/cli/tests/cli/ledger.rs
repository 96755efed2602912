//! `pinpool ledger`.

use std::os::unix::fs::{MetadataExt, PermissionsExt};

use pinpool::{Backend, Pool};
use serde_json::Value;

use crate::tool::{finish, pinpool, run};

/// A file in the place of a ledger's, which its drop removes.
struct Bad {
    name: String,
    path: String,
}

impl Bad {
    fn new(name: &str) -> Self {
        let user = std::fs::metadata("/proc/self").unwrap().uid();
        let path = format!("/dev/shm/pinpool-ledger.{user}.{name}");
        std::fs::write(&path, "something else").unwrap();
        let bad = Self { name: name.to_owned(), path };
        std::fs::set_permissions(&bad.path, PermissionsExt::from_mode(0o600)).unwrap();
        bad
    }
}

impl Drop for Bad {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn a_ledger_is_shown_with_its_owners_and_one_that_is_not_there_is_no_success() {
    let name = format!("cli-{}", std::process::id());
    let ran = run(&["ledger", &name]);
    assert_eq!((ran.code(), ran.stdout.as_str()), (1, ""));
    ran.check_stderr(&format!("no ledger {name} has an owner"));
    let ran = run(&["ledger", "a/b"]);
    assert_eq!(ran.code(), 2);
    ran.check_stderr("PINPOOL_LEDGER=a/b: not the name of a ledger");

    let builder = Pool::builder().without_env().backend(Backend::Heap).max_bytes(8 << 20).name("loader");
    let pool = builder.ledger(name.as_str()).build().unwrap();
    let held = pool.get(2 << 20).unwrap();
    let ran = run(&["ledger", &name]);
    assert_eq!(ran.code(), 0, "{}", ran.stderr);
    let lines: Vec<_> = ran.stdout.lines().collect();
    assert_eq!(lines[0], format!("ledger {name}: ceiling 8 MiB, held 2 MiB"));
    let cells: Vec<_> = lines[2].split_whitespace().collect();
    assert_eq!(cells[..4], ["loader", &std::process::id().to_string(), "2", "MiB"]);

    let ran = run(&["ledger", "--json", &name]);
    let figures: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!((&figures["max_bytes"], &figures["held_bytes"]), (&Value::from(8 << 20), &Value::from(2 << 20)));
    let owner = &figures["owners"][0];
    assert_eq!((&owner["pool"], &owner["pid"]), (&Value::from("loader"), &Value::from(std::process::id())));
    // Without a name all ledgers of this user.
    assert!(run(&["ledger"]).stdout.contains(&name));
    // One that cannot be read hides no other.
    let bad = Bad::new(&format!("0-bad-{}", std::process::id()));
    let ran = run(&["ledger"]);
    assert!(ran.code() == 0 && ran.stdout.contains(&name), "{}", ran.stderr);
    ran.check_stderr(&bad.name);
    let ran = run(&["ledger", &bad.name]);
    assert_eq!((ran.code(), ran.stdout.as_str()), (2, ""));
    drop(bad);

    let doctor = finish(pinpool(&["doctor"]).env("PINPOOL_LEDGER", &name));
    assert!(doctor.stdout.contains(&format!("{name}: ceiling 8 MiB, 1 owners hold 2 MiB")), "{}", doctor.stdout);
    let env = finish(pinpool(&["env"]).env("PINPOOL_LEDGER", &name));
    assert!(
        env.stdout.lines().any(|line| line.starts_with("PINPOOL_LEDGER") && line.contains(&name)),
        "{}",
        env.stdout
    );
    drop((held, pool));
    assert_eq!(run(&["ledger", &name]).code(), 1);
}
