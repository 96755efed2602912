//! Reads and replays traces and recordings.
//!
//! | module | tests |
//! | --- | --- |
//! | `traces` | traces as text |
//! | `recorded` | recordings of pools, read as traces and played |
//! | `workloads` | the targets of the policy, and the semantics of a replay |

mod recorded;
mod traces;
mod workloads;

use test_common::{recorded_use, recordings};
