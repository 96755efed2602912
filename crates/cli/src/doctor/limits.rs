//! Limits and reserves compared with the memory of the machine, which the ranks of a host share.

use pinpool::Preset;
use pinpool::unstable::config::{Config, SharedLimitName, env};
use pinpool_os::host::HostMemory;
use pinpool_os::words::Size;

/// Whether the processes of the host share one limit.
fn is_shared(config: &Config) -> bool {
    match config.ledger {
        SharedLimitName::Disabled => false,
        SharedLimitName::Auto => env::is_one_of_several(),
        _ => true,
    }
}

/// The ranks of this host with a separate limit.
pub(super) fn limits_on_host(config: &Config) -> u64 {
    if is_shared(config) { 1 } else { local_ranks() }
}

/// Ranks of torchrun on this host; 1 without torchrun.
fn local_ranks() -> u64 {
    let ranks = std::env::var("LOCAL_WORLD_SIZE").ok().and_then(|ranks| ranks.trim().parse().ok());
    ranks.unwrap_or(1).max(1)
}

/// The words for `bytes` in each of these ranks, if they exceed the available memory.
pub(super) fn too_much(ranks: u64, bytes: u64, memory: &HostMemory) -> Option<String> {
    let needed_bytes = ranks.saturating_mul(bytes);
    let [needed, total, available] = [needed_bytes, memory.total_bytes, memory.available_bytes].map(Size);
    let of = match needed_bytes > memory.total_bytes {
        true => format!("the {total} of this machine"),
        false => format!("the available {available}"),
    };
    let found =
        if ranks == 1 { format!("{needed} exceeds {of}") } else { format!("{ranks} ranks need {needed} of {of}") };
    (needed_bytes > memory.available_bytes).then_some(found)
}

/// Why a reserve of `bytes` does not fit, and what helps.
pub(super) fn reserve_problem(
    config: &Config,
    max_bytes: Option<u64>,
    memory: Option<&HostMemory>,
    bytes: u64,
    is_lock_limit: bool,
) -> Option<(String, &'static str)> {
    // With a higher limit alone, the kernel would kill the process.
    const SCARCE: &str = "lower the reserve, free memory, or raise the limit of the cgroup";
    const OVER: &str = "lower the reserve or raise PINPOOL_MAX_BYTES";
    let (planned, ranks) = (Size(bytes), local_ranks());
    match (max_bytes, memory.and_then(|memory| too_much(ranks, bytes, memory))) {
        _ if bytes == 0 => None,
        _ if config.preset == Preset::TensorFlow => {
            Some(("the preset tensorflow has no reserve".to_owned(), "set PINPOOL_PRESET=adaptive"))
        }
        (_, Some(scarce)) if ranks > 1 => Some((scarce, "lower the reserve: each rank pins its own")),
        (Some(max_bytes), scarce) if bytes > max_bytes => {
            let remedy = match scarce {
                _ if is_lock_limit => "lower the reserve, or raise the limit of locked memory (`ulimit -l`)",
                Some(_) => SCARCE,
                None => OVER,
            };
            Some((format!("{planned} exceeds the limit of {}", Size(max_bytes)), remedy))
        }
        (Some(max_bytes), _) if is_shared(config) && ranks.saturating_mul(bytes) > max_bytes => {
            let [all, limit] = [ranks.saturating_mul(bytes), max_bytes].map(Size);
            Some((format!("{ranks} ranks need {all} under their shared limit of {limit}"), OVER))
        }
        (_, scarce) => scarce.map(|scarce| (scarce, SCARCE)),
    }
}
