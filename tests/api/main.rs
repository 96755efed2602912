//! The public interface, without a GPU.
//!
//! | module | contents |
//! | --- | --- |
//! | `copies` | buffers are not reused, written to or freed before their last copy has completed |
//! | `faults` | failing sources, panics in user code, and everything at once |
//! | `limits` | no pool, partition, process or group of processes exceeds its limit |
//! | `memory` | where memory comes from, how a pool grows, and when memory is kept or released |
//! | `processes` | forks, and the maintenance thread |
//! | `reports` | statistics, log lines, errors, tags, recordings and pages |
//! | `requests` | hits, misses, the wait queue, deadlines, tasks, and closed pools |
//! | `settings` | how settings are written, where they come from, and what they imply |
//! | `captured_log`, `heap_use` | the logger and the allocator of this binary |
//! | `draw`, `fixture`, `manual_copies` | sources, random numbers, builders and fences that several modules use |
//!
//! A test that needs a separate process runs again as a child ([`child::alone`]).

mod copies;
mod faults;
mod fixture;
mod limits;
mod manual_copies;
mod memory;
mod processes;
mod reports;
mod requests;
mod settings;

use test_common::{captured_log, child, draw, heap_use, pressure_file, scratch, until, valid_stats};
#[cfg(feature = "observe")]
use test_common::{recorded_use, recordings};

#[global_allocator]
static ALLOCATOR: heap_use::MeasuringAllocator = heap_use::MeasuringAllocator;
