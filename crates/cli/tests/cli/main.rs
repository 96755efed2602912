//! The built tool, and the README.

mod advise;
mod bad_files;
mod bench;
mod benchmarks;
mod call_stacks;
#[cfg(target_os = "linux")]
mod doctor;
#[cfg(feature = "cuda")]
mod gpu_run;
#[cfg(target_os = "linux")]
mod hard_ends;
#[cfg(target_os = "linux")]
mod input_once;
mod load;
#[cfg(feature = "cuda")]
mod load_cuda;
mod pages;
mod played;
mod readme;
mod record;
mod record_failures;
mod report;
#[cfg(target_os = "linux")]
mod run_program;
#[cfg(target_os = "linux")]
mod scenarios;
#[cfg(target_os = "linux")]
mod served;
#[cfg(target_os = "linux")]
mod shared_limit;
mod tf_lines;
mod tool;
mod top;
mod trace_input;
mod viewers;
mod why;
mod why_lines;
mod why_lines_pools;
mod why_lines_styles;
mod why_lines_wrapped;
mod why_two_files;

use test_common::{captured_log, recordings};

/// The key of `why --lines --json` for the trend of a pool.
pub(crate) const TREND: &str = "verdict";

/// The root of the project, for its test data.
pub(crate) const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
