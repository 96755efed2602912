//! The public interface: workloads, models, stress, faults, and what users rely on, without a GPU.
//!
//! Each module begins with a sentence on what it tests.
//!
//! A test that needs a separate process runs again as a child ([`child::alone`]).

mod abandoned;
mod adaptive;
mod adopt;
#[cfg(not(miri))]
mod async_copy;
mod async_get;
mod async_stress;
mod background_reserve;
#[cfg(all(feature = "observe", target_os = "linux", not(miri)))]
mod call_stacks;
mod captured_log;
#[path = "../child/mod.rs"]
mod child;
mod close;
mod contract;
mod counting;
mod deadlines;
#[cfg(not(miri))]
mod docs;
mod draw;
#[cfg(not(miri))]
mod env_prefix;
mod fast_path;
mod fault;
mod fences;
mod fixture;
mod fork;
mod full_pool;
#[cfg(not(miri))]
mod granules;
mod heap_calls;
mod hit_allocates_nothing;
#[cfg(all(target_os = "linux", not(miri)))]
mod hit_calls_nothing;
#[cfg(all(target_os = "linux", not(miri)))]
mod host_sources;
mod huge_pages;
mod idle_by_class;
mod in_flight;
mod limit;
mod log_lines;
#[cfg(not(miri))]
mod maintenance;
mod memory_counts;
mod memory_limits;
#[cfg(not(miri))]
mod nodes;
#[cfg(all(feature = "observe", target_os = "linux", not(miri)))]
mod orphans;
mod out_of_memory;
mod own_stream;
mod panics;
#[cfg(all(feature = "observe", not(miri)))]
mod record;
#[cfg(all(feature = "observe", target_os = "linux", not(miri)))]
mod record_files;
#[cfg(all(feature = "observe", not(miri)))]
mod record_pairs;
#[cfg(all(feature = "observe", target_os = "linux", not(miri)))]
mod record_stalled;
mod remedies;
mod reserve_waits;
#[cfg(target_os = "linux")]
mod resident_memory;
mod settings;
mod settings_as_text;
#[cfg(all(target_os = "linux", not(miri)))]
mod shared_limit;
#[cfg(all(target_os = "linux", not(miri)))]
mod shared_limit_file;
#[cfg(all(target_os = "linux", not(miri)))]
mod shared_limit_waits;
mod sink;
mod sizes;
mod slices;
#[cfg(feature = "observe")]
mod socket_owners;
mod stats_counts;
mod stats_formats;
mod stress;
mod tags;
mod tensorflow_model;
mod told_copies;
mod totals;
#[cfg(not(miri))]
mod tracing_bridge;
#[path = "../valid_stats/mod.rs"]
mod valid_stats;
mod wait_queue;
mod zero;
