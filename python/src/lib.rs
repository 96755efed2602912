//! The Python package `pinpool`: the pool and its buffers as Python objects.
//!
//! ```text
//!   Pool ──get──▶ Buffer ──buffer protocol, DLPack──▶ views: memoryview, NumPy, torch
//!                    └──────────── Memory ◀──────────────┘   returns when the buffer and all views are gone,
//!                                                            after the work on the recorded streams
//! ```
//!
//! | module | owns |
//! | --- | --- |
//! | `pool` | the base of the class `Pool`: settings, requests, statistics |
//! | `buffer` | the class `Buffer` and the buffer protocol |
//! | `memory` | one buffer of the crate, with its views and streams |
//! | `dlpack` | DLPack structures |
//! | `shared` | buffers that worker processes fill |
//! | `stream` | fences on streams of other libraries |
//! | `fences` | several fences as one, and the return of a buffer after them |
//! | `torch` | the functions through which torch's host allocator uses a pool |
//! | `pending` | a request that an asyncio task awaits |
//! | `decode` | decoders of the loader |
//! | `loader` | the loader: files, and batches read ahead |
//! | `labels` | labels of samples |
//! | `handle` | the pool behind several Python objects |
//! | `arguments` | conversion of arguments |
//! | `log` | log lines forwarded to Python's `logging` |
//! | `errors` | exceptions for errors of the crate |
//! | `interrupts` | waits that signals interrupt |
//! | `without_gil` | calls without the interpreter's lock (the GIL) |
//!
//! Methods pin, wait and make room for other pools without the GIL; calls from torch's allocator may hold the GIL. The pool
//! never calls Python (log lines are queued, wakers write to a socket), so none of its locks is held while a thread waits for
//! the GIL.
//!
//! Functions here forward log lines only on the main thread: when the interpreter exits, Python before 3.14 ends other threads
//! that wait for the GIL, and Rust frames cannot be unwound that way. Methods that need more Python code are written in Python.

use pyo3::prelude::*;

mod arguments;
mod buffer;
mod decode;
mod dlpack;
mod errors;
mod fences;
mod handle;
mod interrupts;
mod labels;
mod loader;
mod log;
mod memory;
mod pending;
mod pool;
mod shared;
mod stream;
mod torch;
mod without_gil;

#[pymodule(gil_used = false)]
mod _pinpool {
    #[pymodule_export]
    use super::{
        arguments::{_seconds, size},
        buffer::{_record_stream, Buffer},
        decode::Decoder,
        loader::{_default_threads, Reader, SampleCatalog},
        log::{_set_keeps_trace, _stop_lines, _take_lines, _wait_for_lines},
        pending::PendingRequest,
        pool::PoolCore,
        shared::{SharedBuffer, SharedPoolCore, SharedWorker},
        torch::{_free_torch_functions, _host_memory, _torch_functions},
    };

    #[pymodule_export]
    #[allow(non_upper_case_globals)]
    const __version__: &str = env!("CARGO_PKG_VERSION");
}
