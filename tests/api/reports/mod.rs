//! What a pool reports: statistics, log lines, errors, tags, recordings and pages.

#[cfg(all(feature = "observe", target_os = "linux", not(miri)))]
mod call_stacks;
#[cfg(not(miri))]
mod docs;
mod log_lines;
mod out_of_memory;
#[cfg(all(feature = "observe", not(miri)))]
mod record;
#[cfg(all(feature = "observe", target_os = "linux", not(miri)))]
mod record_files;
#[cfg(all(feature = "observe", not(miri)))]
mod record_pairs;
#[cfg(all(feature = "observe", target_os = "linux", not(miri)))]
mod record_stalled;
mod remedies;
#[cfg(feature = "observe")]
mod socket_holders;
mod stats_counts;
mod stats_formats;
mod tags;
#[cfg(not(miri))]
mod tracing_bridge;
