//! The variables of this library. All other settings are settings of its pools.

use std::env;
use std::sync::LazyLock;

/// The log file; stderr if it is not set.
pub(crate) const LOG_VARIABLE: &str = "PINPOOL_PRELOAD_LOG";

/// Whether the statistics of each pool are logged when its context or the process ends.
pub(crate) static LOGS_STATISTICS: LazyLock<bool> = LazyLock::new(|| is_switch_on("PINPOOL_PRELOAD_STATS"));

/// Whether free functions wait for the device, as the driver's free functions do.
pub(crate) static SYNC_ON_FREE: LazyLock<bool> = LazyLock::new(|| is_switch_on("PINPOOL_PRELOAD_SYNC"));

/// Returns whether a switch is on: its variable is set, and not to a value that means off. Read once, since the program may change
/// the variable.
fn is_switch_on(variable: &str) -> bool {
    env::var(variable).is_ok_and(|value| !["", "0", "no", "off", "false"].contains(&&*value.trim().to_lowercase()))
}
