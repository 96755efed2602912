//! `pinpool ledger`.

use pinpool::{Backend, Pool};
use serde_json::Value;

use crate::tool::{finish, pinpool, run};

#[test]
fn a_ledger_is_shown_with_its_owners_and_one_that_is_not_there_is_no_success() {
    let name = format!("cli-{}", std::process::id());
    let ran = run(&["ledger", &name]);
    assert_eq!((ran.code(), ran.stdout.as_str()), (1, ""));
    ran.check_stderr(&format!("no ledger {name} has an owner"));
    let ran = run(&["ledger", "a/b"]);
    assert_eq!(ran.code(), 2);
    ran.check_stderr("not the name of a ledger");

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
