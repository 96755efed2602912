//! Memory: where it comes from, how it grows, is kept and is released.

mod adaptive;
mod background_reserve;
mod contract;
#[cfg(not(miri))]
mod granules;
#[cfg(all(target_os = "linux", not(miri)))]
mod host_sources;
mod huge_pages;
#[cfg(not(miri))]
mod nodes;
mod reserve_waits;
#[cfg(target_os = "linux")]
mod resident_memory;
mod tensorflow_model;
mod zero;
