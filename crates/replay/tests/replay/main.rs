//! Reads and replays traces and recordings.
//!
//! | module | tests |
//! | --- | --- |
//! | `traces` | traces as text |
//! | `recorded` | recordings of pools, read as traces and played |
//! | `workloads` | the targets of the policy, and the semantics of a replay |

mod recorded;
#[path = "../../../../tests/common/recorded_use.rs"]
mod recorded_use;
#[path = "../../../../tests/common/recordings.rs"]
mod recordings;
mod traces;
mod workloads;
