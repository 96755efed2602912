//! pinpool for C and C++: the functions of `include/pinpool.h`.
//!
//! ```text
//!   pp_get ──▶ call (catches panics, turns failures into a status and a text)
//!                └─▶ slots: handle ─▶ pool ──get──▶ PinnedBuf ──▶ buffers_in_use: address ─▶ buffer
//!   pp_put ──▶ call ──▶ slots: handle ─▶ buffers_in_use: address ─▶ PinnedBuf ──drop──▶ the pool
//! ```
//!
//! | module | contains |
//! | --- | --- |
//! | `pool`, `buffer` | the functions on pools and on buffers |
//! | `log` | the callback for log lines |
//! | `version` | the version |
//! | `call` | the wrapper of every function, and the thread's last error |
//! | `status` | the status codes, and the code for each error |
//! | `config` | the string that a pool is opened with |
//! | `slots`, `slot_state` | handles of pools, and the end of destroyed pools |
//! | `buffers_in_use`, `asan` | the buffers in use, by address; their marks for AddressSanitizer |
//!
//! A handle is a number in the form of a pointer and is never dereferenced, so a destroyed or invalid handle is an error and not a
//! crash. No header precedes a buffer's bytes: the table finds a buffer by its address.
//!
//! - **capi-P1**: a pointer argument is null, or points to what its type and the header say for as long as the call runs. The
//!   caller upholds this; the functions check only for null.
#![allow(unsafe_code)] // A C interface consists of raw pointers.
#![allow(non_camel_case_types)] // The header uses these names.
#![allow(clippy::missing_errors_doc)] // Every function returns a status, which its docs list.

#[cfg(panic = "abort")]
compile_error!("no panic may end the process of a C caller: build with panic = \"unwind\"");

mod asan;
mod buffer;
mod buffers_in_use;
mod call;
mod config;
mod log;
mod pool;
mod slot_state;
mod slots;
mod status;
mod version;

pub use buffer::{
    CUevent_st, CUstream_st, PP_WAIT_DEFAULT, PP_WAIT_FOREVER, pp_adopt, pp_get, pp_get_with, pp_is_pinned, pp_put,
    pp_put_after_event, pp_put_after_stream, pp_record_event, pp_record_stream, pp_release_fn, pp_request_options,
    pp_try_get, pp_try_get_with,
};
pub use call::pp_last_error;
pub use log::{pp_log_fn, pp_log_level, pp_set_log};
pub use pool::{
    PP_NO_LIMIT, pp_maintain, pp_partition_open, pp_pool_close, pp_pool_destroy, pp_pool_open, pp_reserve,
    pp_set_max_bytes, pp_stats_json, pp_string_free, pp_trim,
};
pub use slots::pp_pool;
pub use status::{pp_status, pp_status_name};
pub use version::pp_version;
