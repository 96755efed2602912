//! Limits: no pool, partition, process or group of processes exceeds its limit.

mod limit;
mod memory_counts;
mod memory_limits;
#[cfg(all(target_os = "linux", not(miri)))]
mod shared_limit;
#[cfg(all(target_os = "linux", not(miri)))]
mod shared_limit_file;
#[cfg(all(target_os = "linux", not(miri)))]
mod shared_limit_waits;
