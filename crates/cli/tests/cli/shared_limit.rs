//! Shared limits in `top --all`.

use std::os::unix::fs::MetadataExt;

use pinpool::{Backend, Pool};
use serde_json::Value;

use crate::tool::{finish, pinpool, run};

#[test]
fn shared_limits_are_shown_with_members_or_read_errors() {
    let name = format!("cli-{}", std::process::id());
    let builder = Pool::builder().without_env().backend(Backend::Heap).max_bytes(8 << 20).name("loader");
    let pool = builder.setting("PINPOOL_LEDGER", &name).build().unwrap();
    let held = pool.get(2 << 20).unwrap();
    let text = run(&["top", "--all"]).stdout;
    let (_, of_limit) = text.split_once(&format!("shared limit {name}: 8.0MiB, held 2.0MiB\n")).expect(&text);
    let cells: Vec<_> = of_limit.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(cells[..3], ["loader", &std::process::id().to_string(), "2.0MiB"]);

    let printed = run(&["top", "--all", "--json"]).figures();
    let limit = printed["shared_limits"].as_array().unwrap().iter().find(|limit| limit["name"] == *name).unwrap();
    assert_eq!((&limit["max_bytes"], &limit["held_bytes"]), (&Value::from(8 << 20), &Value::from(2 << 20)));
    let owner = &limit["owners"][0];
    assert_eq!((&owner["pool"], &owner["pid"]), (&Value::from("loader"), &Value::from(std::process::id())));
    // An unreadable shared limit does not hide this one.
    let prefix = format!("pinpool-limit.{}.", std::fs::metadata("/proc/self").unwrap().uid());
    let bad = tempfile::Builder::new().prefix(&format!("{prefix}0-bad-")).tempfile_in("/dev/shm").unwrap();
    std::fs::write(&bad, "something else").unwrap();
    let ran = run(&["top", "--all"]);
    assert!(ran.code() == 0 && ran.stdout.contains(&name), "{}", ran.stderr);
    ran.check_stderr(bad.path().to_str().unwrap().rsplit('.').next().unwrap());
    drop(bad);

    let doctor = finish(pinpool(&["doctor"]).env("PINPOOL_LEDGER", &name));
    assert!(doctor.stdout.contains(&format!("{name}: limit 8.0MiB, 2.0MiB held by 1 pool\n")), "{}", doctor.stdout);
    let settings = finish(pinpool(&["doctor", "--settings"]).env("PINPOOL_LEDGER", &name));
    let has_name = |line: &str| line.starts_with("PINPOOL_LEDGER") && line.contains(&name);
    assert!(settings.stdout.lines().any(has_name), "{}", settings.stdout);
    drop((held, pool));
    assert!(!run(&["top", "--all"]).stdout.contains(&name));
}
