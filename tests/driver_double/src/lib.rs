//! Stands for libcuda on machines without a GPU.
//!
//! The `cdylib` of this crate exports the part of the CUDA driver interface that a program which pins, copies and
//! waits can call. Its SONAME is `libcuda.so`, so once a test has loaded it, every later `dlopen("libcuda.so")` in the
//! process finds it. The `rlib` is the handle, [`Double`]: it loads the `cdylib` and turns its knobs.
//!
//! ```text
//!   the program's cu* calls                     the test's knobs (double_*)
//!            │                                             │
//!   ┌── call: counted, held, delayed, failed ◄──── faults ─┤
//!   │  context  event  memory  device_memory  virtual_memory  signal  capture  symbols ──► toll: what a call costs
//!   │        └─────────┴── op ──► stream: a worker each, gates ◄─┤                              ▲
//!   │                              │                             │                              │
//!   └── address_space ◄──── copy: bytes move when the op runs    └── ledger: what is pinned,    │
//!                            └──► link: when a copy ends ◄───────┐   who misused it             │
//!                                                                └── settings of the environment┘
//! ```
//!
//! What it models, because programs break on it:
//!
//! | rule | where |
//! | --- | --- |
//! | work runs later, in order, on a thread of its own; a DMA reads its source when it runs | `stream`, `copy` |
//! | `cuMemFreeHost`, `cuMemHostUnregister`, `cuMemFree` wait for all work and block every enqueue meanwhile | `call`, `stream` |
//! | unmapping virtual memory waits for nothing | `virtual_memory` |
//! | a copy may not span two registrations, nor leave one into pageable memory | `address_space` |
//! | a copy to pageable memory is synchronous; one from pageable memory has read it on return | `copy` |
//! | fresh pinned memory holds rubbish, and small blocks are not page-aligned | `memory` |
//! | while a stream captures in global mode, other threads' queries and allocations fail and spoil the capture | `capture` |
//! | a destroyed stream's handle is given out again, work or no work; its id never is | `handles` |
//! | waiting for an event takes a current context, asking for it does not | `event` |
//! | a fault on the device is sticky: nothing works any more, pending work never finishes | `stream` |
//!
//! A program that is run over the double, such as a bench, steers it by the environment, read at its first `cuInit`:
//!
//! | variable | value | meaning |
//! | --- | --- | --- |
//! | `DRIVER_DOUBLE_COPY_RATE` | `4e9`, `4GB`, `512MiB` | bytes a second of each link and direction; unset: as fast as memory |
//! | `DRIVER_DOUBLE_COPY` | `real` (default), `hollow` | a hollow copy takes its time but moves no bytes, so it costs no core; needs a rate; copies to the host answer 801 |
//! | `DRIVER_DOUBLE_COSTS` | `none` (default), `measured` | calls take the time that they took on a real device: the table in `toll` |
//! | `DRIVER_DOUBLE_REPORT` | `none` (default), `stderr` | at the end of the process: frees with work in flight, wrong uses, calls by name |
//!
//! What is not understood is told on stderr and fails `cuInit` with 1. [`Double::load`] refuses hollow copies: a test
//! checks data.
//!
//! What it does not model: kernels, graphs beyond a straight line of work, several processes, device virtual memory.
//!
//! Everything a C caller hands in is trusted as the real driver trusts it; invariant C1 below is the one place where
//! that is written down.

mod address_space;
mod bell;
mod call;
mod capture;
mod code;
mod context;
mod copy;
mod device;
mod device_memory;
mod double;
mod event;
mod faults;
mod handles;
mod knobs;
mod ledger;
mod link;
mod memory;
mod op;
mod report;
mod settings;
mod signal;
mod stream;
mod symbols;
mod toll;
mod virtual_memory;

pub use code::Code;
pub use double::{Double, HeldCall, HeldStream};
pub use ledger::Figures;
