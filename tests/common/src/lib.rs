//! Helpers that the tests of several crates use.
#![allow(clippy::missing_errors_doc, clippy::missing_panics_doc)] // A failed helper fails its test.

pub mod captured_log;
pub mod child;
pub mod draw;
pub mod heap_use;
pub mod pressure_file;
pub mod recorded_use;
pub mod recordings;
pub mod scratch;
pub mod tool;
pub mod until;
pub mod valid_stats;
