//! What a stream is called.
//!
//! | name | made of | another stream's |
//! | --- | --- | --- |
//! | [`number`] | its handle, an address | once it is destroyed, also while its work is still running |
//! | [`id`] | `cuStreamGetId` and the context | never, as long as the program runs |
//!
//! Figures show the number. Whatever lets memory go on the word of "the same stream" takes the id, and does without where
//! there is none: drivers before CUDA 12.0 do not tell. The function is found by name, since bindings may be older than
//! the driver.
#![allow(unsafe_code)] // Calls the driver.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use cudarc::driver::{CudaStream, sys};

use super::context::Home;
use crate::driver;
use crate::in_flight::StreamId;
use crate::sync::process::{AtomicU64, Ordering};

/// Handles that name a stream by what the caller is, not by what it is.
const LEGACY_BY_NAME: usize = 1;
const PER_THREAD: usize = 2;
/// Numbers of per-thread streams, above every address.
const PER_THREAD_BIT: u64 = 1 << 63;

/// As in the driver's header.
type GetId = unsafe extern "C" fn(sys::CUstream, *mut u64) -> c_int;

/// For readers. A handle is an address, and so is a context's: both are above the sink's numbers, which count from one.
pub(super) fn number(stream: &CudaStream) -> u64 {
    std::thread_local! {
        static THREAD: u64 = {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            // Relaxed: only that no number is given twice matters.
            NEXT.fetch_add(1, Ordering::Relaxed)
        };
    }
    match stream.cu_stream().addr() {
        // One in each context.
        0 | LEGACY_BY_NAME => stream.context().cu_ctx().addr() as u64,
        // One in each context and thread.
        PER_THREAD => PER_THREAD_BIT | THREAD.with(|thread| thread << 8) | (stream.context().ordinal() as u64 & 0xFF),
        handle => handle as u64,
    }
}

/// Which stream this is among all of the program. Asked of the driver each time: what was learnt of a handle before may
/// be another stream's. The context is current, and the stream does not capture: then the driver would not say.
pub(super) fn id(stream: &CudaStream, home: &'static Home) -> Option<StreamId> {
    static GET_ID: OnceLock<Option<GetId>> = OnceLock::new();
    let get_id = (*GET_ID.get_or_init(|| {
        let found = driver::symbol(c"cuStreamGetId")?;
        // SAFETY: the driver's function of this name has this type.
        Some(unsafe { std::mem::transmute::<NonNull<c_void>, GetId>(found) })
    }))?;
    let mut id = 0;
    // SAFETY: a live stream, and room for a number.
    let answer = unsafe { get_id(stream.cu_stream(), &raw mut id) };
    // A home is never freed, so its address stands for its context for ever (home H1).
    (answer == 0).then(|| StreamId::new(ptr::from_ref(home).addr(), id))
}
