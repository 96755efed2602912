//! All processes of this user and host with `PINPOOL_SOCKET=1`.

use std::fs;
use std::path::Path;
use std::thread;

use pinpool_observe::stats_socket::path_of;
use serde_json::Value;

use super::statistics_of;

/// The statistics of each process, ordered by id, and the errors of the others. Processes that have just ended are skipped.
pub(crate) fn on_host() -> (Vec<Value>, Vec<String>) {
    let folder = path_of(0).parent().map(Path::to_path_buf).unwrap_or_default();
    let names = fs::read_dir(&folder).into_iter().flatten().flatten();
    let mut processes: Vec<u32> = names.filter_map(|entry| process_of(entry.file_name().to_str()?)).collect();
    processes.sort_unstable();
    let ask = |process: u32| statistics_of(&process.to_string()).map_err(|error| error.to_string());
    // In parallel, so that one hanging process does not delay the others.
    let answers: Vec<_> = thread::scope(|scope| {
        let asked: Vec<_> = processes.iter().map(|&process| scope.spawn(move || ask(process))).collect();
        asked.into_iter().filter_map(|asked| asked.join().ok()).collect()
    });
    let (mut objects, mut silent) = (Vec::new(), Vec::new());
    for (process, answer) in processes.into_iter().zip(answers) {
        match answer {
            Ok(object) => objects.push(object),
            Err(why) if Path::new("/proc").join(process.to_string()).exists() => silent.push(why),
            Err(_) => {}
        }
    }
    (objects, silent)
}

fn process_of(name: &str) -> Option<u32> {
    name.strip_prefix("pinpool-")?.strip_suffix(".sock")?.parse().ok()
}
