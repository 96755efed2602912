//! Queries several processes at the same time.

use std::fs::{self, DirEntry};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;

use pinpool_loader::StopFlag;
use pinpool_observe::stats_socket::path_of;
use pinpool_os::file_id::this_user;
use serde_json::Value;

use super::socket::first;

/// Returns the statistics of each process, ordered by ID, and the errors of processes that did not answer. Skips processes that
/// have just ended.
pub(crate) fn on_host() -> (Vec<Value>, Vec<String>) {
    let folder = path_of(0).parent().map(Path::to_path_buf).unwrap_or_default();
    let names = fs::read_dir(&folder).into_iter().flatten().flatten();
    let process =
        |entry: DirEntry| entry.file_name().to_str()?.strip_prefix("pinpool-")?.strip_suffix(".sock")?.parse().ok();
    // `connect` refuses the sockets of other users.
    let own = names.filter(|entry| entry.metadata().is_ok_and(|facts| facts.uid() == this_user()));
    let mut processes: Vec<u32> = own.filter_map(process).collect();
    processes.sort_unstable();
    all_of(&processes.iter().map(u32::to_string).collect::<Vec<_>>(), true)
}

/// Returns the statistics of these processes, and the errors of processes that did not answer. All are queried at the same
/// time, so that none delays another.
pub(crate) fn all_of(targets: &[String], skips_ended: bool) -> (Vec<Value>, Vec<String>) {
    let ask = |target: &String| first(target, &StopFlag::new()).map_err(|error| error.to_string());
    let answers: Vec<_> = thread::scope(|scope| {
        let asked: Vec<_> = targets.iter().map(|target| scope.spawn(move || ask(target))).collect();
        asked.into_iter().filter_map(|asked| asked.join().ok()).collect()
    });
    let (mut objects, mut silent) = (Vec::new(), Vec::new());
    for (target, answer) in targets.iter().zip(answers) {
        match answer {
            Ok((object, _)) => objects.push(object),
            Err(_) if skips_ended && !Path::new("/proc").join(target).exists() => {}
            Err(why) => silent.push(why),
        }
    }
    (objects, silent)
}
