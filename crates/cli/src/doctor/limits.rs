//! Limits and reserves compared with the memory of the machine.

use pinpool::Preset;
use pinpool::unstable::config::Config;
use pinpool_os::host::HostMemory;
use pinpool_os::words::Size;

/// A description of the problem if `bytes` exceeds the available memory.
pub(super) fn too_much(bytes: u64, memory: &HostMemory) -> Option<String> {
    let [needed, total, available] = [bytes, memory.total_bytes, memory.available_bytes].map(Size);
    match bytes {
        _ if bytes > memory.total_bytes => Some(format!("{needed} exceeds the {total} of this machine")),
        _ if bytes > memory.available_bytes => Some(format!("{needed} exceeds the available {available}")),
        _ => None,
    }
}

/// The reason that a reserve of `bytes` does not fit, and the remedy.
pub(super) fn reserve_problem(
    config: &Config,
    max_bytes: Option<u64>,
    memory: Option<&HostMemory>,
    bytes: u64,
    is_lock_limit: bool,
) -> Option<(String, &'static str)> {
    // With a higher limit alone, the kernel would kill the process.
    const SCARCE: &str = "lower the reserve, free memory, or raise the limit of the cgroup";
    match (max_bytes, memory.and_then(|memory| too_much(bytes, memory))) {
        _ if bytes == 0 => None,
        _ if config.preset == Preset::TensorFlow => {
            Some(("the preset tensorflow has no reserve".to_owned(), "set PINPOOL_PRESET=adaptive"))
        }
        (Some(max_bytes), scarce) if bytes > max_bytes => {
            let remedy = match scarce {
                _ if is_lock_limit => "lower the reserve, or raise the limit of locked memory (`ulimit -l`)",
                Some(_) => SCARCE,
                None => "lower the reserve or raise PINPOOL_MAX_BYTES",
            };
            Some((format!("{} exceeds the limit of {}", Size(bytes), Size(max_bytes)), remedy))
        }
        (_, scarce) => scarce.map(|scarce| (scarce, SCARCE)),
    }
}
