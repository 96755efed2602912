//! Stands for libcuda on machines without a GPU.
//!
//! The `cdylib` of this crate exports the part of the CUDA driver interface that a program calls to pin, copy and wait. Its
//! SONAME is `libcuda.so`: once a test has loaded it, every later `dlopen("libcuda.so")` in the process finds it. The
//! `rlib` is the handle, [`Double`]: it loads the `cdylib` and controls it.
//!
//! ```text
//!   the program's cu* calls                     the test's control calls (double_*)
//!            │                                             │
//!   ┌── call: counted, held, delayed, failed ◄──── faults ─┤      (enqueue_lock: one enqueue at a time)
//!   │  context  event  memory  device_memory  virtual_memory  stream/calls  capture  symbols ──► cost of each call
//!   │        └─────────┴── op ──► stream: a worker each, gates ◄─┤                              ▲
//!   │                              │                             │                              │
//!   └── address_space ◄──── copy: bytes move when the op runs    └── ledger: pinned bytes,      │
//!                            └──► link: when a copy ends ◄───────┐   misuse, the report         │
//!                                                                └── settings of the environment┘
//! ```
//!
//! It models the rules that programs break:
//!
//! | rule | where |
//! | --- | --- |
//! | work runs later, in order, on its own thread; a DMA reads its source when it runs | `stream`, `copy` |
//! | `cuMemFreeHost`, `cuMemHostUnregister`, `cuMemFree` wait for all work and block every enqueue meanwhile | `call`, `stream` |
//! | unmapping virtual memory waits for nothing, but each call holds enqueues up for a moment | `virtual_memory`, `cost` |
//! | virtual memory is refused on a node that is not there or has no memory, on the current node, and at an offset | `virtual_memory` |
//! | the lock of enqueues is unfair: a thread that loops without a pause keeps it | `enqueue_lock` |
//! | host functions of all streams run one after the other | `host_functions` |
//! | a copy may not span two registrations, nor continue from one into pageable memory | `address_space` |
//! | a copy to pageable memory is synchronous; one from pageable memory has read it on return | `copy` |
//! | fresh pinned memory holds garbage, and small blocks are not page-aligned | `memory` |
//! | while a stream captures in global mode, other threads' queries and allocations fail and invalidate the capture | `capture` |
//! | a destroyed stream's handle is given to a new stream, even with work pending; its id never is | `stream` |
//! | waiting for an event and destroying it need a current context, querying it and creating granules do not | `event`, `virtual_memory` |
//! | a child of `fork` has no driver: 3 | `context` |
//! | a fault on the device is sticky: every call fails, pending work never finishes | `stream` |
//!
//! The environment configures the double for a program that does not know of it, such as a bench. It is read at the first
//! `cuInit`:
//!
//! | variable | value | meaning |
//! | --- | --- | --- |
//! | `DRIVER_DOUBLE_COPY_RATE` | `4e9`, `4GB`, `512MiB` | bytes per second of each link and direction; unset: as fast as memory |
//! | `DRIVER_DOUBLE_COPY` | `real` (default), `hollow` | a hollow copy takes its time but moves no bytes, so it uses no core; needs a rate; copies to the host answer 801; up to 64 B are real |
//! | `DRIVER_DOUBLE_COSTS` | `none` (default), `measured` | calls take the time that they took on a real device: the table in `cost` |
//! | `DRIVER_DOUBLE_ACCESS` | `call` (default), `handle` | with measured costs, whether `cuMemSetAccess` costs 165 us a call or a handle |
//! | `DRIVER_DOUBLE_FAIL` | `cuMemMap:3=2,cuMemCreate:1+=801` | the third `cuMemMap` fails with code 2, every `cuMemCreate` with 801 |
//! | `DRIVER_DOUBLE_REPORT` | `none` (default), `stderr` | at the end of the process: frees with work in flight, wrong uses, calls by name |
//! | `DRIVER_DOUBLE_ABORT` | the name of a call | that call ends the process by SIGABRT |
//! | `DRIVER_DOUBLE_HANG` | the name of a call | that call never returns |
//! | `DRIVER_DOUBLE_CRUEL` | names of [`Cruelty`], or `all` | does what a driver may do and the double does not by itself |
//! | `DRIVER_DOUBLE_DEVICES` | `1` (default) to `64` | the number of devices |
//!
//! A setting that cannot be parsed is reported on stderr and fails `cuInit` with 1. [`Double::load`] refuses hollow copies,
//! since a test checks data.
//!
//! It does not model kernels, graphs beyond a straight line of work, several processes, or device virtual memory.
//!
//! The double trusts a C caller's arguments as the real driver does; invariant `call-I1` is the one place that says so.
#![allow(unsafe_code)] // Stands for a library in C.
// The tests alone call it, on 64 bits; it has no log.
#![allow(
    clippy::cast_possible_truncation,
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    clippy::print_stderr
)]

mod address_space;
mod call;
mod capture;
mod chunks;
mod code;
mod context;
mod control;
mod copy;
mod cost;
mod cruel;
mod device;
mod device_memory;
mod double;
mod enqueue_lock;
mod event;
mod faults;
mod host_functions;
mod ledger;
mod link;
mod memory;
mod op;
mod settings;
mod stream;
mod symbols;
mod sync;
mod virtual_memory;

pub use code::Code;
pub use cruel::Cruelty;
pub use double::{Double, HeldCall, HeldStream};
pub use ledger::Counts;
