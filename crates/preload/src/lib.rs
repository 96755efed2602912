//! Serves the pinned host memory of a CUDA program that knows nothing of pinpool: loaded by `LD_PRELOAD`, for
//! `pinpool run`.
//!
//! ```text
//!   program ──cudaHostAlloc──▶ CUDA runtime ──┐
//!   program ──cuMemHostAlloc──────────────────┤ linked, by dlsym, by cuGetProcAddress (symbols)
//!                                             ▼
//!            hooks: is there a pool for the current context? ──no──▶ the driver's own function
//!              │ yes                                            (the reason is logged once)
//!              ▼
//!            buffers ◀──get── the context's pool ──▶ source ──▶ the driver's cuMemHostAlloc
//!              │ cuMemFreeHost
//!              ▼
//!            fence: an event after all work of each known context ──▶ the pool reuses the memory once it has completed
//! ```
//!
//! | module | contains |
//! | --- | --- |
//! | `symbols` | how programs find the functions of `hooks` |
//! | `hooks` | the functions that replace the driver's functions, one table |
//! | `context_end` | the end of a context, and changes that no hook saw |
//! | `buffers` | allocation and free, the buffers in use by address |
//! | `registrations` | how much memory the program pins itself |
//! | `fence` | an event after all work of each known context |
//! | `source` | the memory of a pool: the driver's own pinned memory |
//! | `contexts` | the contexts of the process, their pools and events |
//! | `captures` | captures in progress, and the lock that keeps event records apart from them |
//! | `driver` | the driver's functions that this library calls |
//! | `lookup` | how the driver's functions are found |
//! | `lifetime`, `driver_blocks`, `process` | whether a context exists; the driver's blocks of the pools; whether the process is served |
//! | `log` | the log lines |
//! | `settings` | the variables of this library |
//!
//! Imports point down in this table.
//!
//! The functions of the CUDA runtime are not replaced. The runtime, linked statically or not, gets the driver's
//! functions by `dlsym` and `cuGetProcAddress`, so `cudaHostAlloc`, `cudaMallocHost` and `cudaFreeHost` end here, and their
//! return codes, their last error and the start of the runtime stay the runtime's own.
//!
//! Invariants:
//!
//! - **preload-I1**: a program calls a hook as the driver's function of that name, so its arguments meet the driver's conditions.
//! - **preload-I2**: the address in a row of the table of hooks is the driver's function of that name. It has the type of the
//!   hook or, for `cuCtxCreate`, a type with its arguments in the same registers. The driver is never unloaded.
//! - **preload-I3**: a buffer in the table of buffers belongs to the program from the request until the free that removes it
//!   from the table. Only that free returns the buffer, with a fence after all work that was enqueued before.
//! - **preload-I4**: a pool is not used after its context is gone: its source neither allocates nor releases memory, its
//!   buffers are leaked, and another pool serves later requests.
//! - **preload-I5**: locks are taken in this order: `PRIMARY_CONTEXTS`, the pool of a context, the state of a fence, `CAPTURES`,
//!   the `Lifetime` of a context. `BUFFERS`, `CONTEXTS`, `BLOCKS`, the spare events and the time of a
//!   wait that timed out are held for one access, and no driver call is made meanwhile.
#![allow(unsafe_code)] // Sits between a program and the driver's C interface.

mod buffers;
mod captures;
mod context_end;
mod contexts;
mod driver;
mod driver_blocks;
mod fence;
mod hooks;
mod lifetime;
mod log;
mod lookup;
mod process;
mod registrations;
mod settings;
mod source;
mod symbols;
