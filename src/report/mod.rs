//! Texts for people: log lines, the report of a pool's memory, findings about the machine, and the diagnosis.
//!
//! | file | contains |
//! | --- | --- |
//! | `log` | every log line of the library |
//! | `dump.rs` | what a pool holds and for whom, as text |
//! | `finding.rs` | a finding about this machine, for warnings and `pinpool doctor` |
//! | `diagnosis.rs` | what costs a pool time, and what helps |
//!
//! The functions here turn numbers into text. Nothing here reads a pool.

mod diagnosis;
mod dump;
mod finding;
mod log;

pub use diagnosis::{Cause, Diagnosis, SuggestedSetting};
pub use dump::{Dump, Holder};
pub(crate) use dump::{ExplainedRefusal, FailedRequest, HeldBuffer, RefusedBy, held_now, usage_text};
pub use finding::{Finding, Severity};
#[cfg(all(test, not(pinpool_loom)))]
pub(crate) use log::captured;
pub use log::{LogSampler, RateCheckReport};
pub(crate) use log::{PoolLog, defer, is_power_of_ten};
