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

#[path = "../common/captured_log.rs"]
mod captured_log;
#[path = "../common/child.rs"]
mod child;
mod copies;
#[path = "../common/draw.rs"]
mod draw;
mod faults;
mod fixture;
#[path = "../common/heap_use.rs"]
mod heap_use;
mod limits;
mod manual_copies;
mod memory;
#[path = "../common/pressure_file.rs"]
mod pressure_file;
mod processes;
#[cfg(feature = "observe")]
#[path = "../common/recorded_use.rs"]
mod recorded_use;
#[cfg(feature = "observe")]
#[path = "../common/recordings.rs"]
mod recordings;
mod reports;
mod requests;
#[path = "../common/scratch.rs"]
mod scratch;
mod settings;
#[path = "../common/until.rs"]
mod until;
#[path = "../common/valid_stats.rs"]
mod valid_stats;
