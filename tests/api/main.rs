//! The public interface: workloads, models, stress, faults, and what users rely on, without a GPU.
//!
//! | module | holds |
//! | --- | --- |
//! | `tensorflow_model`, `adaptive_model`, `thread_cache_model` | drawn operations against a naive model, recounted after each step |
//! | `adaptive` | the default preset: sizes, settings, time, pressure, waits, the end |
//! | `record` | what a pool records, read back, whole, cut off or damaged (feature `observe`) |
//! | `record_files` | what a recording does to a file that is at its path (feature `observe`) |
//! | `call_stacks` | where gets came from that were sampled (feature `observe`) |
//! | `orphans` | children that outlive a killed parent (feature `observe`) |
//! | `remedies` | what a message tells the user to do, and what a pool warns of when it is built |
//! | `adopt` | memory that a user pinned, as buffers |
//! | `limit`, `fault`, `in_flight` | what fails, what is held, what a copy still reads |
//! | `abandoned`, `totals`, `reserve_in_line` | copies that never end, totals that never fall, reserves while requests wait |
//! | `zero` | buffers that are zeroed before another user gets them |
//! | `async_copy` | copies that tasks await |
//! | `fences` | fences of users that block, panic, or call the pool |
//! | `memory_counts`, `memory_limits` | every byte in a figure and under a limit; limits that change, limits on what is idle |
//! | `granules`, `nodes` | how many mappings a pool of a terabyte makes; one pool on several memory nodes |
//! | `ledger` | pools of several processes under one limit, some of them killed |
//! | `line`, `async_get`, `async_stress`, `deadlines`, `panics` | gets that wait, threads and tasks, in order and in time; panics of a user's code |
//! | `contract`, `host_sources` | backends without a driver: their contract, their pages and limits |
//! | `batch`, `slices`, `sink`, `scripted_faults` | batch buffers, slices, the host sink, and the source that fails by script |
//! | `own_stream`, `settings`, `sizes` | traits that others implement; what can be set, and how values are written |
//! | `stats_counts`, `stats_formats`, `stats_never_wait` | each figure against known counts; the table; a snapshot waits for no call |
//! | `short_path` | hits that a thread serves from the pools that it used last |
//! | `stress`, `thread_cache_stress` | many threads at once, and the balance afterwards |
//! | `maintenance` | what the maintenance thread does by itself, and what nobody does without it |
//! | `tags`, `out_of_memory` | who holds what, and the report of a failed request |
//! | `docs` | the pages of `docs` that are made from the code |
//! | `hit_allocates_nothing`, `hit_calls_nothing`, `log_lines`, `resident_memory`, `fork` | promises about the whole process |
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
#[cfg(all(target_os = "linux", not(miri)))]
mod ledger;
mod ledger_file;
mod ledger_waits;
mod limit;
mod line;
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
mod reserve_in_line;
#[cfg(target_os = "linux")]
mod resident_memory;
mod settings;
mod settings_as_text;
mod short_path;
mod sink;
mod sizes;
mod slices;
#[cfg(feature = "observe")]
mod socket_owners;
mod stats_counts;
mod stats_formats;
#[cfg(not(miri))]
mod stats_never_wait;
mod stress;
mod tags;
mod tensorflow_model;
mod thread_cache_model;
mod thread_cache_stress;
mod told_copies;
mod totals;
#[cfg(not(miri))]
mod tracing_bridge;
mod zero;
