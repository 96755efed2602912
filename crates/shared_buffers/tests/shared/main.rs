//! Memory that several processes use.
//!
//! | file | what it tests |
//! | --- | --- |
//! | `shared_pool` | buffers within one process: what is refused, tickets, waits, the limit, copies |
//! | `kills` | workers and trainers that are killed at any instruction |
#![cfg(target_os = "linux")]

mod kills;
mod shared_pool;

use test_common::{child, draw};
