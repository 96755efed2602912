//! The public interface: workloads, models, stress, faults, and what users rely on, without a GPU.
//!
//! Each module begins with a sentence on what it tests.
//!
//! A test that needs a separate process runs again as a child ([`child::alone`]).

mod captured_log;
#[path = "../child/mod.rs"]
mod child;
mod copies;
mod counting;
mod draw;
mod faults;
mod fixture;
mod heap_calls;
mod limits;
mod memory;
mod processes;
mod reports;
mod requests;
mod settings;
mod told_copies;
#[path = "../valid_stats/mod.rs"]
mod valid_stats;
