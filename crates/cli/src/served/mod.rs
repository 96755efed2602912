//! Statistics that running processes serve (`PINPOOL_SOCKET`).
//!
//! | file | owns |
//! | --- | --- |
//! | `socket.rs` | the socket of one process |
//! | `host.rs` | all processes of this user with a socket in the default folder |
//! | `metrics.rs` | `pinpool metrics` |

mod host;
pub(crate) mod metrics;
pub(crate) mod socket;

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use pinpool_cli::terminal::one_line;
use pinpool_observe::diagnosis::Cause;
use serde_json::Value;

pub(crate) use host::{all_of, on_host};

/// Returns the pools of a process.
pub(crate) fn pools(object: &Value) -> &[Value] {
    object["pools"].as_array().map_or(&[][..], Vec::as_slice)
}

/// Marks unpinned pools as alarms if the same process has pinned pools. A pool cannot detect this.
pub(crate) fn mark_unpinned<P>(pools: &mut [P], has_pinned: bool, cause: fn(&P) -> &str, mark: fn(&mut P)) {
    pools.iter_mut().filter(|pool| has_pinned && cause(pool) == Cause::NotPinned.name()).for_each(mark);
}

/// Marks the unpinned pools in the statistics of a process that also has pinned pools.
pub(crate) fn mark_unpinned_in(object: &mut Value) {
    let Some(pools) = object["pools"].as_array_mut() else { return };
    let has_pinned = pools.iter().any(|pool| pool["snapshot"]["is_pinned"] == true);
    let mark = |pool: &mut Value| pool["why"]["is_alarm"] = true.into();
    mark_unpinned(pools, has_pinned, |pool| pool["why"]["cause"].as_str().unwrap_or_default(), mark);
}

/// Returns whether `target` is a socket, or a process ID (and no file has that name).
pub(crate) fn names_process(target: &Path) -> bool {
    match fs::metadata(target) {
        Ok(data) => data.file_type().is_socket(),
        Err(_) => target.to_str().is_some_and(|target| target.parse::<u32>().is_ok()),
    }
}

/// Returns the name of a pool, or its number.
pub(crate) fn name_of(pool: &Value) -> String {
    pool["name"].as_str().map_or_else(|| format!("pool {}", pool["number"]), one_line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::Series;

    #[test]
    fn an_unpinned_pool_comes_first_if_others_are_pinned() {
        let pool = |name: &str, is_pinned: bool, cause: &str, lost: f64| {
            serde_json::json!({
                "name": name, "snapshot": { "is_pinned": is_pinned },
                "why": { "cause": cause, "is_alarm": false, "lost_seconds": lost, "window_seconds": 10.0 },
            })
        };
        let alone = pool("c", false, "not_pinned", 0.0);
        let mut object = serde_json::json!({ "pools": [pool("a", true, "healthy", 1.0), alone] });
        mark_unpinned_in(&mut object);
        let is_alarm = |object: &Value, at: usize| object["pools"][at]["why"]["is_alarm"] == true;
        let mut series = Series::default();
        series.add(0.0, &object);
        assert_eq!(series.diagnoses.iter().map(|one| &*one.pool).collect::<Vec<_>>(), ["c", "a"]);
        assert!(is_alarm(&object, 1));
        // Without a GPU, all pools are unpinned.
        let mut object = serde_json::json!({ "pools": [pool("a", false, "not_pinned", 1.0)] });
        mark_unpinned_in(&mut object);
        assert!(!is_alarm(&object, 0));
    }
}
