//! Memory that several processes use: buffers that workers fill for a trainer.
//!
//! ```text
//!   worker: get ──▶ SharedBuf ──fill──▶ send ──ticket──▶ receive ──▶ PinnedBuf ──copy_to──▶ device      trainer
//!              ▲                                                        └── copies done ──┐
//!              └───────────────────── free, in memory that all processes map ◀──────────────┘
//! ```
//!
//! A trainer creates [`SharedPool`]: one memory file, pinned once. Workers [attach](SharedWorker::attach) to it through its
//! descriptor; they pin nothing and need no device. No byte is copied between processes: a 40-byte ticket identifies the buffer
//! that was sent, and the trainer's copy to the device reads the worker's bytes in place.
//!
//! ```
//! use std::time::Duration;
//! use pinpool_shared_buffers::{SharedPool, SharedWorker};
//!
//! let pool = pinpool::Pool::builder().without_env().backend(pinpool::Backend::Heap).build()?;
//! let shared = SharedPool::new(&pool, 1 << 20, 4)?; // 4 buffers of 1 MiB
//!
//! // SAFETY: all processes that get the descriptor use the memory through this crate.
//! let descriptor = unsafe { shared.descriptor() }.try_clone_to_owned()?;
//! // In a worker process, which inherited the descriptor or opened it (`SharedWorker::attach_to_process`):
//! // SAFETY: as above.
//! let worker = unsafe { SharedWorker::attach(descriptor) }?;
//! let mut buf = worker.get(5, Duration::from_secs(1))?;
//! buf.as_mut_slice().copy_from_slice(b"bytes");
//! let ticket = buf.send(0)?; // pass it to the trainer through any channel
//!
//! let buf = shared.receive(&ticket)?; // a `PinnedBuf`: copy it, drop it
//! assert_eq!(*buf.wait_slice()?, b"bytes");
//! assert!(shared.receive(&ticket).unwrap_err().is_invalid_ticket(), "a ticket is valid once");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Processes that die
//!
//! | process | result |
//! | --- | --- |
//! | a worker that fills a buffer | the buffer is freed when another process needs one, or by [`recover`](SharedPool::recover) |
//! | a worker that has sent a buffer | the buffer can be received: by its ticket, by [`receive_next`](SharedPool::receive_next), or, if the ticket was lost, by [`receive_from_dead_worker`](SharedPool::receive_from_dead_worker) |
//! | the trainer | a worker's next `send`, or `get` without a free buffer, fails with [`is_trainer_unavailable`](crate::Error::is_trainer_unavailable); the memory is freed when the last worker exits |
//!
//! Each process locks a byte of the file, which the kernel unlocks when the process exits, so no daemon and no timeout is needed.
//! Each state change of a buffer is one atomic exchange in the shared memory, so a process may die at any instruction.

// | file | contains |
// | --- | --- |
// | `shared_pool.rs`, `worker.rs` | the trainer's side, the worker's side |
// | `state.rs`, `counts.rs` | the state of one buffer, the number of buffers in each state |
// | `layout.rs` | the layout of the file, and its validation |
// | `memory_file.rs` | mapped anonymous files (`memfd`) |
// | `lend.rs` | parts of the memory as buffers of a pool |
// | `ticket.rs` | the message about a sent buffer |

#![cfg(target_os = "linux")] // Memory files, locks of open file descriptions.

mod counts;
mod error;
mod layout;
mod lend;
mod memory_file;
mod shared_pool;
mod state;
mod ticket;
mod worker;

pub use counts::BufferCounts;
pub use error::{Error, Result};
pub use shared_pool::SharedPool;
pub use ticket::Ticket;
pub use worker::{SharedBuf, SharedWorker};
