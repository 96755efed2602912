//! Memory that several processes use.
//!
//! | file | what it tests |
//! | --- | --- |
//! | `shared_pool` | buffers within one process: what is refused, tickets, waits, the limit, copies |
//! | `kills` | workers and trainers that are killed at any instruction |
#![cfg(target_os = "linux")]

#[path = "../../../../tests/common/child.rs"]
mod child;
#[path = "../../../../tests/common/draw.rs"]
mod draw;
mod kills;
mod shared_pool;
