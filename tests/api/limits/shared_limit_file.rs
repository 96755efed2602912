//! The file of a shared limit is removed or truncated while it is in use.

use std::fs::{self, OpenOptions};
use std::time::Duration;

use super::shared_limit::{LONG, MIB, Named, Worker};

#[test]
fn removing_the_shared_limit_stops_only_growth() {
    let named = Named::new("rm");
    let pool = named.builder(64).wait(Duration::ZERO).build().unwrap();
    let mut other = Worker::start(&named, "other");
    let mut held = pool.get(20 * MIB).unwrap();
    other.hold(20);
    fs::remove_file(named.path()).unwrap();
    held.wait_slice_mut().unwrap().fill(7);
    let text = pool.get(8 * MIB).unwrap_err().to_string();
    let name = named.path().rsplit('.').next().unwrap().to_owned();
    for part in [
        &format!("PINPOOL_LEDGER={name}: its file in /dev/shm was removed, so this pool can no longer grow"),
        "Return buffers to this pool, or restart all processes that share the limit",
    ] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    let text = other.ask(&format!("try {}", 8 * MIB));
    assert!(text.contains("was removed, so this pool can no longer grow"), "{text}");
    assert!((0..held.len()).all(|at| held.wait_slice().unwrap()[at] == 7));
    drop(held);
    drop(pool.get(20 * MIB).unwrap());
    assert_eq!(other.ask("put"), "put");
    assert_eq!(other.ask(&format!("try {}", 20 * MIB)), "got");
    // New processes share a new file, which the old members leave in place.
    let next = named.builder(64).build().unwrap();
    drop(next.get(60 * MIB).unwrap());
    drop(pool);
    other.end();
    assert_eq!(named.report().members.len(), 1);
}

#[test]
fn truncating_or_extending_the_file_of_a_shared_limit_kills_no_process() {
    let named = Named::new("cut");
    let vars = [("LEDGER_LEN", "1000000"), ("LEDGER_HOLD_US", "100")];
    let mut workers = ["one", "two"].map(|pool| Worker::start_with(&named, pool, &vars));
    workers.iter_mut().for_each(|worker| assert_eq!(worker.ask("cycle 2"), "cycling"));
    for round in 0..60 {
        let file = OpenOptions::new().write(true).open(named.path()).unwrap();
        file.set_len([0, 8, 1 << 20][round % 3]).unwrap();
        std::thread::sleep(Duration::from_millis(5));
    }
    let error = named.builder(64).build().unwrap_err().to_string();
    assert!(error.contains("was truncated while other processes use it: stop them, or use another name"), "{error}");
    for worker in &mut workers {
        worker.ask("stop");
        assert_eq!(worker.ask(&format!("try {}", 30 * MIB)), "got");
    }
    // Fails if something else has ended a worker.
    workers.into_iter().for_each(Worker::kill);
    let pool = named.builder(64).build().unwrap();
    drop(pool.get_with(pinpool::Request::new(60 * MIB).timeout(LONG)).unwrap());
    assert_eq!(named.report().members.len(), 1);
}
