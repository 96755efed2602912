//! A mock of libcuda for machines without a GPU.
//!
//! The `cdylib` of this crate exports the part of the CUDA driver interface that a program calls to pin, copy and wait. Its
//! SONAME is `libcuda.so`: once a test has loaded it, every later `dlopen("libcuda.so")` in the process finds it. The
//! `rlib` is the handle, [`MockDriver`]: it loads the `cdylib` and controls it.
//!
//! ```text
//!   the program's cu* calls                     the test, by `control`
//!            │                                             │
//!   ┌── call: counted, held, failed ◄───────── faults ─────┤      (one enqueue at a time)
//!   │  context  event  memory  device_memory  virtual_memory  stream/calls  capture  symbols
//!   │        └─────────┴────────► stream: a worker each, gates ◄─┤
//!   │                              │                             │
//!   └── address_space ◄──── copy: bytes move when the work runs  ├── counts: pinned bytes, misuse, the report
//!                                                                └── settings of the environment
//! ```
//!
//! It models the rules that programs break, but no timing:
//!
//! | rule | where |
//! | --- | --- |
//! | work runs later, in order, on a dedicated thread; a DMA reads its source when it runs | `stream`, `copy` |
//! | `cuMemFreeHost`, `cuMemHostUnregister`, `cuMemFree` wait for all work and block every enqueue meanwhile | `call`, `stream` |
//! | virtual memory is refused on a NUMA node that is missing or empty, on the "current" node, and at an offset into a granule | `virtual_memory` |
//! | a copy may not span two registrations, nor continue from one into pageable memory | `address_space` |
//! | a copy to pageable memory is synchronous; a copy from pageable memory has read it on return | `copy` |
//! | fresh pinned memory holds garbage, and small blocks are not page-aligned | `memory` |
//! | while a stream captures in global mode, other threads' queries and allocations fail and invalidate the capture | `capture` |
//! | a new stream may get the handle of a destroyed stream, even with work pending, but never its id | `stream` |
//! | event waits and destruction need a current context; queries and granule creation do not | `event`, `virtual_memory` |
//! | in a forked child every call returns 3, except look-ups of names and versions | `context` |
//! | a fault on the device is sticky: every call fails, pending work never finishes | `stream` |
//!
//! Environment variables configure the mock driver for programs that cannot use [`MockDriver`]. They are read at the first `cuInit`:
//!
//! | variable | value | meaning |
//! | --- | --- | --- |
//! | `MOCK_DRIVER_COPY_DELAY` | `5` | each copy begins this many milliseconds late, so that it is still running after its enqueue |
//! | `MOCK_DRIVER_FAIL` | `cuMemMap:3=2,cuMemCreate:1+=801` | the third `cuMemMap` fails with code 2, every `cuMemCreate` with 801 |
//! | `MOCK_DRIVER_REPORT` | `stderr` | at the end of the process: frees with work in flight, misuses, calls by name |
//! | `MOCK_DRIVER_ABORT` | the name of a call | that call ends the process by SIGABRT |
//! | `MOCK_DRIVER_HANG` | the name of a call | that call never returns |
//! | `MOCK_DRIVER_ADVERSARIAL` | `ResetUnmaps,NoRegistering` | switches of [`Deviation`]: behavior that a driver may have and the mock driver lacks by default |
//!
//! An invalid setting is reported on stderr and fails `cuInit` with 1.
//!
//! It does not model kernels, graphs beyond a straight line of work, several processes, or device virtual memory.
//!
//! Like the real driver it trusts the pointers of its callers (invariant `call-I1`).
#![allow(unsafe_code)] // Implements a C library.
// Only tests use it, on 64-bit machines.
#![allow(
    clippy::cast_possible_truncation,
    clippy::missing_errors_doc,
    clippy::missing_panics_doc,
    missing_debug_implementations,
    clippy::print_stderr
)]

mod address_space;
mod adversarial;
mod call;
mod capture;
mod code;
mod context;
mod control;
mod copy;
mod counts;
mod device;
mod device_memory;
mod event;
mod faults;
mod memory;
mod mock;
mod settings;
mod stream;
mod symbols;
mod sync;
mod virtual_memory;

pub use adversarial::Deviation;
pub use code::Code;
pub use counts::Counts;
pub use mock::{HeldCall, HeldStream, MockDriver};
