//! What running processes serve of their pools (`PINPOOL_SOCKET`), for the commands that look at them.
//!
//! | file | owns |
//! | --- | --- |
//! | `socket.rs` | the socket of one process |
//! | `host.rs` | all processes of this user and host |
//! | `stats.rs` | `pinpool stats` and `pinpool dump` |
//! | `metrics.rs` | `pinpool metrics` |

mod host;
pub(crate) mod metrics;
pub(crate) mod socket;
pub(crate) mod stats;

use serde_json::Value;

pub(crate) use host::on_host;
pub(crate) use socket::statistics_of;

/// The pools of a process.
pub(crate) fn pools(object: &Value) -> &[Value] {
    object["pools"].as_array().map_or(&[][..], Vec::as_slice)
}

/// Whether the judge of the process sees something wrong with this pool.
pub(crate) fn is_alarm(pool: &Value) -> bool {
    pool["why"]["is_alarm"].as_bool().unwrap_or(false)
}

/// Names come from other processes: no control character of theirs reaches a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Whether this is the number of a process, and no file, or its socket.
pub(crate) fn names_process(target: &str) -> bool {
    use std::os::unix::fs::FileTypeExt;
    match std::fs::metadata(target) {
        Ok(data) => data.file_type().is_socket(),
        Err(_) => target.parse::<u32>().is_ok(),
    }
}

/// The name of a pool, or its number.
pub(crate) fn name_of(pool: &Value) -> String {
    pool["name"].as_str().map_or_else(|| format!("pool {}", pool["number"]), printable)
}
